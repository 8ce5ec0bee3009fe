"""Messages of the options layer: the key, the value and what was expected, in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt

from backbones.validation import Choices, OptionError, describe, validate, validate_value
from routing.errors import UserError

Word = Annotated[str, Choices(("red", "green"))]


@dataclass(frozen=True)
class Inner:
    low: Annotated[int, Ge(1)] = 1
    high: int = 9

    def check_consistency(self) -> None:
        if self.low > self.high:
            raise UserError(f"low={self.low}: expected at most high={self.high}")


@dataclass(frozen=True)
class Outer:
    inner: Annotated[Inner | None, "Documented."] = None


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Annotated[float | None, Gt(0)], "a number > 0 or null"),
        (Annotated[Annotated[float, Ge(0)] | None, Gt(-1)], "a number > -1 and >= 0 or null"),
        (Annotated[int, Ge(1)] | Literal["auto"] | None, "an integer >= 1 or auto or null"),
        (tuple[Word, ...] | Word, "one of red, green, or a list of these"),
        (tuple[int, int], "a list of 2, each an integer"),
    ],
)
def test_allowed_values_in_words(annotation: Any, words: str) -> None:
    assert describe(annotation) == words


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinity_is_refused_as_not_finite(value: float) -> None:
    with pytest.raises(OptionError, match="lr=-?(inf|nan): expected a finite number > 0 or null"):
        validate_value(Annotated[float | None, Gt(0)], value, "lr")
    with pytest.raises(OptionError, match="each a finite number"):
        validate_value(tuple[float, float], [0.5, value], "betas")


def test_a_finite_value_out_of_range_is_not_called_infinite() -> None:
    with pytest.raises(OptionError) as caught:
        validate_value(Annotated[float, Gt(0)], -1, "lr")
    assert str(caught.value) == "lr=-1: expected a number > 0"


def test_a_dataclass_is_validated_inside_annotated_and_union() -> None:
    assert validate(Outer, {"inner": {"low": 2}}) == Outer(Inner(2))
    assert validate(Outer, {"inner": None}) == Outer()
    with pytest.raises(OptionError, match=r"^group\.inner\.low=0: expected an integer >= 1$"):
        validate(Outer, {"inner": {"low": 0}}, "group.")
    with pytest.raises(OptionError, match=r"^unknown key inner\.lo; did you mean low\?$"):
        validate(Outer, {"inner": {"lo": 1}})
    with pytest.raises(OptionError, match="^inner=5: expected a mapping of low, high or null$"):
        validate(Outer, {"inner": 5})


@dataclass(frozen=True)
class Required:
    inner: Annotated[Inner, "Documented."]


def test_another_type_than_a_mapping_is_refused() -> None:
    for value in (5, None, [1], "low"):
        with pytest.raises(OptionError, match="^inner=.*: expected a mapping of low, high$"):
            validate(Required, {"inner": value})


def test_a_contradiction_names_the_key_as_it_is_typed() -> None:
    with pytest.raises(UserError, match=r"^inner\.low=3: expected at most high=2$"):
        validate(Outer, {"inner": {"low": 3, "high": 2}})


def test_a_message_is_one_line_whatever_the_value() -> None:
    with pytest.raises(OptionError) as caught:
        validate(Inner, {"low": "a\nb\x1b[31m ä"})
    assert str(caught.value) == r"low=a\nb\x1b[31m ä: expected an integer >= 1"
    with pytest.raises(OptionError, match=r"unknown key a\\nb"):
        validate(Inner, {"a\nb": 1})
