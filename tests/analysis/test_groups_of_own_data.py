"""Runs on a user's own files are compared where those are the same, however their path was typed."""

from __future__ import annotations

import json

import pytest
from analysis_runs import write, write_weights

import analysis


def run(root, seed, path, fingerprint, test=None):
    """A run whose summary, or in earlier versions its weights, says what lay at the path."""
    folder = write(root, seed=seed, data={"name": "latents", "path": path, "test": test, "vae": "auto"})
    summary = json.loads((folder / "summary.json").read_text())
    if fingerprint == "in the weights":
        write_weights(folder, data={"fingerprint": "aaaa"})
    else:
        summary["data_fingerprint"] = fingerprint
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("runs", "groups"),
    [
        ([("d", "aaaa"), ("./d/", "aaaa"), ("/home/link", "aaaa"), ("d", "in the weights")], 1),
        ([("d", "aaaa"), ("d", "bbbb")], 2),
        ([("d", "aaaa"), ("e", "bbbb")], 2),
        ([("d", None), ("d/", None), ("e/../d", None)], 1),
        ([("d", None), ("e", None)], 2),
        ([("d", "aaaa-cccc", "t"), ("d", "aaaa-cccc", "./t")], 1),
    ],
)
def test_runs_on_the_same_files_are_one_group(tmp_path, runs, groups):
    for seed, values in enumerate(runs):
        run(tmp_path, seed, *values)
    assert analysis.load(tmp_path)["group"].nunique() == groups
