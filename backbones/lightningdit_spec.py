"""LightningDiT (Yao et al., arXiv 2501.01423) without torch: options and cost."""

from dataclasses import dataclass

from backbones.dit_spec import DiTOptions, attention_extras, check_rope
from backbones.registry import BlockCost, Spec, register
from backbones.sizes import Size


@dataclass(frozen=True)
class LightningDiTOptions(DiTOptions):
    """DiT's options, both on: the family `lightningdit`."""

    rope: bool = True
    qk_norm: bool = True


def hidden_width(width: int) -> int:
    """Return SwiGLU's hidden width, 8/3 D: as many parameters as an MLP of ratio 4."""
    return int(8 * width / 3)


def block_cost(size: Size, options: LightningDiTOptions, index: int) -> BlockCost:
    """Count attention, SwiGLU and two norms with weights."""
    d, hidden = size.width, hidden_width(size.width)
    norms, saved = attention_extras(size, options)
    return BlockCost(
        params=4 * d * d + 3 * d * hidden + 7 * d + 2 * hidden + norms,
        linear=4 * d * d + 3 * d * hidden,
        mixing=lambda n: 2 * n * n * d,
        saved=9 * d + saved + 5 * hidden,
    )


register(
    Spec(
        "lightningdit",
        LightningDiTOptions,
        block_cost,
        "backbones.lightningdit:LightningDiTBlock",
        check_rope,
        weighted_norms=True,
    )
)
