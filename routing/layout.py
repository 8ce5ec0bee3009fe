"""The geometry of a sequence of tokens: scan orders (`zigzag:3`), distances, neighbours, moves.

A sequence is `prefix` tokens (text; never routed), then grid tokens in ascending raster order: all
N = H * W of them, or the K that stayed inside a route. An operator that scans asks for an `order`
of the tokens that are present, which is the dense path with the missing ones deleted; one that
mixes neighbours asks for a table of `neighbours`; one that decays with distance asks for `gaps`.

Tables of a full grid are computed once per process and cost nothing in a step. Those of a subset
are computed at most once per route: blocks declare what they look up, and the stack computes it
before they run (`Layout.prepare`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from routing.errors import one_of
from routing.grid import MOST_TABLES, LayoutError, arange, neighbour_slots, rank, transforming

MISSING = ("self", "zero", "nearest")
# The tables that all dense layouts of one grid, prefix and device share.
_DENSE_TABLES: dict[tuple[tuple[int, int], int, torch.device], dict[tuple[str, str], Any]] = {}


# A move is one flattened `index_select` or `index_copy`, four to five times cheaper than `gather`
# on an expanded index. Every index occurs once, so their gradients need no addition.


class _Permute(torch.autograd.Function):
    """Reorder entries along a dimension; the gradient is the inverse reordering, again a gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, perm: Tensor, inv: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(perm, inv)
        ctx.dim = dim
        return x.index_select(dim, perm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        perm, inv = ctx.saved_tensors
        return _Permute.apply(grad, inv, perm, ctx.dim), None, None, None


class _Take(torch.autograd.Function):
    """Select distinct entries along a dimension; the gradient is copied into zeros, not added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.size = dim, x.shape[dim]
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        shape = (*grad.shape[: ctx.dim], ctx.size, *grad.shape[ctx.dim + 1 :])
        return grad.new_zeros(shape).index_copy(ctx.dim, index, grad), None, None


def flat(index: Tensor, length: int) -> Tensor:
    """Convert indices `(B, K)` of sequences of `length` into indices `(B * K,)` of all joined."""
    start = torch.arange(index.shape[0], device=index.device).unsqueeze(1) * length
    return (index + start).flatten()


class Order(NamedTuple):
    """A scan order of the tokens present, as local indices (prefix included, always first).

    Attributes:
        perm: Token at each step of the scan, int64 of shape `(T,)` where the batch shares it, else
            `(B * T,)`: indices of the tokens of all samples joined (`flat`).
        inv: Step of each token in the scan, in the same form.
    """

    perm: Tensor
    inv: Tensor

    def inverse(self) -> Order:
        """Return the order that undoes this one."""
        return Order(self.inv, self.perm)


def permute(x: Tensor, order: Order | None) -> Tensor:
    """Reorder the tokens of `x`, shape `(B, T, ...)`; None leaves them where they are."""
    if order is None:
        return x
    if order.perm.numel() == x.shape[1]:
        return _Permute.apply(x, *order, 1)
    return _Permute.apply(x.flatten(0, 1), *order, 0).unflatten(0, x.shape[:2])


class Move:
    """A gather of some tokens of each sample, and the scatter that puts them back.

    Args:
        index: Distinct indices into each sequence, `(B, K)`, or `(1, K)` where shared.
        length: Length T of the full sequences.
    """

    def __init__(self, index: Tensor, length: int) -> None:
        self.length, self.kept = length, index.shape[1]
        self.shared = index.shape[0] == 1
        self.index = index[0] if self.shared else flat(index, length)

    def take(self, x: Tensor) -> Tensor:
        """Gather: `(B, T, ...)` -> `(B, K, ...)`."""
        if self.shared:
            return _Take.apply(x, self.index, 1)
        return _Take.apply(x.flatten(0, 1), self.index, 0).unflatten(0, (x.shape[0], self.kept))

    def put(self, base: Tensor, tokens: Tensor) -> Tensor:
        """Scatter, out of place: `base` with the K gathered tokens of each sample replaced.

        Args:
            base: Full sequences `(B, T, ...)`; their gradient flows where nothing is replaced.
            tokens: The new tokens, `(B, K, ...)`.
        """
        dtype = torch.promote_types(base.dtype, tokens.dtype)
        base, tokens = base.to(dtype), tokens.to(dtype)
        if self.shared:
            return base.index_copy(1, self.index, tokens)
        full = base.flatten(0, 1).index_copy(0, self.index, tokens.flatten(0, 1))
        return full.unflatten(0, base.shape[:2])


class Layout:
    """The geometry of one sequence of tokens; immutable but for its cache of tables.

    Args:
        grid: Rows and columns (H, W) of the full grid.
        ids: Raster ids of the grid tokens present, int64 of shape `(B, K)` in any order, or
            `(1, K)` or `(K,)` where the batch shares them; None for all of them.
        prefix: Number of tokens before the grid's; never routed, first in every order.
        shuffle: Permutations of 0..K-1, shaped like `ids`: the token at each step of a scan (the
            control `unsorted`). Positions, gaps and neighbours stay those of the sorted tokens.
        device: Where tables live; that of the ids if there are any.

    Attributes:
        is_full: Whether this is the dense sequence: no ids were given.
        tokens: Grid tokens present: K, or N.
        length: Tokens in the sequence, prefix included.
        full_length: Tokens of the dense sequence, prefix included.
        tables: Tables computed so far, by kind and argument (see `prepare`).
    """

    def __init__(
        self,
        grid: tuple[int, int],
        ids: Tensor | None = None,
        prefix: int = 0,
        shuffle: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.grid = (int(grid[0]), int(grid[1]))
        self.prefix = int(prefix)
        if ids is not None:
            ids = (ids.unsqueeze(0) if ids.dim() == 1 else ids).long().sort(1).values
        if shuffle is not None and shuffle.dim() == 1:
            shuffle = shuffle.unsqueeze(0)
        self.ids, self.shuffle = ids, shuffle
        self.is_full = ids is None
        self.tokens = self.grid[0] * self.grid[1] if ids is None else ids.shape[1]
        self.length = self.prefix + self.tokens
        self.full_length = self.prefix + self.grid[0] * self.grid[1]
        self.device = torch.device(device or "cpu") if ids is None else ids.device
        self.tables: dict[tuple[str, str], Any] = {}
        if ids is None and shuffle is None:
            if len(_DENSE_TABLES) >= MOST_TABLES:
                _DENSE_TABLES.clear()
            key = self.grid, self.prefix, self.device
            self.tables = _DENSE_TABLES.setdefault(key, {})

    def prepare(self, tables: Iterable[tuple[str, str]]) -> None:
        """Compute tables, so that `scan_order`, `positions`, `gaps` and `neighbours` look them up.

        Args:
            tables: Pairs of a kind, one of `scan`, `positions`, `gaps` and `neighbours`, and what
                the method takes: a scan order, or for `neighbours` the policy.
        """
        for kind, argument in tables:
            self._table(kind, argument)

    def permutation(self, name: str) -> Tensor:
        """Local index of the token at each step of a scan: int64 `(T,)` or `(B, T)`.

        Args:
            name: `raster`, `zigzag:0` .. `zigzag:7`, each also with `:reversed`, which reverses
                the grid tokens only.

        Raises:
            LayoutError: If there is no such order.
        """
        return self._table("permutation", name)

    def scan_order(self, name: str) -> Order | None:
        """Return the permutation of a scan and its inverse for `permute`; None if nothing moves."""
        return self._table("scan", name)

    def to_scan(self, x: Tensor, name: str) -> Tensor:
        """Put tokens from ascending into scan order, `(B, T, C)`; no copy where nothing moves."""
        return permute(x, self.scan_order(name))

    def from_scan(self, y: Tensor, name: str) -> Tensor:
        """Undo `to_scan`."""
        order = self.scan_order(name)
        return permute(y, order and order.inverse())

    def between_scans(self, x: Tensor, start: str, end: str) -> Tensor:
        """Put tokens from one scan order into another."""
        return self.to_scan(self.from_scan(x, start), end)

    def positions(self, name: str) -> Tensor:
        """Step of each token along the dense path, in scan order: int64 `(T,)` or `(B, T)`.

        The prefix has 0..prefix-1, a grid token prefix + its step on the full path.
        """
        return self._table("positions", name)

    def gaps(self, name: str) -> Tensor:
        """Distance to the previous token present along the path: int64 `(T,)` or `(B, T)`.

        In scan order; 1 for the prefix and for the first grid token.
        """
        return self._table("gaps", name)

    def neighbours(self, missing: str = "self") -> Tensor:
        """Local indices of the left, right, upper and lower neighbour: `(4, T)` or `(B, 4, T)`.

        T, one past the end, means a zero vector: outside the image, and for the prefix,
        which has no neighbours.

        Args:
            missing: What replaces a neighbour that is not present: the token itself (`self`), a
                zero vector (`zero`), or the next one present on that side (`nearest`; zero if
                there is none).

        Raises:
            LayoutError: If there is no such policy.
        """
        return self._table("neighbours", missing)

    def take(self, table: Tensor) -> Tensor:
        """Rows of a table of the full grid for the tokens present: `(N, ...)` -> `(1|B, K, ...)`.

        The table has no rows for the prefix.
        """
        if self.ids is None:
            return table.unsqueeze(0)
        rows = table.index_select(0, self.ids.flatten().to(table.device))
        return rows.unflatten(0, self.ids.shape)

    def take_batched(self, values: Tensor) -> Tensor:
        """The same of a table for each sample, `(B, N, ...)` -> `(B, K, ...)`."""
        if self.ids is None:
            return values
        return Move(self.ids, self.grid[0] * self.grid[1]).take(values)

    def mask(self) -> Tensor:
        """Which grid tokens are present: bool of shape `(B, N)`, or `(1, N)` where shared."""
        subsets, n = self._present.shape[0], self.grid[0] * self.grid[1]
        empty = torch.zeros(subsets, n, dtype=torch.bool, device=self.device)
        return empty.scatter(1, self._present, True)

    def subset(self, ids: Tensor, shuffle: Tensor | None = None) -> Layout:
        """Return the layout of some of the tokens present; arguments as in the constructor."""
        shuffle = None if shuffle is None else shuffle.to(self.device)
        return Layout(self.grid, ids.to(self.device), self.prefix, shuffle)

    def to(self, device: torch.device | str) -> Layout:
        """Return the same layout with its tables on `device`; itself if they are there."""
        device = torch.device(device)
        if device == self.device:
            return self
        ids = None if self.ids is None else self.ids.to(device)
        shuffle = None if self.shuffle is None else self.shuffle.to(device)
        return Layout(self.grid, ids, self.prefix, shuffle, device)

    def move_to(self, inner: Layout) -> Move:
        """Return the gather from this dense sequence to that of a subset, and its scatter.

        Raises:
            LayoutError: If tokens are missing here already, or the inner layout has no ids.
        """
        if self.ids is not None:
            raise LayoutError("a route needs all tokens of the grid at its start; some are missing")
        if inner.ids is None:
            raise LayoutError("a full layout is no subset of another; give it explicit ids")
        return Move(self._after_prefix(inner.ids + self.prefix), self.length)

    def _after_prefix(self, indices: Tensor) -> Tensor:
        if not self.prefix:
            return indices
        front = arange(self.prefix, self.device).expand(indices.shape[0], -1)
        return torch.cat((front, indices), 1)

    def _table(self, kind: str, argument: str) -> Any:
        """Return a table, computed when it is first asked for."""
        key = kind, argument
        if key in self.tables:
            return self.tables[key]
        compute: Any = {
            "permutation": self._permutation,
            "scan": self._scan,
            "positions": self._positions,
            "gaps": self._gaps,
            "neighbours": self._neighbours,
        }[kind]
        if transforming():
            return compute(argument)
        with torch.inference_mode(False):  # the tables of a full grid must still serve training
            self.tables[key] = compute(argument)
        return self.tables[key]

    @property
    def _present(self) -> Tensor:
        """Raster ids of the grid tokens present, all of them too, `(B|1, K)`."""
        if self.ids is None:
            return arange(self.tokens, self.device).unsqueeze(0)
        return self.ids

    def _permutation(self, name: str) -> Tensor:
        # The dense path with the missing tokens deleted is the sort of the present ones' steps.
        perm = rank(self.grid, name, self.device)[self._present].argsort(1)
        if self.shuffle is not None:
            subsets = max(perm.shape[0], self.shuffle.shape[0])
            perm = perm.expand(subsets, -1).gather(1, self.shuffle.expand(subsets, -1))
        perm = self._after_prefix(perm + self.prefix)
        return perm[0] if perm.shape[0] == 1 else perm

    def _scan(self, name: str) -> Order | None:
        if name == "raster" and self.shuffle is None:
            return None
        perm = self.permutation(name)
        steps = arange(self.length, self.device).expand_as(perm)
        inv = torch.empty_like(perm).scatter_(-1, perm, steps)
        if perm.dim() == 1:
            return Order(perm, inv)
        return Order(flat(perm, self.length), flat(inv, self.length))

    def _positions(self, name: str) -> Tensor:
        steps = rank(self.grid, name, self.device)[self._present].sort(1).values
        steps = self._after_prefix(steps + self.prefix)
        return steps[0] if steps.shape[0] == 1 else steps

    def _gaps(self, name: str) -> Tensor:
        steps = self.positions(name)
        gaps = torch.ones_like(steps)
        first = self.prefix + 1
        gaps[..., first:] = steps[..., first:] - steps[..., first - 1 : -1]
        return gaps

    def _slots(self) -> Tensor:
        """Local index of every raster id, -1 where it is not present, `(B|1, N + 1)`.

        The last column answers for ids outside the image (index -1), also with -1.
        """
        ids, n = self._present, self.grid[0] * self.grid[1]
        slots = torch.full((ids.shape[0], n + 1), -1, device=self.device)
        local = arange(self.tokens, self.device) + self.prefix
        return slots.scatter_(1, ids, local.expand_as(ids))

    def _neighbours(self, missing: str) -> Tensor:
        one_of("missing neighbours", missing, MISSING, LayoutError)
        nearest = missing == "nearest"
        indices, outside = neighbour_slots(self.grid, self._present, self._slots(), nearest)
        itself = arange(self.tokens, self.device) + self.prefix
        fill = torch.where(outside, self.length, itself) if missing == "self" else self.length
        indices = torch.where(indices < 0, fill, indices)
        front = indices.new_full((indices.shape[0], 4, self.prefix), self.length)
        indices = torch.cat((front, indices), 2)
        return indices[0] if indices.shape[0] == 1 else indices
