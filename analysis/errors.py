"""The error of this package, and looking a name up with a suggestion."""

from collections.abc import Mapping
from typing import TypeVar

from routing.errors import UserError, suggest

T = TypeVar("T")


class AnalysisError(UserError):
    """Runs, tables or figures were asked for in a way that cannot be met."""


def pick(kind: str, name: str, choices: Mapping[str, T]) -> T:
    """Return the choice of that name; `AnalysisError` lists the names where there is none."""
    if name not in choices:
        names = ", ".join(choices) or "none"
        raise AnalysisError(f"no {kind} called {name!r}; there are {names}{suggest(name, choices)}")
    return choices[name]
