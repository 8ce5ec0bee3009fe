"""What is composed once and changed by single keys equals what Hydra composes from the same words."""

import itertools

import pytest
from omegaconf import OmegaConf

from experiments.config import GROUPS, compose
from experiments.config.overrides import normalize
from sweeps import SweepError
from sweeps.plan import grid
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
    composed = compose.compose_by_hydra(tuple(normalize(text) for text in overrides))
    expected = OmegaConf.to_container(composed, resolve=True)
    values = compose.compose(overrides)
    # Also the types: 1 and 1.0 have different hashes.
    assert repr({key: values[key] for key in expected}) == repr(expected), overrides


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
