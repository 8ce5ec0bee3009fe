"""How options are refused: one sentence with what is wrong and what to type (no torch here)."""

from __future__ import annotations

import math

from routing.errors import UserError, suggest


class DiffusionError(UserError):
    """A setting of an objective, a sampler or a guidance that cannot work."""


def require(ok: bool, message: str) -> None:
    """Raise `DiffusionError` with `message` unless `ok`."""
    if not ok:
        raise DiffusionError(message)


def one_of(key: str, value: str, options: tuple[str, ...]) -> None:
    """Refuse a value that is not among `options`, with the closest one."""
    hint = suggest(value, options)
    require(value in options, f"{key}={value}: choose one of {', '.join(options)}{hint}")


def positive(key: str, value: float) -> None:
    """Refuse what is no finite number above 0."""
    require(
        isinstance(value, int | float) and math.isfinite(value) and value > 0,
        f"{key}={value}: a positive number is needed",
    )
