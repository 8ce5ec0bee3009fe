"""Grids end to end (marker `slow`): two steps at tiny through to their tables, cost and models at paper."""

import contextlib
import io

import pytest

from experiments.config import load
from sweeps import command as sweeps_command
from sweeps.plan import grid
from sweeps.plan.cells import expand
from sweeps.plan.cost import run_cost, training_macs
from sweeps.status import status
from sweeps.store import overrides
from sweeps.store.folder import Sweep

pytestmark = pytest.mark.slow
# Two steps and a few samples: what comes out means nothing, that it comes out is what is tested.
QUICK = [
    "seed=0", "train.steps=2", "train.batch=8", "train.save_every=1", "train.keep=5", "train.sample_every=0",
    "train.warmup=0", "sampler.steps=2", "eval.samples=20", "eval.batch=20", "eval.metrics=[fd]",
]  # fmt: skip
# What the other commands take.
QUICK_COMMANDS = ["samples=20", "step=1", "rounds=1", "batch=2"]
# One grid for each kind of stage, data set and method. All grids are composed in test_composition.py, and their tables
# have tests of their own.
GRIDS = [
    "bench", "evidence", "main_table", "masking", "one_two_routes", "repa", "search_route", "similarity", "sota",
    "study_jit", "text_to_image",
]  # fmt: skip
# Fewer cells where these do what others do.
FEWER = {"evidence": ["backbone=dit"], "main_table": ["backbone=dit,mamba"]}


@pytest.mark.filterwarnings("ignore:covariances of rank")
@pytest.mark.parametrize("name", GRIDS)
def test_two_steps_of_a_grid_at_tiny_make_its_tables(name, tmp_path, monkeypatch):
    from analysis import figures, tables
    from analysis.comparison.results import Results
    from experiments.training import run_evaluation as evaluation

    # Ten rows of pictures cost more than the steps; cluster=debug trains in this process.
    monkeypatch.setattr(evaluation, "COLUMNS", 1)
    monkeypatch.setattr(evaluation, "PREVIEW_COLUMNS", 1)

    runs = tmp_path / "runs"
    keys = {k for stage in grid.load(name).stages("tiny") for k in stage.set_keys()}
    words = list(QUICK) if grid.load(name).stages("tiny")[0].trains else []
    if words and ("data" not in keys or name == "study_jit"):
        words.append("data=digits")  # the quickest to score
    if name == "evidence":
        words.append("eval.every=1")  # a curve has more than one point
    if "search" in grid.load(name).raw:
        pytest.importorskip("optuna")
        words.append("--trials=2")
    words += FEWER.get(name, [])
    for index, stage in enumerate(grid.load(name).stages("tiny")):
        quick = [word for word in QUICK_COMMANDS if word.split("=")[0] in stage.set_keys()]
        words += [f"{stage.name}:{word}" if index else word for word in quick]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = sweeps_command.main(["launch", name, "cluster=debug", f"paths.runs={runs}", *words])
    assert code == 0, output.getvalue()[-4000:]
    rows, _ = status.statuses(Sweep(runs, name))
    assert {row.state for row in rows} == {"done"}
    expected = {cell.stage.name for cell in expand(grid.load(name))}
    assert {row.run.stage for row in rows} == expected

    # From these runs alone, without those of another grid.
    study = Results.of(runs, None)
    assert study.problems.empty
    for kind, what in (text.split() for text in grid.load(name).makes):
        if kind == "table":
            assert tables.make(what, study).rows, what
        elif kind == "figure":
            assert figures.FIGURES[what](study) is not None, what


def cells(name):
    """The overrides of a grid's training cells at paper scale, parents aside."""
    for cell in expand(grid.load(name), "paper"):
        if cell.stage.trains:
            yield [f"{k}={overrides.format_value(v)}" for k, v in cell.overrides.items() if k != "init"]


@pytest.mark.parametrize("name", grid.names())
def test_every_cell_at_paper_composes_costs_and_builds(name, built={}):  # noqa: B006
    import torch

    import backbones
    from experiments.config.model import model_arguments

    for words in cells(name):
        config = load(words)
        assert config.scale == "paper" and config.name
        cost, arguments = run_cost(config), model_arguments(config, config.data.describe())
        routed = config.resolved_route != "none" and config.routing.remove != "never"
        assert (cost.macs_routed < cost.macs_dense) == routed, words
        key = repr(sorted(arguments.items(), key=str))
        if key not in built:
            with torch.device("meta"):
                model = backbones.create(**arguments)
            built[key] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert built[key] == cost.params, (words, built[key], cost.params)
        assert training_macs(config) > 0
