"""The torch-free part of a family: its options and the cost of its blocks."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BeforeValidator

from backbones.options.model import without_removed
from backbones.sizes import Size, build_options

# Kernels of each operation, in the order in which `auto` prefers them; torch and the reference run
# everywhere. `native` is for CPUs (`backbones.ops.native`); the others need CUDA.
KERNELS = {
    "ssd": ("mamba-ssm", "fla", "native"),
    "selective_scan": ("mamba-ssm",),
    "biwkv": ("triton", "native"),
    "conv": ("causal-conv1d", "triton", "native"),
    "shift": ("native",),
    "rwkv7": ("fla",),
}


def kernel_words(*operations: str) -> tuple[str, ...]:
    """Return the allowed values of an option `kernel` for these operations."""
    names = ["auto", "torch", "reference", "kernel"]
    for operation in operations:
        names += [kernel for kernel in KERNELS[operation] if kernel not in names]
    return tuple(names)


def from_yaml(true: str | None = None, false: str | None = None) -> BeforeValidator:
    """Convert a bool to the word it stands for: YAML reads a bare true, off or no as a bool."""

    def convert(value: Any) -> Any:
        text = {True: true, False: false}[value] if isinstance(value, bool) else None
        return value if text is None else text

    return BeforeValidator(convert)


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block.

    Linear layers are counted as by torch's FLOP counter; scans, bi-WKV, convolutions and shifts by
    hand, as recurrences (chunked algorithms do more products, and are faster nevertheless).

    Attributes:
        params: Parameters without the block's share of the modulation.
        linear: MACs of the linear layers per token.
        mixing: Given the number of tokens, the MACs of everything that mixes them, per sample:
            attention, scans, convolutions, shifts. Norms, activations and gates are not counted.
        saved: Floats that autograd keeps for the backward pass, per token, in float32, gates and
            activations included. `test_activations_are_what_autograd_saves` in
            tests/backbones/test_backbones_cost.py measures them with `saved_tensors_hooks`: run it
            with a first estimate, and correct that until it is within 15 %.
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
    """Describes a family without importing its implementation.

    Attributes:
        name: As in `backbone=`.
        options: Dataclass of its options (`Annotated` types, defaults); its method
            `check_consistency`, where it has one, refuses combinations.
        cost: `cost(size, index, grid, options)` counts block `index` of a stack on a grid of
            patches (H, W).
        block: Its block class as "module:Class" (f"{__name__}:Class" for a class in the same file):
            a `backbones.layers.Block`, built with the arguments of `cost`.
        check: `check(size, grid, options)` raises `BackboneError` if the options do not fit.
        weighted_norms: Blocks and the model's head use RMSNorms with weights instead of LayerNorms
            without.
        branches: `branches(options)` is the number of residual branches of a block, each with a
            shift, a scale and a gate.
        carries: Blocks pass per-token tensors on to later ones.
    """

    name: str
    options: type
    cost: Callable[[Size, int, tuple[int, int], Any], BlockCost]
    block: str
    check: Callable[[Size, tuple[int, int], Any], None] | None = None
    weighted_norms: bool = False
    branches: Callable[[Any], int] = two_branches
    carries: bool = False

    def parse(
        self,
        size: Size,
        grid: tuple[int, int],
        values: Mapping[str, Any],
        known_elsewhere: Collection[str] = (),
    ) -> Any:
        """Build the family's options for a stack.

        Args:
            size: Shape of the stack.
            grid: Patches (H, W).
            values: Values by option.
            known_elsewhere: Further names to suggest for a mistyped option.

        Raises:
            BackboneError: An unknown option, or a value that the family, the size or the grid does
                not take.
        """
        options = self.build(values, known_elsewhere)
        self.check_fit(size, grid, options)
        return options

    def build(self, values: Mapping[str, Any], known_elsewhere: Collection[str] = ()) -> Any:
        """Build the family's options, whatever the stack; arguments and errors as in `parse`."""
        owner = f"backbone {self.name}"
        return build_options(self.options, without_removed(values, owner), owner, known_elsewhere)

    def check_fit(self, size: Size, grid: tuple[int, int], options: Any) -> None:
        """Raise `BackboneError` if the options do not fit the size or the grid."""
        if self.check is not None:
            self.check(size, grid, options)
