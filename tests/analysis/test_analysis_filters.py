"""Filters: the same words choose runs on the command line and in `analysis.load`."""

import json

import pytest
from analysis_runs import write, write_pairs

import analysis
from analysis.command import main


@pytest.fixture
def runs(tmp_path):
    """Dense and routed runs of two backbones, a second rate, and a group without routed runs."""
    write_pairs(tmp_path, ("dit", "mamba"), seeds=1)
    write(tmp_path, backbone="dit", route="none", seed=1)
    write(tmp_path, backbone="rwkv", route="none")
    write(tmp_path, backbone="dit", route="none", train__lr=0.01)
    return tmp_path


def names(frame):
    return set(frame["run"])


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"backbone": "dit,rwkv"}, lambda row: row.backbone in ("dit", "rwkv")),
        ({"backbone": ["dit", "rwkv"], "seed": 1}, lambda row: row.seed == 1),
        ({"train.lr": "1e-2"}, lambda row: row.lr == 0.01),
        ({"lr": 0.01}, lambda row: row.lr == 0.01),
        ({"where": "lr < 3e-3"}, lambda row: row.lr < 3e-3),
        ({"where": "1e-3 < train.lr <= 0.01 or seed == 1"}, lambda row: row.lr > 1e-3 or row.seed),
        ({"where": "not backbone in ['dit'] and seed == 0"}, lambda row: row.backbone != "dit"),
        ({"selection": "null"}, lambda row: row.route == "none"),
    ],
)  # fmt: skip
def test_a_filter_keeps_the_runs_that_a_loop_keeps(runs, filters, expected):
    every = analysis.load(runs).rename(columns={"config.train.lr": "lr"})
    kept = {row.run for row in every.itertuples() if expected(row)}
    assert 0 < len(kept) < len(every)
    assert names(analysis.load(runs, **filters)) == kept


def test_several_folders_are_one_frame_with_their_own_labels(runs, tmp_path):
    more = tmp_path / "more"
    write(more, backbone="dit", route="3-8")
    both = analysis.load([runs, more], backbone="dit")
    assert {"none", "2-8", "3-8"} == set(both["route"]) and len(both) == len(set(both["path"]))
    # Of one backbone and rate there is one group, whose label needs no more than the head.
    one = analysis.load(runs, backbone="mamba")
    assert one["group"].nunique() == 1 and "(" not in one["group"].iloc[0]


def launched(root, grid, runs, **varies):
    record = {name: {"name": name, "folder": f"runs/{name}", "varies": varies} for name in runs}
    folder = root / ".sweeps" / grid
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"format": 1, "runs": record}))
    return folder


def test_a_grid_names_its_runs_and_a_search_shows_on_request_only(runs, capsys):
    frame = analysis.load(runs)
    trials = names(frame[frame["config.train.lr"] == 0.01])
    pairs = names(frame[frame["backbone"] == "mamba"])
    (launched(runs, "lr_search", trials) / "search").mkdir()
    launched(runs, "pairs", pairs, route="2-8")
    assert names(analysis.load(runs, grid="pairs")) == pairs
    assert main(["tables", str(runs), "--only", "main", "--print"]) == 0
    printed = capsys.readouterr()
    assert "left out: 1 runs of searches" in printed.err and "train.lr=0.01" not in printed.out
    # The dense runs of rwkv have no pair.
    assert "rwkv" not in printed.out and "without both dense and routed runs: 1" in printed.out
    assert main(["tables", str(runs), "lr_search", "--only", "all_scores", "--print"]) == 0
    assert "dit-T/1" in capsys.readouterr().out
    assert main(["tables", str(runs), "--all", "--only", "main", "--print"]) == 0
    printed = capsys.readouterr()
    assert "rwkv" in printed.out and "left out" not in printed.err


def test_a_learning_rate_sweep_counts_as_exploratory_unless_another_grid_has_the_run(runs):
    from analysis.runs.filters import exploratory

    frame = analysis.load(runs)
    dit = names(frame[frame["backbone"] == "dit"])
    launched(runs, "rates", dit, **{"train.lr": "0.01"})
    assert set(frame.loc[exploratory(frame), "run"]) == dit
    shared = set(list(dit)[:1])
    launched(runs, "main", shared, route="2-8")
    assert set(frame.loc[exploratory(frame), "run"]) == dit - shared
