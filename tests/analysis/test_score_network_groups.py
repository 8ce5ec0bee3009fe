"""Scores in the features of different networks are never paired."""

from __future__ import annotations

import json

import pytest
from analysis_runs import METRIC, write

import analysis
from analysis.comparison import compare
from analysis.comparison.results import Results
from analysis.runs.grouping import shared_label, short_labels


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


FIRST, SECOND = "digits-classifier@11111111", "digits-classifier@22222222"


# The last one is that of records that name no hash.
@pytest.mark.parametrize(("first", "groups"), [(SECOND, 1), (FIRST, 2), ("digits-classifier", 2)])
def test_scores_of_two_networks_are_two_groups(first, groups, tmp_path):
    runs = pair(tmp_path, first, SECOND)
    results = Results.of(tmp_path)
    assert len(results.groups) == groups and len(list(results.pairs())) == (groups == 1)
    assert ("22222222" in " ".join(group.label for group in results.groups)) == (groups == 2)
    text = compare.text(*runs)
    line = next(line for line in text.splitlines() if METRIC in line)
    assert line.endswith(")") == (groups == 1) and ("networks" in text) == (groups == 2)
    assert set(analysis.load(tmp_path)["networks"]) == {first, SECOND}


def test_runs_without_scores_in_features_stay_with_those_that_have_them(tmp_path):
    pair(tmp_path, None, "digits-classifier@22222222")
    (base,) = Results.of(tmp_path).groups
    assert base.baseline is not None and len(base.routed) == 1


def test_a_list_is_one_part_of_a_label():
    labels = ["dit, edm (train.betas=[0.9, 0.95], train.lr=1.0)", "dit, edm (train.betas=[0.9, 0.99], train.lr=1.0)"]
    assert list(short_labels(labels).values()) == ["dit, train.betas=[0.9, 0.95]", "dit, train.betas=[0.9, 0.99]"]
    assert shared_label(labels) == "edm, train.lr=1.0"
