"""What a family is before torch is imported: its options and the cost of its blocks."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BeforeValidator

from backbones.options.model import without_removed
from backbones.sizes import Size, build_options

# Kernels of each operation in the order in which `auto` prefers them; torch and the reference run
# everywhere. `native` is for CPUs (`backbones.ops.native`), the others need CUDA.
KERNELS = {
    "ssd": ("mamba-ssm", "fla", "native"),
    "selective_scan": ("mamba-ssm",),
    "biwkv": ("triton", "native"),
    "conv": ("causal-conv1d", "triton", "native"),
    "shift": ("native",),
    "rwkv7": ("fla",),
}


def kernel_words(*operations: str) -> tuple[str, ...]:
    """Return what `kernel=` may be for an option that chooses the kernel of these operations."""
    names = ["auto", "torch", "reference", "kernel"]
    for operation in operations:
        names += [kernel for kernel in KERNELS[operation] if kernel not in names]
    return tuple(names)


def from_yaml(true: str | None = None, false: str | None = None) -> BeforeValidator:
    """Accept a truth value for the word it stands for: YAML reads a bare true, off or no as one."""

    def convert(value: Any) -> Any:
        text = {True: true, False: false}[value] if isinstance(value, bool) else None
        return value if text is None else text

    return BeforeValidator(convert)


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block.

    Linear layers are what torch's counter sees; scans, bi-WKV, convolutions and shifts are counted
    by hand, as recurrences: chunked algorithms do more products than that, and are faster all the
    same.

    Attributes:
        params: Parameters without the block's share of the modulation.
        linear: MACs of the linear layers per token.
        mixing: Function of the number of tokens: MACs of everything that mixes them, per sample.
        saved: Floats that training keeps for the backward pass, per token (measured, within 15 %).
    """

    params: int
    linear: int
    mixing: Callable[[int], int]
    saved: int


def two_branches(options: Any) -> int:
    """Return 2: a token mixer and a channel mixer, as most blocks have."""
    return 2


@dataclass(frozen=True)
class Spec:
    """A family without its implementation.

    Attributes:
        name: As in `backbone=`.
        options: Dataclass of its options (`Annotated` types, defaults); its method
            `check_consistency`, where it has one, refuses combinations.
        cost: `cost(size, options, index)` counts block `index` of a stack.
        block: Where its class is, as "module:Class" (in a file of its own, f"{__name__}:Class"): a
            `backbones.layers.Block` that is built as `Class(size, index, grid, options)`.
        check: `check(size, options)` raises `BackboneError` where the two do not fit.
        weighted_norms: Normalise by RMSNorms with weights, the model's head too, and not by
            LayerNorms without.
        branches: `branches(options)` is the number of residual branches of a block, each of which
            has a shift, a scale and a gate.
        carries: Blocks hand per-token tensors on to later ones.
    """

    name: str
    options: type
    cost: Callable[[Size, Any, int], BlockCost]
    block: str
    check: Callable[[Size, Any], None] | None = None
    weighted_norms: bool = False
    branches: Callable[[Any], int] = two_branches
    carries: bool = False

    def parse(
        self, size: Size, values: Mapping[str, Any], known_elsewhere: Collection[str] = ()
    ) -> Any:
        """Build the family's options for a stack of this size.

        Args:
            size: Shape of the stack.
            values: Values by option.
            known_elsewhere: Further names that a mistyped option may have meant.

        Raises:
            BackboneError: An unknown option, or a value that the family or the size does not take.
        """
        owner = f"backbone {self.name}"
        options = build_options(
            self.options, without_removed(values, owner), owner, known_elsewhere
        )
        if self.check is not None:
            self.check(size, options)
        return options
