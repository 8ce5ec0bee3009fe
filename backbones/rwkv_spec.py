"""RWKV for images (arXiv 2403.02308, 2404.04478) without torch: options and cost."""

from dataclasses import dataclass

from backbones.registry import BlockCost, Spec, check_choice, check_kernel, register
from backbones.sizes import BackboneError, Size
from experiments.runtime.parsing import is_number

MISSING = ("self", "zero", "nearest")


@dataclass(frozen=True)
class RWKVOptions:
    """Options of the family `rwkv`.

    Attributes:
        ratio: Hidden width of the channel mix over D. 3.5 gives a block DiT's 18 D^2 parameters,
            4 is Diffusion-RWKV's.
        wkv: `true` measures distances on the full grid and normalises by its length; `rank` counts
            present tokens only, as the released code does.
        missing: `self`, `zero` or `nearest`: what stands in for an absent neighbour of the token
            shift.
        key_norm: LayerNorm on the keys, which appear in an exponent (upstream's option of that name
            normalises the output of WKV and the channel mix's hidden layer instead).
        kernel: `auto`, `torch` or a kernel of `backbones.ops.biwkv`.
    """

    ratio: float = 3.5
    wkv: str = "true"
    missing: str = "self"
    key_norm: bool = False
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_choice(self, "wkv", "true", "rank")
        check_choice(self, "missing", *MISSING)
        check_kernel(self.kernel, "biwkv")
        if not is_number(self.ratio) or self.ratio <= 0:
            raise BackboneError(f"ratio={self.ratio} must be positive; 3.5 matches DiT's size")

    def hidden(self, width: int) -> int:
        """Return the hidden width of the channel mix, in steps of 8."""
        return max(8, round(width * self.ratio / 8) * 8)


def block_cost(size: Size, options: RWKVOptions, index: int) -> BlockCost:
    """Count the spatial mix (4 D^2) and the channel mix."""
    d, hidden = size.width, options.hidden(size.width)
    linear = 5 * d * d + 2 * d * hidden
    norm = 2 * d if options.key_norm else 0
    return BlockCost(
        params=linear + 7 * d + norm,
        linear=linear,
        # Two mixtures of 3 and 2 shifted inputs; two scans of a numerator and a denominator, and
        # the bonus.
        mixing=lambda n: n * d * (5 + 2 * 2 + 2),
        saved=(22 + bool(norm)) * d + 2 * hidden,
    )


register(Spec("rwkv", RWKVOptions, block_cost, "backbones.rwkv:RWKVBlock"))
