"""Token shift on a grid: each quarter of the channels comes from one of the four neighbours.

Quarter 0 of a token is its left neighbour's, then right, up, down. What a missing neighbour counts
as is the table's business (`Layout.neighbours`): an index of T is a row of zeros, a token's own
index the token itself.

Source: Duan et al., Vision-RWKV (2403.02308), section 3.2 (its Q-Shift).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(x: Tensor, neighbours: Tensor) -> Tensor:
    """The definition: append a row of zeros, take each quarter from its neighbour, (B, T, D)."""
    batch, tokens, width = x.shape
    table = neighbours.expand(batch, 4, tokens)[..., None].expand(-1, -1, -1, width // 4)
    quarters = F.pad(x, (0, 0, 0, 1)).chunk(4, dim=-1)
    return torch.cat([part.gather(1, table[:, q]) for q, part in enumerate(quarters)], -1)


def grid_shift(
    x: Tensor, neighbours: Tensor, grid: tuple[int, int] | None = None, prefix: int = 0
) -> Tensor:
    """Shift quarters of the channels by one grid step.

    Args:
        x: (B, T, D) tokens; D is a multiple of 4.
        neighbours: (4, T) or (B, 4, T) index of the left, right, upper and lower neighbour among
            the tokens; T for a row of zeros, the token's own index for itself. No two other tokens
            may share a neighbour on the same side (on a grid they cannot).
        grid: (H, W) if the tokens are `prefix` tokens and then the whole grid in raster order: the
            table is not read.
        prefix: Tokens before the grid; they have no neighbours.

    Returns:
        (B, T, D). Neighbours outside the grid are zeros.
    """
    plain = torch.compiler.is_compiling()
    if grid is not None:
        return _padded(x, grid, prefix) if plain else _GridShift.apply(x, grid, prefix)
    return reference(x, neighbours) if plain else _TableShift.apply(x, neighbours)


def _padded(x: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
    """The whole grid for compilers: crop one side, pad the other."""
    left, right, up, down = x[:, prefix:].unflatten(1, grid).chunk(4, -1)
    moved = (
        F.pad(left[:, :, :-1], (0, 0, 1, 0)),
        F.pad(right[:, :, 1:], (0, 0, 0, 1)),
        F.pad(up[:, :-1], (0, 0, 0, 0, 1, 0)),
        F.pad(down[:, 1:], (0, 0, 0, 0, 0, 1)),
    )
    return F.pad(torch.cat(moved, -1).flatten(1, 2), (0, 0, prefix, 0))


def _whole(x: Tensor, grid: tuple[int, int], prefix: int, reverse: bool) -> Tensor:
    """Move each quarter of the channels one step over the grid; `reverse` moves gradients back."""
    out = x.new_empty(x.shape)
    out[:, :prefix] = 0
    before, after = (m[:, prefix:].unflatten(1, grid).unflatten(3, (4, -1)) for m in (x, out))
    for quarter in range(4):
        axis = 2 if quarter < 2 else 1
        steps = grid[axis - 1] - 1
        # Quarters 0 and 2 move forward along their axis; gradients move the other way.
        forward = (quarter % 2 == 0) != reverse
        read_from, write_from, emptied = (0, 1, 0) if forward else (1, 0, steps)
        source, target = before[..., quarter, :], after[..., quarter, :]
        target.narrow(axis, write_from, steps).copy_(source.narrow(axis, read_from, steps))
        target.narrow(axis, emptied, 1).zero_()
    return out


class _GridShift(torch.autograd.Function):
    """The whole grid: eight block copies, and the mirror image of them backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
        ctx.grid, ctx.prefix = grid, prefix
        return _whole(x, grid, prefix, reverse=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _whole(grad, ctx.grid, ctx.prefix, reverse=True), None, None


def _flat(table: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Row numbers in a (B T 4, D/4) view for (1 or B, 4, T) neighbours, and which are zeros."""
    tokens = table.shape[-1]
    own = table.transpose(-1, -2)  # (1 or B, T, 4)
    start = torch.arange(batch, device=table.device)[:, None, None] * tokens
    quarter = torch.arange(4, device=table.device)
    rows = ((own.clamp(max=tokens - 1) + start) * 4 + quarter).reshape(-1)
    return rows, (own == tokens).expand(batch, tokens, 4).reshape(-1)


def _select(m: Tensor, rows: Tensor, zero: Tensor) -> Tensor:
    """Rows of m, some of them zeros."""
    out = m.index_select(0, rows)
    if m.device.type == "cpu":
        # They are few: cheaper to visit than to mask all. A device would have to be waited for.
        return out.index_fill_(0, zero.nonzero()[:, 0], 0)
    return out.masked_fill_(zero[:, None], 0)


class _TableShift(torch.autograd.Function):
    """A subset of the grid: one index_select of quarter rows, and one with the inverse back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, neighbours: Tensor) -> Tensor:
        table = neighbours if neighbours.dim() == 3 else neighbours[None]
        rows, zero = _flat(table, len(x))
        ctx.save_for_backward(table)
        return _select(x.reshape(-1, x.shape[-1] // 4), rows, zero).view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (table,) = ctx.saved_tensors
        tokens = table.shape[-1]
        index = torch.arange(tokens, device=table.device)
        own = table == index
        inverse = table.new_full((*table.shape[:2], tokens + 1), tokens)
        inverse.scatter_(2, torch.where(own, tokens, table), index.expand(table.shape))
        rows, zero = _flat(inverse[..., :tokens], len(grad))
        quarters = grad.reshape(-1, grad.shape[-1] // 4)
        out = _select(quarters, rows, zero)
        # Tokens that stand in for their own missing neighbour get that gradient too.
        own = own.transpose(-1, -2).expand(len(grad), tokens, 4).reshape(-1, 1)
        return out.addcmul_(quarters, own.to(grad.dtype)).view(grad.shape), None
