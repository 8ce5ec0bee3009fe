"""A pair of runs from two versions of the code is named under every table that uses it."""

import json

import pytest
from analysis_runs import write

import analysis
from analysis.comparison.results import Results
from analysis.tables.code_versions import mixed_seeds

FIRST, SECOND = "1" * 40, "2" * 40


def written(root, commit, **values):
    folder = write(root, **values)
    environment = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**environment, "git": commit}))
    return folder


@pytest.fixture
def runs(tmp_path):
    for seed in range(3):
        written(tmp_path, FIRST, route="none", seed=seed)
        written(tmp_path, SECOND if seed == 1 else FIRST, route="2-8", seed=seed)
        written(tmp_path, FIRST, backbone="mamba", route="none", seed=seed)
        written(tmp_path, FIRST, backbone="mamba", route="2-8", seed=seed)
    return tmp_path


def test_the_seed_is_named(runs):
    results = Results.of(runs)
    pairs = {group.backbone: mixed_seeds(results, group, routed) for group, _, routed in results.pairs()}
    assert pairs == {"dit": [1], "mamba": []}
    for name in ("main", "summary", "differences", "speedup", "all_scores"):
        notes = [note for note in analysis.tables.make(name, results).notes if "two versions of the code" in note]
        (note,) = notes
        assert note.endswith("digits, edm, scale tiny, 2-8: dit-T/1 seeds 1.")
        assert "mamba" not in note
    assert not any("versions" in note for note in analysis.tables.make("throughput", results).notes)


def test_the_run_that_is_compared_counts_not_a_longer_one_of_its_seed(tmp_path):
    written(tmp_path, FIRST, route="none")
    written(tmp_path, FIRST, route="2-8")
    # Trained further by other code and scored at 800 alone: it is no part of the pair at 400.
    written(tmp_path, SECOND, route="2-8", train__steps=800, evaluations=1)
    results = Results.of(tmp_path)
    ((group, _, routed),) = results.pairs()
    assert routed.step == 400 and mixed_seeds(results, group, routed) == []
