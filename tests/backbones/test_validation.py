"""Messages of the options layer: the key, the value and what was expected, in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt

from backbones.validation import Choices, describe, validate_value
from routing.errors import UserError

Word = Annotated[str, Choices(("red", "green"))]


@dataclass(frozen=True)
class Inner:
    low: Annotated[int, Ge(1)] = 1
    high: int = 9

    def check_consistency(self) -> None:
        if self.low > self.high:
            raise UserError(f"low={self.low}: expected at most high={self.high}")


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


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (Annotated[float | None, Gt(0)], math.inf, "key=inf: expected a finite number > 0 or null"),
        (tuple[float, float], [0.5, math.nan], "key=[0.5,nan]: expected a list of 2, each a finite number"),
        (Annotated[float, Gt(0)], -1, "key=-1: expected a number > 0"),
        (Inner, 5, "key=5: expected a mapping of low, high"),
        (Inner | None, {"low": 0}, "key.low=0: expected an integer >= 1"),
        (Inner | None, {"lo": 1}, "unknown key key.lo; did you mean low?"),
        (Inner | None, {"low": 3, "high": 2}, "key.low=3: expected at most high=2"),
        (Annotated[Inner | None, "Documented."], {"low": 0}, "key.low=0: expected an integer >= 1"),
        (Inner, {"low": "a\nb\x1b[31m"}, r"key.low=a\nb\x1b[31m: expected an integer >= 1"),  # one line
    ],
)
def test_an_error_names_the_key_the_value_and_what_was_expected(annotation: Any, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate_value(annotation, value, "key")
    assert str(caught.value) == message
