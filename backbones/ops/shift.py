"""Token shift on a grid: each quarter of the channels comes from one of the four neighbours.

    y = x mix + shifted (1 - mix)

Quarter 0 of the channels comes from the left neighbour, then right, up, down. The table
(`Layout.neighbours`) says what replaces a missing neighbour: index T is a row of zeros, a token's
own index the token itself.

Source: Duan et al., Vision-RWKV (2403.02308), section 3.2 (its Q-Shift).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops.dispatch import choose


def shift_mix(
    x: Tensor, neighbours: Tensor, mix: Tensor, grid: tuple[int, int] | None = None, prefix: int = 0
) -> list[Tensor]:
    """Mix tokens with their four grid neighbours, once for each of M weightings.

    Args:
        x: (B, T, D) tokens; D is a multiple of 4.
        neighbours: Table of neighbours, as for `grid_shift`.
        mix: (M, D) weights of the token itself; those of its neighbours are 1 - mix.
        grid: (H, W), as for `grid_shift`.
        prefix: Tokens before the grid.

    Returns:
        M tensors (B, T, D).
    """
    if choose("shift", "auto", [x, mix]) == "native":
        return torch.ops.tread.shift_mix(x, neighbours, mix)
    shifted = grid_shift(x, neighbours, grid, prefix)
    return [torch.lerp(shifted, x, row) for row in mix.to(x.dtype)]


def grid_shift(
    x: Tensor, neighbours: Tensor, grid: tuple[int, int] | None = None, prefix: int = 0
) -> Tensor:
    """Shift quarters of the channels by one grid step.

    Args:
        x: (B, T, D) tokens; D is a multiple of 4.
        neighbours: (4, T) or (B, 4, T) index of the left, right, upper and lower neighbour among
            the tokens; T for a row of zeros, the token's own index for itself.
        grid: (H, W) if the tokens are `prefix` tokens and then the whole grid in raster order: the
            table is not read, and gradients are copied where they are added otherwise.
        prefix: Tokens before the grid; they have no neighbours.

    Returns:
        (B, T, D).
    """
    if grid is not None:
        return _padded(x, grid, prefix)
    batch, tokens, width = x.shape
    table = neighbours.expand(batch, 4, tokens)[..., None].expand(-1, -1, -1, width // 4)
    quarters = F.pad(x, (0, 0, 0, 1)).chunk(4, dim=-1)
    return torch.cat([part.gather(1, table[:, q]) for q, part in enumerate(quarters)], -1)


def _padded(x: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
    """Shift the whole grid by cropping one side and padding the other."""
    from_left, from_right, from_above, from_below = x[:, prefix:].unflatten(1, grid).chunk(4, -1)
    moved = (
        F.pad(from_left[:, :, :-1], (0, 0, 1, 0)),
        F.pad(from_right[:, :, 1:], (0, 0, 0, 1)),
        F.pad(from_above[:, :-1], (0, 0, 0, 0, 1, 0)),
        F.pad(from_below[:, 1:], (0, 0, 0, 0, 0, 1)),
    )
    return F.pad(torch.cat(moved, -1).flatten(1, 2), (0, 0, prefix, 0))
