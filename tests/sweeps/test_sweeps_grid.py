"""Grids and overrides: expansion, a user's words, refusals."""

import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_lab import yaml_grid

from analysis.figures import FIGURES
from analysis.tables import TABLES
from experiments.config import load
from sweeps import SweepError
from sweeps.plan import grid
from sweeps.plan.cells import expand
from sweeps.store import overrides
from sweeps.store.overrides import Typed


def varied(cells):
    return [tuple(overrides.format_value(v) for v in c.varies.values()) for c in cells]


def test_cells_zip_and_axes_multiply_and_seeds_are_outermost(tmp_path):
    chosen = yaml_grid(
        tmp_path, cells=[{"backbone": "dit"}, {"backbone": "rwkv"}], axes={"route": ["none", "2-8"]},
        zip={"size": ["T/1", "T/2"], "train.lr": [1, 2]}, seeds=[0, 1],
    )  # fmt: skip
    cells = expand(chosen)
    assert len(cells) == 2 * 2 * 2 * 2
    assert varied(cells)[:3] == [
        ("dit", "T/1", "1", "none", "0"), ("dit", "T/1", "1", "2-8", "0"), ("dit", "T/2", "2", "none", "0"),
    ]  # fmt: skip
    assert [c.varies["seed"] for c in cells] == [0] * 8 + [1] * 8
    assert cells[0].label == "backbone=dit size=T/1 train.lr=1 route=none seed=0"


def test_a_scale_merges_bases_and_axes_and_replaces_the_rest(tmp_path):
    chosen = yaml_grid(
        tmp_path, base={"a": 1, "b": 2}, axes={"route": ["none"], "x": [1]}, cells=[{"c": 1}],
        scales={"paper": {"base": {"b": 3, "a": None}, "axes": {"x": [1, 2]}, "cells": [{"c": 5}], "seeds": [7]}},
    )  # fmt: skip
    (tiny,) = expand(chosen)
    assert {k: overrides.format_value(v) for k, v in tiny.overrides.items()} == {
        "scale": "tiny", "a": "1", "b": "2", "c": "1", "route": "none", "x": "1", "seed": "0"
    }  # fmt: skip
    first, second = expand(chosen, "paper")
    assert "a" not in first.overrides and first.overrides["b"] == 3 and second.overrides["x"] == 2
    assert first.overrides["c"] == 5 and first.overrides["seed"] == 7


def test_a_users_values_replace_axes_pick_rows_or_become_an_axis(tmp_path):
    chosen = yaml_grid(
        tmp_path, cells=[{"backbone": "dit", "rate": 0.5}, {"backbone": "rwkv"}], axes={"route": ["none"]},
        zip={"size": ["S", "B"], "lr": [1, 2]},
    )  # fmt: skip

    def run(*words):
        return expand(chosen, "tiny", overrides.parse(words))

    assert varied(run("route=2-8,auto", "backbone=rwkv", "size=B")) == [
        ("rwkv", "B", "2", "2-8", "0"), ("rwkv", "B", "2", "auto", "0")
    ]  # fmt: skip
    assert {c.overrides["seed"] for c in run("seed=3,4")} == {3, 4}
    assert [overrides.format_value(c.overrides["new"]) for c in run("new=a,b", "backbone=dit", "size=S")] == ["a", "b"]
    assert all(overrides.format_value(c.overrides["new"]) == "[1,2]" for c in run("new=[1,2]"))
    # A row without the key belongs to every value of it.
    assert len(run("rate=0.5", "size=S")) == 2


@pytest.mark.parametrize(("typed", "expected"), [("5", ["5", "5"]), ("5,6", ["5", "6"] * 2), ("50", ["50", "null"])])
def test_an_option_that_picks_no_row_is_set_in_all(typed, expected, tmp_path):
    chosen = yaml_grid(tmp_path, cells=[{"backbone": "dit", "sampler.steps": 50}, {"backbone": "rwkv"}])
    cells = expand(chosen, "tiny", overrides.parse([f"sampler.steps={typed}"]))
    assert [overrides.format_value(c.overrides.get("sampler.steps")) for c in cells] == expected


def test_later_stages_start_from_the_runs_they_name(tmp_path):
    chosen = yaml_grid(
        tmp_path, axes={"route": ["none", "auto"]}, base={"train.lr": 1},
        stages=[
            {"name": "finetune", "of": "train", "where": {"route": "auto"},
             "base": {"init": "{parent}", "route": "none", "train.lr": 2}},
            {"name": "score", "of": "finetune", "command": "evaluate", "args": ["{parent}"], "axes": {"w": [1, 2]},
             "scales": {"small": {"of": "train", "name": "first"}}},
            {"name": "reseeded", "of": "train", "where": {"route": "none"}, "axes": {"seed": [3]}},
        ],
    )  # fmt: skip
    small = [c for c in expand(chosen, "small") if c.stage.name == "first"]
    assert [c.parent for c in small] == [0, 0, 1, 1]
    cells = expand(chosen)
    assert [c.stage.name for c in cells] == ["train", "train", "finetune", "score", "score", "reseeded"]
    fine = cells[2]
    assert fine.parent == 1 and fine.overrides["train.lr"] == 2 and fine.overrides["route"] == "none"
    assert overrides.format_value(fine.overrides["scale"]) == "tiny" and fine.stage.trains
    assert cells[4].parent == 2 and cells[4].stage.args == ("{parent}",) and not cells[4].stage.trains
    assert dict(cells[4].overrides) == {"w": 2} and cells[5].overrides["seed"] == 3


# A dense fine-tune at its own rate, scored at its own guidance.
OWN_VALUES = [
    {"name": "tune", "of": "train", "base": {"init": "{parent}", "route": "none", "train.lr": 2}},
    {"name": "score", "of": "tune", "command": "evaluate", "args": ["{parent}"], "base": {"samples": 9}, "axes": {"w": [1]}},
]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ["auto 1", "none 2", "9 1"]),
        ("route=2-8 train.lr=5", ["2-8 5", "none 2", "9 1"]),
        ("route=2-8,4-8", ["2-8 1", "4-8 1", "none 2", "none 2", "9 1", "9 1"]),  # values do not cross
        ("tune:route=2-8", ["auto 1", "2-8 2", "9 1"]),
        ("train:route=4-8 tune:route=2-8 tune:train.lr=3,4", ["4-8 1", "2-8 3", "2-8 4", "9 1", "9 1"]),
        ("score:w=2,3 score:samples=5", ["auto 1", "none 2", "5 2", "5 3"]),
    ],
)
def test_an_override_applies_to_the_first_stage_or_to_the_one_that_it_names(words, expected, tmp_path):
    chosen = yaml_grid(tmp_path, base={"route": "auto", "train.lr": 1}, stages=OWN_VALUES)
    seen = []
    for cell in expand(chosen, "tiny", overrides.parse(words.split())):
        keys = ("route", "train.lr") if cell.stage.trains else ("samples", "w")
        seen.append(" ".join(overrides.format_value(cell.overrides[key]) for key in keys))
    assert seen == expected


def test_what_a_later_stage_does_not_set_it_has_from_its_parent(tmp_path):
    chosen = yaml_grid(tmp_path, base={"train.lr": 1}, stages=OWN_VALUES)
    first, tune, _ = expand(chosen, "tiny", overrides.parse(["train.steps=20", "train.lr=5"]))
    assert (first.overrides["train.steps"], tune.overrides["train.steps"]) == ("20", "20")
    assert (first.overrides["train.lr"], tune.overrides["train.lr"]) == ("5", 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("samples=5", "samples= is a key of stage score: expected score:samples="),
        ("tun:route=none", "tun:route: stage 'tun': expected one of train, tune, score; did you mean tune?"),
        ("tune:cluster.gpus=2", "tune:cluster.gpus: expected without a stage"),
        ("tune:paths.runs=x", "tune:paths.runs: expected without a stage"),
        ("route=none train:route=2-8", "route of stage train is given twice"),
        ("tune:route=none tune:route=2-8", "tune:route is given twice"),
    ],
)
def test_an_override_of_no_stage_is_refused(words, message, tmp_path):
    chosen = yaml_grid(tmp_path, base={"train.lr": 1}, stages=OWN_VALUES)
    with pytest.raises(SweepError, match=re.escape(message)):
        expand(chosen, "tiny", overrides.parse(words.split()))


def test_values_are_written_as_hydra_reads_them():
    for value, text in (
        (None, "null"), (True, "true"), (1e-4, "0.0001"), ("2-8@0.75", "2-8@0.75"), ([0.9, 0.95], "[0.9,0.95]"),
        ("", '""'), ("/home/j\u00fc b", '"/home/j\u00fc b"'), ({"a": 1}, "{a:1}"), (Typed("'x'"), "'x'"),
    ):  # fmt: skip
        assert overrides.format_value(value) == text
    assert load(['paths.runs="/home/j\u00fc b"']).paths.runs == "/home/j\u00fc b"


@settings(max_examples=40)
@given(st.text("\\\"' \tab,=[{", min_size=1))
def test_any_text_is_read_back_by_hydra(value):
    parsed = OverridesParser.create().parse_override(f"k={overrides.format_value(value)}").value()
    assert str(parsed) == value


def test_every_grid_of_the_project_names_what_it_makes():
    known = {"table": TABLES, "figure": FIGURES}
    for name in grid.names():
        loaded = grid.load(name)
        assert loaded.makes and loaded.title != name
        for kind, made in map(str.split, loaded.makes):
            assert kind not in known or made in known[kind], f"{name} makes {made}"
    fig8 = expand(grid.load("route_placement"))
    assert len(fig8) == 17 and {c.varies["route"] for c in fig8} >= {"0-2", "0-10", "7-8", "1-8", "2-8"}


@pytest.mark.parametrize("text", ["010", "0_10"])
def test_a_number_with_a_leading_zero_is_read_as_on_a_command_line(text, tmp_path):
    """YAML 1.1 reads 010 as 8."""
    (tmp_path / "g.yaml").write_text(f"base: {{train.steps: {text}}}\nseeds: [{text.replace('_', '')}]\n")
    chosen = grid.load(str(tmp_path / "g.yaml"))
    (cell,) = expand(chosen)
    assert cell.overrides["train.steps"] == text and cell.varies["seed"] == 10
