"""Token shift on a grid: each quarter of the channels comes from one of the four neighbours.

Quarter 0 of a token is its left neighbour's, then right, up, down. What a missing neighbour counts
as is the table's business (`Layout.neighbours`): an index of T is a row of zeros, a token's own
index the token itself.

Source: Duan et al., Vision-RWKV (2403.02308), section 3.2 (its Q-Shift).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def grid_shift(x: Tensor, neighbours: Tensor) -> Tensor:
    """Shift quarters of the channels by one grid step.

    Args:
        x: (B, T, D) tokens; D is a multiple of 4.
        neighbours: (4, T) or (B, 4, T) index of the left, right, upper and lower neighbour among
            the tokens; T for a row of zeros, the token's own index for itself.

    Returns:
        (B, T, D).
    """
    batch, tokens, width = x.shape
    table = neighbours.expand(batch, 4, tokens)[..., None].expand(-1, -1, -1, width // 4)
    quarters = F.pad(x, (0, 0, 0, 1)).chunk(4, dim=-1)
    return torch.cat([part.gather(1, table[:, q]) for q, part in enumerate(quarters)], -1)
