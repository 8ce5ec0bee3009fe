"""LightningDiT (Yao et al., arXiv 2501.01423): options and cost of a block (no torch here)."""

from dataclasses import dataclass
from typing import Annotated

from backbones.options.dit import DiTOptions, attention_extras, check_rope
from backbones.options.family import BlockCost, Spec
from backbones.sizes import Size


@dataclass(frozen=True)
class LightningDiTOptions(DiTOptions):
    """Options of the family `lightningdit`: DiT's, both on."""

    rope: Annotated[
        bool, "2-D rotary positions beside the fixed sin-cos ones; a route gathers their rows."
    ] = True
    qk_norm: Annotated[
        bool, "RMSNorm of queries and keys: keeps long bf16 runs at high learning rates finite."
    ] = True


def swiglu_width(width: int) -> int:
    """Return SwiGLU's hidden width, 8/3 D: as many parameters as an MLP of ratio 4."""
    return int(8 * width / 3)


def block_cost(
    size: Size, index: int, grid: tuple[int, int], options: LightningDiTOptions
) -> BlockCost:
    """Count attention, SwiGLU and two norms with weights."""
    width, hidden = size.width, swiglu_width(size.width)
    norms, saved = attention_extras(size, options)
    return BlockCost(
        params=4 * width * width + 3 * width * hidden + 7 * width + 2 * hidden + norms,
        linear=4 * width * width + 3 * width * hidden,
        mixing=lambda tokens: 2 * tokens * tokens * width,
        saved=9 * width + saved + 5 * hidden,
    )


FAMILY = Spec(
    "lightningdit",
    LightningDiTOptions,
    block_cost,
    "backbones.lightningdit:LightningDiTBlock",
    check_rope,
    weighted_norms=True,
)
