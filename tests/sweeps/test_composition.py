"""Configurations that share a composed base equal those that Hydra composes one by one."""

import itertools

import pytest

from experiments.config import GROUPS, compose, load
from routing.errors import UserError
from sweeps import SweepError
from sweeps.plan import composition, grid
from sweeps.plan.cells import expand
from sweeps.store.overrides import format_overrides


def training_cells(name, scale):
    try:
        cells = expand(grid.load(name), scale)
    except SweepError as error:
        assert "has no scale" in str(error)
        return
    for cell in cells:
        if cell.stage.trains:
            yield format_overrides(cell.overrides)


def check(overrides):
    expected = compose.compose([compose.normalize(text) for text in overrides])
    # Also the types: 1 and 1.0 have different hashes.
    assert repr(composition.compose_cached(overrides)) == repr(expected), overrides


@pytest.mark.slow
def test_cells_with_different_groups_or_keys_are_what_hydra_composes():
    distinct = {}
    for name, scale in itertools.product(grid.names(), grid.SCALES):
        for overrides in training_cells(name, scale):
            # Values of single keys go through one function whatever they are.
            parts = [text if text.partition("=")[0] in GROUPS else text.partition("=")[0] for text in overrides]
            distinct.setdefault(tuple(parts), overrides)
    for overrides in list(distinct.values())[::6]:  # a sixth takes Hydra long enough
        check(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.sigma_data=0.25"],  # data.sigma_data refers to it
        ["data.sigma_data=0.25", "objective.sigma_data=0.75"],
        ["experiment=sit", "scale=small", "train.lr=1e-3"],
        ["train.lr=1e-3", "data=fashion", "eval=none"],
        ["route=[2-8,none]"],
        ["paths.runs='a b,c'", 'paths.cache="~/x"'],
        ["paths.runs=~/runs", "train.clip=null", "eval.metrics=[fd]"],
        ["backbone.decoder={depth:2,width:64,heads:4}"],
    ],
)
def test_interpolations_quotes_and_nested_values_are_those_of_hydra(overrides):
    check(overrides)


@pytest.mark.parametrize(
    "overrides",
    [["backbone=mmaba"], ["train.stesp=3"], ["train.lr=1,2"], ["data=${nope}"], ["route=8-2"], ["init=no/where"]],
)
def test_invalid_overrides_have_the_message_of_a_single_run(overrides):
    with pytest.raises(UserError) as single:
        load(overrides)
    with pytest.raises(UserError) as shared:
        composition.load_config(overrides)
    assert str(shared.value) == str(single.value)
    assert type(shared.value) is type(single.value)
