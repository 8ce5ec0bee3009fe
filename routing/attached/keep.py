"""Which tokens of a foreign block's sequence may skip, and which of them stay in a route.

All but a prefix and those that `protect=` names may skip; those that `keep=` names stay. Text may
stand before, after or between the image's tokens. In a route the tokens keep their order, protected
ones included.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from routing.errors import require
from routing.layout import Layout, Move
from routing.options import RoutingError

_EXPECTED = (
    "expected a slice of the sequence such as slice(64, None), several in a list, or a bool mask "
    "(T,) or (B, T)"
)


class AttachError(RoutingError):
    """Unsupported blocks, or a call in which the image tokens cannot be identified."""


@dataclass
class KeptTokens:
    """The tokens of a sequence that stay in a route.

    Attributes:
        layout: Where those that may skip are on the grid; the protected ones count as its prefix.
        move: Their gather from the whole sequence of a block, `(B, T, D)`.
        routable_move: Their gather from the tokens that may skip, `(B, N, ...)`.
        length: Length T of the whole sequence.
        front: Class and register tokens at its beginning, all of them protected.
        index: Positions of the tokens that stay, in ascending order, `(1, K)` or `(B, K)`.
        positions: Positions of those that may skip, `(1, N)` or `(B, N)`.
    """

    layout: Layout
    move: Move
    routable_move: Move
    length: int
    front: int
    index: Tensor
    positions: Tensor

    @property
    def move_after_front(self) -> Move:
        """Their gather from the sequence without the tokens in front, `(B, T - front, ...)`."""
        return Move(self.index[:, self.front :] - self.front, self.length - self.front)

    @classmethod
    def select(
        cls, outer: Layout, ids: Tensor, positions: Tensor, length: int, front: int
    ) -> KeptTokens:
        """Return the tokens that stay, by their ids among those that may skip.

        Args:
            outer: The layout of all tokens.
            ids: Ids `(K,)`, `(1, K)` or `(B, K)`.
            positions: Where the tokens that may skip are in the sequence, `(1, N)` or `(B, N)`.
            length: Length T of the sequence.
            front: Class and register tokens at its beginning, none of which may skip.
        """
        layout = outer.subset(ids)
        assert layout.ids is not None
        # Either may be shared by all samples; a batch may also have none.
        rows = len(layout.ids) if len(positions) == 1 else len(positions)
        kept_ids = layout.ids.expand(rows, -1)
        may_skip = torch.zeros(rows, length, dtype=torch.bool, device=positions.device)
        may_skip.scatter_(1, positions.expand(rows, -1), True)
        protected_count = length - positions.shape[1]
        protected = may_skip.int().argsort(dim=1, stable=True)[:, :protected_count]
        image = positions.expand(rows, -1).gather(1, kept_ids)
        index = torch.cat((protected, image), 1).sort(1).values
        routable_move = Move(layout.ids, positions.shape[1])
        return cls(layout, Move(index, length), routable_move, length, front, index, positions)


def parse_protect(protect: Any) -> tuple[slice, ...] | Tensor:
    """Return `protect=` as slices or as a mask; None protects nothing."""
    if protect is None:
        return ()
    if isinstance(protect, Tensor):
        right = protect.dtype == torch.bool and protect.dim() in (1, 2)
        require(
            right,
            f"protect of type {protect.dtype} and shape {tuple(protect.shape)}: {_EXPECTED}",
            AttachError,
        )
        return protect
    parts = (protect,) if isinstance(protect, slice) else protect
    right = isinstance(parts, Sequence) and all(map(is_usable_slice, parts))
    require(right, f"protect={protect!r}: {_EXPECTED}", AttachError)
    return tuple(parts)


def is_usable_slice(item: Any) -> bool:
    """Whether an item is a slice with integers (not 64.0) and a positive step, as torch needs."""
    if not isinstance(item, slice):
        return False
    numbers = [n for n in (item.start, item.stop, item.step) if n is not None]
    return all(hasattr(n, "__index__") for n in numbers) and (item.step is None or item.step > 0)


def routable_positions(
    protect: tuple[slice, ...] | Tensor, prefix: int, x: Tensor
) -> tuple[Tensor, int]:
    """Return the positions of the tokens that may skip, and how many each sample has.

    Args:
        protect: What never skips, as slices or a mask `(T,)` or `(B, T)`.
        prefix: Tokens in front that never skip either.
        x: The sequence `(B, T, D)`.

    Returns:
        Positions, ascending, `(1, N)` or `(B, N)` on the device of x; and N.

    Raises:
        AttachError: If the mask has another shape than the sequence, a slice is beyond it, or
            samples have different numbers of tokens that may skip.
    """
    batch, length = x.shape[:2]
    mask = protected_mask(protect, batch, length, AttachError)
    mask[:, :prefix] = True
    counts = (~mask).sum(1).tolist()
    require(
        len(set(counts)) <= 1,
        f"protect leaves {min(counts)} tokens of one sample and {max(counts)} of another to "
        "the route; let it leave the same number in each, and name more of them in keep=",
        AttachError,
    )
    positions = mask.int().argsort(dim=1, stable=True)[:, : counts[0]]
    return positions.to(x.device), counts[0]


def protected_mask(
    protect: Iterable[slice | int] | Tensor, batch: int, length: int, error: type[RoutingError]
) -> Tensor:
    """Return which tokens of a sequence never skip, bool `(1, T)` or `(B, T)`, a new tensor.

    Args:
        protect: Slices or positions, or a bool mask `(T,)` or `(B, T)`.
        batch: Samples B.
        length: Tokens T of the sequence.
        error: Raised where the mask has another shape than the sequence, or a slice is beyond it.
    """
    if not isinstance(protect, Tensor):
        mask = torch.zeros(1, length, dtype=torch.bool)
        for part in protect:
            require(
                not isinstance(part, slice) or not _is_beyond(part, length),
                f"protect={part} protects none of the {length} tokens of the sequence; state the "
                "slice of this batch (None protects nothing)",
                error,
            )
            mask[:, part] = True
        return mask
    rows = protect if protect.dim() > 1 else protect.unsqueeze(0)
    require(
        rows.shape in ((1, length), (batch, length)),
        f"protect of shape {tuple(protect.shape)}: expected ({length},) or ({batch}, {length}), "
        "one value for each token of the sequence",
        error,
    )
    return rows.clone()


def _is_beyond(part: slice, length: int) -> bool:
    """Whether a slice is empty here but not in a longer sequence (`slice(0, 0)` always is)."""
    return not range(length)[part] and bool(range(sys.maxsize)[part])


def count_forced(keep: Tensor) -> tuple[int, int]:
    """Return how many tokens a mask `(N,)` or `(B, N)` forces in one sample, and in any of them."""
    rows = keep if keep.dim() > 1 else keep.unsqueeze(0)
    return int(rows.sum(1).max()), int(rows.any(0).sum())


def force_keep(ids: Tensor, keep: Any, noise: Tensor) -> Tensor:
    """Return ids with which all tokens of a mask stay; the ids drawn fill up to their number.

    Where a sample forces more tokens than were to stay, more stay in every sample.

    Args:
        ids: Tokens drawn, `(B, K)` or `(1, K)`.
        keep: Tokens that must stay, bool `(N,)`, `(1, N)` or `(B, N)`.
        noise: Uniform numbers that decide which of the drawn tokens make room, `(B, N)`.

    Returns:
        Ids of shape `(B, K')` or, where ids were shared, `(1, K')`, ascending; K' >= K.

    Raises:
        AttachError: If `keep` is not a bool mask of such a shape.
    """
    batch, tokens = noise.shape
    shapes = ((tokens,), (1, tokens), (batch, tokens))
    described = f"{keep.dtype} {tuple(keep.shape)}" if isinstance(keep, Tensor) else repr(keep)
    require(
        isinstance(keep, Tensor) and keep.dtype == torch.bool and keep.shape in shapes,
        f"keep {described}: expected a bool mask ({tokens},) or ({batch}, {tokens}), one value "
        "for each token that may skip",
        AttachError,
    )
    forced = (keep if keep.dim() > 1 else keep.unsqueeze(0)).to(ids.device)
    if len(ids) == 1:  # a subset that the batch shares
        forced, noise = forced.any(0, keepdim=True), noise[:1]
    drawn = torch.zeros_like(noise, dtype=torch.bool).scatter(1, ids.expand(len(noise), -1), True)
    count = max(ids.shape[1], int(forced.sum(1).max()))
    rank = noise + (~drawn).int() - 2 * forced.int()
    return rank.argsort(1)[:, :count].sort(1).values
