"""One role per configuration key: the hash, the grouping of runs and budgets follow from it."""

import pytest

from experiments.config import Config, role
from experiments.config.compose import load


def test_every_key_has_one_role():
    roles = {
        "learns": ("train.lr", "seed", "backbone.name", "data.scale", "train.of_a_later_version", "unheard.of"),
        "routes": ("route", "routing.selection", "train.loss", "backbone.decoder.depth", "backbone.align.block"),
        "scores": ("guidance.scale", "eval.n"),
        "reports": ("train.compile", "train.tf32", "train.keep_every", "paths.runs"),
    }
    for expected, keys in roles.items():
        assert {key: role(key) for key in keys} == dict.fromkeys(keys, expected)


def test_reports_do_not_name_a_run_and_everything_else_does():
    values = load(["backbone=mamba", "route=2-8"]).to_dict()
    name = Config.from_dict(values).name
    reports = {"compile": "blocks", "tf32": False, "micro_batch": 4, "threads": 1, "save_every": 7}
    for key, value in (reports | {"lr": 0.5, "batch": 8, "clip": 3.0}).items():
        changed = Config.from_dict({**values, "train": {**values["train"], key: value}})
        assert (changed.name == name) == (key in reports), key


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
