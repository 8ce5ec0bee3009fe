"""Scores in the features of different networks are never paired."""

from __future__ import annotations

import json

import pytest
from analysis_runs import METRIC, write

import analysis
from analysis.comparison import compare
from analysis.comparison.results import Results


def features_of(folder, network):
    """Write a network into a run's scores; None: as records that name none."""
    path = folder / "scores.jsonl"
    lines = [json.loads(line) | {"features": network, "reference": None} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def pair(tmp_path, first, second):
    runs = [write(tmp_path, route=route) for route in ("none", "2-8")]
    for run, network in zip(runs, (first, second), strict=True):
        features_of(run, network)
    return runs


def test_scores_of_one_network_are_paired(tmp_path):
    first, second = pair(tmp_path, "digits-classifier@11111111", "digits-classifier@11111111")
    (base,) = Results.of(tmp_path).groups
    assert base.baseline is not None and len(base.routed) == 1
    line = next(text for text in compare.text(first, second).splitlines() if METRIC in text)
    assert line.endswith(")")
    assert set(analysis.load(tmp_path)["networks"]) == {"digits-classifier@11111111"}


@pytest.mark.parametrize("first", ["digits-classifier@11111111", "digits-classifier"])  # another, and without a hash
def test_scores_of_two_networks_are_two_groups(first, tmp_path):
    runs = pair(tmp_path, first, "digits-classifier@22222222")
    study = Results.of(tmp_path)
    assert len(study.groups) == 2 and not list(study.pairs())
    assert "22222222" in " ".join(base.label for base in study.groups)
    text = compare.text(*runs)
    line = next(line for line in text.splitlines() if METRIC in line)
    assert "(+" not in line and "(-" not in line
    assert "networks" in text


def test_runs_without_scores_in_features_stay_with_those_that_have_them(tmp_path):
    pair(tmp_path, None, "digits-classifier@22222222")
    (base,) = Results.of(tmp_path).groups
    assert base.baseline is not None and len(base.routed) == 1
