"""DiT (Peebles and Xie, arXiv 2212.09748) without torch: options and cost."""

from dataclasses import dataclass

from backbones.registry import BlockCost, Spec, register
from backbones.sizes import BackboneError, Size


@dataclass(frozen=True)
class DiTOptions:
    """Options of attention: the family `dit`.

    Attributes:
        rope: Rotate queries and keys by grid position; gathered with the tokens inside a route.
        qk_norm: RMS-normalise queries and keys.
    """

    rope: bool = False
    qk_norm: bool = False


def check_rope(size: Size, options: DiTOptions) -> None:
    """Raise `BackboneError` where rotary positions do not fit the heads."""
    head = size.width // size.heads
    if options.rope and head % 4:
        raise BackboneError(
            f"rope=true needs a head size that is a multiple of 4, but width {size.width} over "
            f"{size.heads} heads gives {head}; try another heads="
        )


def attention_extras(size: Size, options: DiTOptions) -> tuple[int, int]:
    """Return the parameters of the norms of queries and keys, and what the options save."""
    norms = 2 * (size.width // size.heads) if options.qk_norm else 0
    return norms, ((3 if options.rope else 0) + (5 if norms else 0)) * size.width


def block_cost(size: Size, options: DiTOptions, index: int = 0) -> BlockCost:
    """Count attention (4 D^2) and an MLP of ratio 4 (8 D^2)."""
    d, (norms, saved) = size.width, attention_extras(size, options)
    return BlockCost(
        params=12 * d * d + 9 * d + norms,
        linear=12 * d * d,
        mixing=lambda n: 2 * n * n * d,
        saved=18 * d + saved,
    )


register(Spec("dit", DiTOptions, block_cost, "backbones.dit:DiTBlock", check_rope))
