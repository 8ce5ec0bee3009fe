"""Where tokens sit on the grid: scan orders (`zigzag:3`) of those present, gaps, neighbours.

A sequence is `prefix` tokens (text; never routed), then grid tokens in ascending raster order: all
N = H * W of them, or the K that stayed inside a route. An operator that scans asks for an `order`
of the tokens that are present, which is the dense path with the missing ones deleted; one that
mixes neighbours asks for a table of `neighbours`; one that decays with distance asks for `gaps`.

What belongs to a full grid is computed once per process and costs nothing in a step. What belongs
to a subset is computed at most once per route, when a block first asks for it. Both in one way: a
full grid is the subset that has all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from routing.errors import UserError, one_of, suggest

PATHS = ("raster", *(f"zigzag:{k}" for k in range(8)))
REVERSED = ":reversed"

_TABLES = 4096  # a run uses dozens; a loop over seeds or image sizes must not fill memory
_Table = TypeVar("_Table", bound=Callable[..., Any])
MISSING = ("self", "zero", "nearest")


class LayoutError(UserError):
    """A scan order, a policy or a subset that does not exist."""


# --- tables of a full grid, computed once per process --------------------------------------------


def transforming() -> bool:
    """Return whether a transform of torch.func runs: tensors that are made in it end with it."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def table(make: _Table) -> _Table:
    """Compute a table once for each set of (hashable, positional) arguments.

    A plain dictionary rather than `functools.lru_cache`, which `torch.compile` traces through and
    so recomputes. A table made first under `inference_mode` must still serve a training step.
    """
    store: dict[tuple, Any] = {}

    @wraps(make)
    def cached(*key: Any) -> Any:
        if key not in store:
            if transforming():
                return make(*key)
            if len(store) >= _TABLES:
                store.clear()
            with torch.inference_mode(False):
                store[key] = make(*key)
        return store[key]

    return cached  # type: ignore[return-value]


def path(grid: tuple[int, int], name: str) -> Tensor:
    """Return a dense path over the grid: the raster id at each step, int64 of shape `(N,)`.

    `zigzag:k` is a snake that turns round at the border, so every step moves to a neighbour. Bit 0
    of k walks columns instead of rows, bit 1 starts at the right, bit 2 at the bottom.

    Args:
        grid: Rows and columns (H, W).
        name: `raster` or `zigzag:0` .. `zigzag:7`, each also with `:reversed`.

    Raises:
        LayoutError: If there is no such path.
    """
    base, backwards = name.removesuffix(REVERSED), name.endswith(REVERSED)
    if base not in PATHS:
        raise LayoutError(
            f"scan order {name!r}: expected raster or zigzag:0 .. zigzag:7, each with or without "
            f"{REVERSED}{suggest(base, PATHS)}"
        )
    ids = torch.arange(grid[0] * grid[1], device="cpu").view(grid)
    if base != "raster":
        k = int(base.removeprefix("zigzag:"))
        ids = ids.flip(1) if k & 2 else ids
        ids = ids.flip(0) if k & 4 else ids
        ids = (ids.T if k & 1 else ids).clone()
        ids[1::2] = ids[1::2].flip(1)
    ids = ids.flatten()
    return ids.flip(0) if backwards else ids


@table
def rank(grid: tuple[int, int], name: str, device: torch.device) -> Tensor:
    """Return each raster id's step on a path, int64 of shape `(N,)`."""
    return path(grid, name).argsort().to(device)


@table
def neighbour_ids(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return raster ids of left, right, upper and lower neighbours, `(4, N)`; -1 outside."""
    ids = torch.arange(grid[0] * grid[1], device="cpu").view(grid)
    out = torch.full((4, *grid), -1, device="cpu")
    out[0, :, 1:] = ids[:, :-1]
    out[1, :, :-1] = ids[:, 1:]
    out[2, 1:] = ids[:-1]
    out[3, :-1] = ids[1:]
    return out.flatten(1).to(device)


@table
def arange(n: int, device: torch.device) -> Tensor:
    """Return 0..n-1."""
    return torch.arange(n, device=device)


# --- the tokens present --------------------------------------------------------------------------


@table
def _shared_memo(
    grid: tuple[int, int], prefix: int, device: torch.device
) -> dict[tuple[str, ...], Any]:
    """Return what the dense layouts of one geometry have computed so far, by name."""
    return {}


class Layout:
    """The geometry of one sequence of tokens.

    Args:
        grid: Rows and columns (H, W) of the full grid.
        ids: Raster ids of the grid tokens present, int64 of shape `(B, K)` in any order, or
            `(1, K)` or `(K,)` where the batch shares them; None for all of them.
        prefix: Number of tokens before the grid's; never routed, first in every order.
        shuffle: Permutations of 0..K-1, shaped like `ids`: the token at each place of a scan (the
            control `unsorted`). Places, gaps and neighbours stay those of the sorted tokens.
        device: Where tables live; that of the ids if there are any.
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
        self.device = torch.device(device or "cpu") if ids is None else ids.device
        dense = ids is None and shuffle is None
        self._memo = _shared_memo(self.grid, self.prefix, self.device) if dense else {}

    @property
    def is_full(self) -> bool:
        """Whether this is the dense sequence: no ids were given."""
        return self.ids is None

    @property
    def tokens(self) -> int:
        """Grid tokens present: K, or N."""
        return self.grid[0] * self.grid[1] if self.ids is None else self.ids.shape[1]

    @property
    def length(self) -> int:
        """Tokens in the sequence, prefix included."""
        return self.prefix + self.tokens

    @property
    def full_length(self) -> int:
        """Tokens of the dense sequence, prefix included."""
        return self.prefix + self.grid[0] * self.grid[1]

    def order(self, name: str) -> Order:
        """Return the scan order `name` of the tokens present.

        Args:
            name: `raster`, `zigzag:0` .. `zigzag:7`, each also with `:reversed`, which reverses
                the grid tokens only.

        Raises:
            LayoutError: If there is no such order.
        """
        return self._once(("order", name), lambda: self._order(name))

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

    def reorder(self, name: str) -> Order | None:
        """Return the order in the form that `permute` takes; None where nothing moves."""
        if name == "raster" and self.shuffle is None:
            return None
        order = self.order(name)
        if order.perm.dim() == 1:
            return order
        make = lambda: Order(*(flat(index, self.length) for index in order))  # noqa: E731
        return self._once(("reorder", name), make)

    def positions(self, name: str) -> Tensor:
        """Place of each token along the dense path, in scan order: int64 `(T,)` or `(B, T)`.

        The prefix has 0..prefix-1, a grid token prefix + its step on the full path.
        """
        return self._once(("positions", name), lambda: self._positions(name))

    def gaps(self, name: str) -> Tensor:
        """Distance to the previous token present along the path: int64 `(T,)` or `(B, T)`.

        In scan order; 1 for the prefix and for the first grid token.
        """
        return self._once(("gaps", name), lambda: self._gaps(name))

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
        one_of("missing neighbours", missing, MISSING, LayoutError)
        return self._once(("neighbours", missing), lambda: self._neighbours(missing))

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
        ids, n = self.ids, self.grid[0] * self.grid[1]
        return self._once(("rows",), lambda: Move(ids, n)).take(values)

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
        moved = [None if t is None else t.to(device) for t in (self.ids, self.shuffle)]
        return Layout(self.grid, moved[0], self.prefix, moved[1], device)

    def move_to(self, inner: Layout) -> Move:
        """Return the gather from this sequence to that of a subset of it, and its scatter.

        Raises:
            LayoutError: If the inner layout has no ids or, looked at on the CPU only, some that are
                not present here.
        """
        if inner.ids is None:
            raise LayoutError("a full layout is no subset of another; give it explicit ids")
        slots = self._once(("slots",), self._slots)
        rows = inner.ids.shape[0] if slots.shape[0] == 1 else slots.shape[0]
        local = slots.expand(rows, -1).gather(1, inner.ids.expand(rows, -1))
        if not self.is_full and self.device.type == "cpu" and bool((local < 0).any()):
            raise LayoutError("ids that are to stay have left already; choose from those present")
        return Move(self._behind_prefix(local), self.length)

    def _behind_prefix(self, places: Tensor) -> Tensor:
        if not self.prefix:
            return places
        front = arange(self.prefix, self.device).expand(places.shape[0], -1)
        return torch.cat((front, places), 1)

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._memo:
            if transforming():
                return make()
            with torch.inference_mode(False):  # of a full grid, it must still serve training
                self._memo[key] = make()
        return self._memo[key]

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
        ids, slots = self._present, self._once(("slots",), self._slots)
        wanted = neighbour_ids(self.grid, self.device)[:, ids].transpose(0, 1)
        outside = wanted < 0
        if missing == "nearest":
            found = self._nearest(slots).gather(2, ids.unsqueeze(1).expand(-1, 4, -1))
        else:
            n = self.grid[0] * self.grid[1]
            index = torch.where(outside, n, wanted).flatten(1)
            found = slots.gather(1, index).unflatten(1, (4, self.tokens))
        own = arange(self.tokens, self.device) + self.prefix
        fill = torch.where(outside, self.length, own) if missing == "self" else self.length
        table = torch.where(found < 0, fill, found)
        front = table.new_full((table.shape[0], 4, self.prefix), self.length)
        table = torch.cat((front, table), 2)
        return table[0] if table.shape[0] == 1 else table

    def _nearest(self, slots: Tensor) -> Tensor:
        """Local index of the next token present on each side of every position, `(B, 4, N)`."""
        here = slots[:, :-1].unflatten(1, self.grid)
        sides = []
        for dim, backwards in ((2, False), (2, True), (1, False), (1, True)):
            line = here.flip(dim) if backwards else here
            last = _last_present(line, dim)
            sides.append((last.flip(dim) if backwards else last).flatten(1))
        return torch.stack(sides, 1)


def _last_present(line: Tensor, dim: int) -> Tensor:
    """Value of the last entry >= 0 strictly before each place along rows or columns, or -1."""
    place = torch.arange(line.shape[dim], device=line.device)
    place = place.unsqueeze(1) if dim == 1 else place
    before = torch.where(line >= 0, place, -1).cummax(dim).values.roll(1, dim)
    before.narrow(dim, 0, 1).fill_(-1)
    return torch.where(before >= 0, line.gather(dim, before.clamp(min=0)), -1)


# --- moving rows ---------------------------------------------------------------------------------
#
# Permute, take a subset, put it back: each is one flattened `index_select` or `index_copy`, four to
# five times cheaper than `gather` on an expanded index. Every index occurs once, so their gradients
# need no addition.


class _Permute(torch.autograd.Function):
    """Reorder rows along a dimension; the gradient is the inverse reordering, again a gather."""

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
    """Select distinct rows along a dimension; the gradient is copied into zeros, not added."""

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
    """Turn indices `(B, K)` into each sample's sequence into those of all `(B * length)` rows."""
    start = torch.arange(index.shape[0], device=index.device).unsqueeze(1) * length
    return (index + start).flatten()


class Order(NamedTuple):
    """A scan order of the tokens present, as local indices (prefix included, always first).

    Attributes:
        perm: Token at each place of the scan, int64 of shape `(T,)` where the batch shares it, else
            `(B, T)`, or flattened over the batch, `(B * T,)`, in the form that `permute` takes.
        inv: Place of each token in the scan, in the same form.
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
        length: Length of the full sequences.
    """

    def __init__(self, index: Tensor, length: int) -> None:
        self.length, self.kept = length, index.shape[1]
        self.shared = index.shape[0] == 1
        self.index = index[0] if self.shared else flat(index, length)

    def take(self, x: Tensor) -> Tensor:
        """Gather: `(B, length, ...)` -> `(B, K, ...)`."""
        if self.shared:
            return _Take.apply(x, self.index, 1)
        return _Take.apply(x.flatten(0, 1), self.index, 0).unflatten(0, (x.shape[0], self.kept))

    def put(self, base: Tensor, rows: Tensor) -> Tensor:
        """Scatter, out of place: `base` with the K rows of each sample replaced.

        Args:
            base: Full sequences `(B, length, ...)`; their gradient flows where nothing is put.
            rows: What to put, `(B, K, ...)`.
        """
        dtype = torch.promote_types(base.dtype, rows.dtype)
        base, rows = base.to(dtype), rows.to(dtype)
        if self.shared:
            return base.index_copy(1, self.index, rows)
        full = base.flatten(0, 1).index_copy(0, self.index, rows.flatten(0, 1))
        return full.unflatten(0, base.shape[:2])
