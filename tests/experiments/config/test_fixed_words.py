"""Every key with a fixed set of words refuses values of other types and lists the words."""

import dataclasses

import pytest

from experiments.config.schema import TrainConfig
from experiments.data import data_options, image_options
from experiments.data.latent_options import LatentsOptions
from experiments.options.diffusion import OPTIONS
from experiments.options.evaluation import EvalOptions
from experiments.options.fields import ConfigError, build, keys_of
from routing.errors import UserError

CLASSES = [
    EvalOptions,
    LatentsOptions,
    image_options.TorchvisionOptions,
    TrainConfig,
    *(kind for group in OPTIONS.values() for kind in group.values()),
]
KEYS = [
    (cls, name)
    for cls in CLASSES
    for name, (kind, key) in keys_of(cls).items()
    if key.among and kind is str
]


def test_keys_are_compared_at_all():
    assert len(KEYS) > 12
    assert (EvalOptions, "labels") in KEYS and (LatentsOptions, "scaled") in KEYS


@pytest.mark.parametrize(("cls", "name"), KEYS)
@pytest.mark.parametrize("value", [5, 0.5, True, ["x"], {"x": 1}, b"x", "nonsense"])
def test_a_value_of_another_type_is_refused(cls, name, value):
    key = keys_of(cls)[name][1]
    with pytest.raises(UserError, match=rf"{name}=.*expected one of {key.among[0]}"):
        if cls is TrainConfig:
            build(cls, {name: value}, "train.")
        else:
            cls(**{name: value})


@pytest.mark.parametrize("name", ["flip", "kind", "scaled"])
@pytest.mark.parametrize("value", [5, False, ["auto"]])
def test_words_of_data_are_listed_too(name, value):
    with pytest.raises(UserError, match=rf"data\.{name}=.*expected one of auto"):
        data_options.parse({"name": "latents", name: value})


@pytest.mark.parametrize(
    ("typed", "tip"),
    [("off", "false"), ("no", "false"), (0, "false"), ("on", "true"), ("Yes", "true"), (1, "true")],
)
def test_the_tip_for_a_truth_value_is_not_its_opposite(typed, tip):
    for key in ("tf32", "graphs"):
        with pytest.raises(ConfigError, match=rf"expected true or false; try train\.{key}={tip}$"):
            build(TrainConfig, {key: typed}, "train.")


def test_a_word_that_is_no_truth_value_gets_no_tip():
    defaults = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
    assert defaults["tf32"] is True
    with pytest.raises(ConfigError, match=r"tf32=maybe: expected true or false$"):
        build(TrainConfig, {"tf32": "maybe"}, "train.")


@pytest.mark.parametrize(("value", "word"), [(False, "no"), (True, "yes")])
def test_a_bare_word_of_yaml_is_to_be_quoted(value, word):
    with pytest.raises(
        UserError, match=rf"expected one of auto yes no; in YAML, quote .*'{word}'$"
    ):
        data_options.parse({"name": "latents", "scaled": value})
