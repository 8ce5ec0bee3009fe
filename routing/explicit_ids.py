"""Explicit ids of the tokens that stay: their checks, and which segment they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from routing.errors import require
from routing.options import SelectionError
from routing.route import Route


def check_ids(ids: Tensor, grid: tuple[int, int], batch: int) -> None:
    """Refuse ids (K,), (1, K) or (B, K) that do not fit the batch or the grid.

    On a GPU their values are not looked at: the host would wait for them.

    Raises:
        SelectionError: No ids, another type or shape, another batch size, an id outside the
            grid, or one that comes twice.
    """
    integers = isinstance(ids, Tensor) and not ids.is_floating_point()
    description = f"{ids.dtype} {(*ids.shape,)}" if isinstance(ids, Tensor) else ids
    require(
        integers and ids.dim() in (1, 2) and ids.shape[-1],  # a batch may be empty
        f"ids {description}: expected whole numbers (K,), (1, K) or (B, K)",
        SelectionError,
    )
    subsets = ids if ids.dim() > 1 else ids[None]
    require(
        len(subsets) in (1, batch),
        f"ids of {len(subsets)} samples for a batch of {batch}: expected ids of each sample, "
        f"({batch}, K), or one subset for all, (K,)",
        SelectionError,
    )
    if ids.device.type != "cpu":
        return
    tokens, ascending = grid[0] * grid[1], subsets.sort(1).values
    inside = bool(((ascending >= 0) & (ascending < tokens)).all())
    if not inside or bool((ascending.diff(dim=1) == 0).any()):
        raise SelectionError(f"ids have to be distinct numbers from 0 to {tokens - 1}")


def ids_of_segment(
    ids: Sequence[Tensor | None] | Tensor | None, route: Route, index: int
) -> Tensor | None:
    """Return the explicit ids of a segment of a route; None draws them.

    Args:
        ids: One tensor for each segment, or None to draw it; a tensor alone for a single segment.
        route: The route.
        index: Number of the segment.

    Raises:
        SelectionError: If there are not as many as segments.
    """
    if ids is None:
        return None
    by_segment = ids if isinstance(ids, Sequence) else (ids,)
    require(
        len(by_segment) == len(route.segments),
        f"{len(by_segment)} tensors of ids for the {len(route.segments)} segments of route "
        f"{route}; give one for each, or None to draw it",
        SelectionError,
    )
    return by_segment[index]
