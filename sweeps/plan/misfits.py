"""Errors of cells that a grid may leave out (`fits:`)."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.data.data_options import ShapeError
from routing.errors import UserError
from routing.route import RouteFitError

# By the word in `fits`.
_MISFITS: dict[str, type[UserError]] = {"route": RouteFitError, "data": ShapeError}


def is_misfit(error: UserError, fits: Sequence[str]) -> bool:
    """Return whether a stage with these `fits` leaves out a cell that has the error."""
    return isinstance(error, tuple(_MISFITS[kind] for kind in fits))
