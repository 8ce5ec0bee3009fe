"""Every option with a fixed set of words refuses values of other types and lists the words."""

import pytest

from backbones.validation import OptionError, choices, describe, fields_of, validate
from experiments.config import groups
from experiments.options.training import TrainOptions

CLASSES = {TrainOptions}
for group in ("data", "objective", "sampler", "guidance", "eval"):
    for entry in groups.names(group):
        CLASSES.update(groups.option_classes(group, entry))
OPTIONS = []
for options in sorted(CLASSES, key=lambda cls: cls.__name__):
    for field in fields_of(options).values():
        if choices(field.annotation):
            OPTIONS.append(pytest.param(options, field, id=f"{options.__name__}.{field.name}"))


def test_options_are_compared_at_all():
    names = [option.id for option in OPTIONS]
    assert len(names) > 12 and "TrainOptions.precision" in names and "EvalOptions.labels" in names


@pytest.mark.parametrize(("options", "field"), OPTIONS)
@pytest.mark.parametrize("value", [5.5, True, [["x"]], {"x": 1}, "nonsense"])
def test_a_value_of_another_type_is_refused(options, field, value):
    if isinstance(value, bool) and "true or false" in describe(field.annotation):
        pytest.skip("this option also takes true and false")
    with pytest.raises(OptionError) as caught:
        validate(options, {field.name: value}, "group.")
    assert str(caught.value).startswith(f"group.{field.name}=")
    assert choices(field.annotation)[0] in str(caught.value)


@pytest.mark.parametrize("value", ["off", "no", 0, "on", 1])
def test_words_are_no_truth_values(value):
    with pytest.raises(OptionError, match=r"train.tf32=.*: expected true or false"):
        validate(TrainOptions, {"tf32": value}, "train.")
