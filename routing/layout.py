"""The geometry of a sequence of tokens: scan orders (`zigzag:3`), distances and grid neighbours.

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
from typing import Any

import torch
from torch import Tensor

from routing.errors import one_of
from routing.gather import Move, Order, arange, flat, permute, table, transforming
from routing.grid import LayoutError, neighbour_ids, rank

MISSING = ("self", "zero", "nearest")


@table
def _shared_tables(
    grid: tuple[int, int], prefix: int, device: torch.device
) -> dict[tuple[str, str], Any]:
    """Return the tables that all dense layouts of one geometry share."""
    return {}


class Layout:
    """The geometry of one sequence of tokens; it is never changed after it was made.

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
            self.tables = _shared_tables(self.grid, self.prefix, self.device)

    def prepare(self, tables: Iterable[tuple[str, str]]) -> None:
        """Compute tables, so that `reorder`, `positions`, `gaps` and `neighbours` look them up.

        Args:
            tables: Pairs of a kind, one of `scan`, `positions`, `gaps` and `neighbours`, and what
                the method takes: a scan order, or for `neighbours` the policy.
        """
        for kind, argument in tables:
            if (kind, argument) not in self.tables:
                self._table(kind, argument)

    def order(self, name: str) -> Order:
        """Return the scan order `name` of the tokens present.

        Args:
            name: `raster`, `zigzag:0` .. `zigzag:7`, each also with `:reversed`, which reverses
                the grid tokens only.

        Raises:
            LayoutError: If there is no such order.
        """
        return self._table("order", name)

    def reorder(self, name: str) -> Order | None:
        """Return the order in the form that `permute` takes; None where nothing moves."""
        key = "scan", name
        return self.tables[key] if key in self.tables else self._table(*key)

    def to_scan(self, x: Tensor, name: str) -> Tensor:
        """Put tokens from ascending into scan order, `(B, T, C)`; no copy where nothing moves."""
        return permute(x, self.reorder(name))

    def from_scan(self, y: Tensor, name: str) -> Tensor:
        """Undo `to_scan`."""
        order = self.reorder(name)
        return permute(y, order and order.inverse())

    def turn(self, x: Tensor, start: str, end: str) -> Tensor:
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

        T, one past the end, means a row of zeros: outside the image, and for the prefix,
        which has no neighbours.

        Args:
            missing: What replaces a neighbour that is not present: the token itself (`self`), a
                zero row (`zero`), or the next one present on that side (`nearest`; zero if none).

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
        return self._table("rows").take(values)

    def mask(self) -> Tensor:
        """Which grid tokens are present: bool of shape `(B, N)`, or `(1, N)` where shared."""
        rows, n = self._present.shape[0], self.grid[0] * self.grid[1]
        empty = torch.zeros(rows, n, dtype=torch.bool, device=self.device)
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
        """Return the gather from this sequence to that of a subset of it, and its scatter.

        Raises:
            LayoutError: If the inner layout has no ids or, looked at on the CPU only, some that are
                not present here.
        """
        if inner.ids is None:
            raise LayoutError("a full layout is no subset of another; give it explicit ids")
        slots = self._table("slots")
        rows = inner.ids.shape[0] if slots.shape[0] == 1 else slots.shape[0]
        local = slots.expand(rows, -1).gather(1, inner.ids.expand(rows, -1))
        if not self.is_full and self.device.type == "cpu" and bool((local < 0).any()):
            raise LayoutError("ids that are to stay have left already; choose from those present")
        return Move(self._behind_prefix(local), self.length)

    def _behind_prefix(self, indices: Tensor) -> Tensor:
        if not self.prefix:
            return indices
        front = arange(self.prefix, self.device).expand(indices.shape[0], -1)
        return torch.cat((front, indices), 1)

    def _table(self, kind: str, argument: str = "") -> Any:
        """Return a table, computed when it is first asked for."""
        key = kind, argument
        if key in self.tables:
            return self.tables[key]
        if transforming():
            return self._compute(kind, argument)
        with torch.inference_mode(False):  # the tables of a full grid must still serve training
            self.tables[key] = self._compute(kind, argument)
        return self.tables[key]

    def _compute(self, kind: str, argument: str) -> Any:
        if kind == "slots":
            return self._slots()
        if kind == "rows":
            assert self.ids is not None
            return Move(self.ids, self.grid[0] * self.grid[1])
        by_argument = {
            "order": self._order,
            "scan": self._scan,
            "positions": self._positions,
            "gaps": self._gaps,
            "neighbours": self._neighbours,
        }
        return by_argument[kind](argument)

    @property
    def _present(self) -> Tensor:
        """Raster ids of the grid tokens present, all of them too, `(B|1, K)`."""
        if self.ids is None:
            return arange(self.tokens, self.device).unsqueeze(0)
        return self.ids

    def _order(self, name: str) -> Order:
        # The dense path with the missing tokens deleted is the sort of the present ones' steps.
        perm = rank(self.grid, name, self.device)[self._present].argsort(1)
        if self.shuffle is not None:
            rows = max(perm.shape[0], self.shuffle.shape[0])
            perm = perm.expand(rows, -1).gather(1, self.shuffle.expand(rows, -1))
        perm = self._behind_prefix(perm + self.prefix)
        inv = torch.empty_like(perm).scatter_(
            1, perm, arange(self.length, self.device).expand_as(perm)
        )
        return Order(perm[0], inv[0]) if perm.shape[0] == 1 else Order(perm, inv)

    def _scan(self, name: str) -> Order | None:
        if name == "raster" and self.shuffle is None:
            return None
        order = self.order(name)
        if order.perm.dim() == 1:
            return order
        return Order(flat(order.perm, self.length), flat(order.inv, self.length))

    def _positions(self, name: str) -> Tensor:
        steps = rank(self.grid, name, self.device)[self._present].sort(1).values
        steps = self._behind_prefix(steps + self.prefix)
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
        ids, slots = self._present, self._table("slots")
        raster_ids = neighbour_ids(self.grid, self.device)[:, ids].transpose(0, 1)
        outside = raster_ids < 0
        if missing == "nearest":
            indices = self._nearest(slots).gather(2, ids.unsqueeze(1).expand(-1, 4, -1))
        else:
            n = self.grid[0] * self.grid[1]
            columns = torch.where(outside, n, raster_ids).flatten(1)
            indices = slots.gather(1, columns).unflatten(1, (4, self.tokens))
        itself = arange(self.tokens, self.device) + self.prefix
        fill = torch.where(outside, self.length, itself) if missing == "self" else self.length
        indices = torch.where(indices < 0, fill, indices)
        front = indices.new_full((indices.shape[0], 4, self.prefix), self.length)
        indices = torch.cat((front, indices), 2)
        return indices[0] if indices.shape[0] == 1 else indices

    def _nearest(self, slots: Tensor) -> Tensor:
        """Local index of the next token present on each side of every position, `(B, 4, N)`."""
        grid_slots = slots[:, :-1].unflatten(1, self.grid)
        sides = []
        for dim, backwards in ((2, False), (2, True), (1, False), (1, True)):
            line = grid_slots.flip(dim) if backwards else grid_slots
            last = _last_present(line, dim)
            sides.append((last.flip(dim) if backwards else last).flatten(1))
        return torch.stack(sides, 1)


def _last_present(line: Tensor, dim: int) -> Tensor:
    """Value of the last entry >= 0 strictly before each position along a dimension, or -1."""
    position = torch.arange(line.shape[dim], device=line.device)
    position = position.unsqueeze(1) if dim == 1 else position
    before = torch.where(line >= 0, position, -1).cummax(dim).values.roll(1, dim)
    before.narrow(dim, 0, 1).fill_(-1)
    return torch.where(before >= 0, line.gather(dim, before.clamp(min=0)), -1)
