"""One role per configuration key: the hash, the grouping of runs and budgets follow from it."""

import pytest

from experiments.config import role
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


NEWER = [
    ("train.optimizer=muon", "optimizer"),
    ("backbone=mamba backbone.mixers=1", "mixers"),
    ("guidance.channels=1", "channels"),
]


@pytest.mark.parametrize(("word", "key"), NEWER)
def test_a_newer_option_is_hashed_only_at_other_values_than_its_default(word, key):
    *others, changed = word.split()
    group = changed.partition(".")[0]
    assert key in load(others).to_dict()[group] and key not in load(others).hashed[group]
    assert key in load([*others, changed]).hashed[group]
