"""Vision-RWKV (arXiv 2403.02308) and Diffusion-RWKV (2404.04478): options, cost (no torch here)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from backbones.options.family import BlockCost, Spec, from_yaml, kernel_words
from backbones.sizes import Size
from backbones.validation import Choices

Missing = Annotated[
    Literal["self", "zero", "nearest"],
    "What replaces an absent neighbour in the token shift: the token itself (a third of the error "
    "of zero on smooth fields), zero, or the nearest present one along the same ray.",
]


@dataclass(frozen=True)
class RWKVOptions:
    """Options of the family `rwkv`."""

    ratio: Annotated[
        float,
        Gt(0),
        "Hidden width of the channel mix over D: 3.5 gives a block DiT's parameters, 4 is "
        "Diffusion-RWKV's.",
    ] = 3.5
    wkv: Annotated[
        Literal["true", "rank"],
        from_yaml(true="true"),
        "true: distances and length of the full grid; rank: of the present tokens, as released.",
    ] = "true"
    missing: Missing = "self"
    key_norm: Annotated[
        bool,
        "LayerNorm of the keys, which stand in an exponent: for bf16 that diverges "
        "(Vision-RWKV's option of that name normalises WKV's output).",
    ] = False
    kernel: Annotated[
        str,
        Choices(kernel_words("biwkv")),
        "auto: the fastest available; naming one that is not available is an error.",
    ] = "auto"

    def hidden(self, width: int) -> int:
        """Return the hidden width of the channel mix, a multiple of 8."""
        return max(8, round(width * self.ratio / 8) * 8)


def block_cost(size: Size, index: int, grid: tuple[int, int], options: RWKVOptions) -> BlockCost:
    """Count the spatial mix (4 D^2) and the channel mix."""
    width, hidden = size.width, options.hidden(size.width)
    linear = 5 * width * width + 2 * width * hidden
    norm = 2 * width if options.key_norm else 0
    return BlockCost(
        params=linear + 7 * width + norm,
        linear=linear,
        # Two mixtures of 3 and 2 shifted inputs; two scans of a numerator and a denominator, and
        # the bonus.
        mixing=lambda tokens: tokens * width * (5 + 2 * 2 + 2),
        saved=(23 if norm else 22) * width + 2 * hidden,
    )


FAMILY = Spec("rwkv", RWKVOptions, block_cost, "backbones.rwkv:RWKVBlock")
