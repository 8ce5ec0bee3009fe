"""One role per configuration key: the hash, the grouping of runs and budgets follow from it."""

import pytest

from experiments.config import Config, role
from experiments.config.compose import load


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train.lr", "learns"),
        ("seed", "learns"),
        ("backbone.name", "learns"),
        ("backbone.decoder.depth", "routes"),
        ("backbone.align.block", "routes"),
        ("data.scale", "learns"),
        ("route", "routes"),
        ("routing.selection", "routes"),
        ("train.loss", "routes"),
        ("guidance.scale", "scores"),
        ("eval.n", "scores"),
        ("train.compile", "reports"),
        ("train.tf32", "reports"),
        ("train.keep_every", "reports"),
        ("paths.runs", "reports"),
        ("train.of_a_later_version", "learns"),
        ("unheard.of", "learns"),
    ],
)
def test_roles(key, expected):
    assert role(key) == expected


def test_reports_do_not_name_a_run_and_everything_else_does(tmp_path):
    values = Config.from_dict(default(tmp_path)).to_dict()
    name = Config.from_dict(values).name
    for key, other in {
        "compile": "blocks",
        "tf32": False,
        "micro_batch": 4,
        "threads": 1,
        "save_every": 7,
        "lr": 0.5,
        "batch": 8,
        "clip": 3.0,
    }.items():
        changed = Config.from_dict({**values, "train": {**values["train"], key: other}})
        assert (changed.name == name) == (role(f"train.{key}") == "reports"), key


def default(tmp_path):
    from experiments.config import load

    return load(["backbone=mamba", "route=2-8", f"paths.runs={tmp_path}"]).to_dict()


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("train.optimizer=muon", "optimizer"),
        ("backbone=mamba backbone.mixers=1", "mixers"),
        ("guidance.channels=1", "channels"),
    ],
)
def test_a_newer_option_is_hashed_only_at_other_values_than_its_default(word, key):
    words = word.split()
    group = words[-1].partition(".")[0]
    others = words[:-1]
    assert key in load(others).to_dict()[group] and key not in load(others).hashed()[group]
    assert key in load(words).hashed()[group]
