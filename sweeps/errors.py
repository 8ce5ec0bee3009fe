"""What a user of sweeps can get wrong."""

from __future__ import annotations

from routing.errors import UserError


class SweepError(UserError):
    """A wrong grid, resource, override or command: one sentence with what to type instead."""
