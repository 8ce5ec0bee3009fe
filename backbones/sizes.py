"""The one size table: what "S/2" means for every family; shapes of learned heads (no torch here).

A block is the same unit everywhere: about 18 D^2 parameters, two residual branches and 6 D of
adaLN-zero modulation, so depth and width alone fix a size and a table may compare families row by
row.

S, B, L and XL are DiT's (Peebles and Xie, arXiv 2212.09748, Table 1). T is for a run of minutes on
two CPU cores, M lies between T and S.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Annotated, Any

from annotated_types import Ge, Le, MultipleOf

from backbones.validation import OptionError, validate
from routing.errors import UserError, require, suggest


class BackboneError(UserError):
    """A size, a family name or a family option that does not exist or does not fit."""


@dataclass(frozen=True)
class Size:
    """Shape of a stack.

    Attributes:
        name: Letter of the size, `custom` where depth, width or heads were overridden.
        depth: Number of blocks.
        width: Channels D of the residual stream.
        heads: Attention heads; they divide the width.
        patch: Side of a patch in latent pixels.

    Raises:
        BackboneError: One of the numbers is no integer or below 1.
    """

    name: str
    depth: int
    width: int
    heads: int
    patch: int = 2

    def __post_init__(self) -> None:
        for key in ("depth", "width", "heads", "patch"):
            value = getattr(self, key)
            require(
                isinstance(value, Integral) and int(value) >= 1,
                f"{key}={value}: expected an integer >= 1",
                BackboneError,
            )

    @property
    def state(self) -> int:
        """State channels N of a Mamba-2 mixer."""
        # B and C cost 4 D N parameters per block, so narrow models have a smaller state: the count
        # stays within 6 % of DiT's 18 D^2. Kernels need a multiple of 8.
        widths = ((384, 64), (192, 32), (96, 16), (0, 8))
        return next(state for least, state in widths if self.width >= least)

    @property
    def headdim(self) -> int:
        """Channels P of one Mamba-2 head: the largest of 64..8 that leaves four heads."""
        inner = 2 * self.width
        return next(p for p in (64, 32, 16, 8) if inner % p == 0 and inner >= 4 * p)

    def __str__(self) -> str:
        return f"{self.name}/{self.patch}"


#            depth  width  heads
SIZES: dict[str, Size] = {
    "T": Size("T", 12, 64, 4),
    "M": Size("M", 12, 192, 3),
    "S": Size("S", 12, 384, 6),
    "B": Size("B", 12, 768, 12),
    "L": Size("L", 24, 1024, 16),
    "XL": Size("XL", 28, 1152, 16),
}


_LONGEST = 4096  # Largest input side; beyond it, the position table would be huge.


def hidden_for(width: int, mixer_params: int, matrices: int, fixed: int = 0) -> int:
    """Return the hidden width (a multiple of 8) with which a block has DiT's 12 D^2 parameters.

    The token mixer has `mixer_params` parameters, the channel mixer `matrices` matrices of `width`
    x hidden and `fixed` other parameters.
    """
    return max(8, round((12 * width * width - mixer_params - fixed) / (matrices * width) / 8) * 8)


def patch_grid(input_size: int | Sequence[int], patch: int) -> tuple[int, int]:
    """Return the patches (H, W) of an input side or (height, width).

    Raises:
        BackboneError: A side that is not a multiple of the patch, or too large.
    """
    sides = (input_size, input_size) if isinstance(input_size, int) else tuple(map(int, input_size))
    require(
        len(sides) == 2 and all(patch <= s <= _LONGEST and s % patch == 0 for s in sides),
        f"input_size={input_size} with patches of side {patch}: expected multiples of {patch} "
        f"up to {_LONGEST}",
        BackboneError,
    )
    return sides[0] // patch, sides[1] // patch


def parse_size(
    text: str | Size, depth: int | None = None, width: int | None = None, heads: int | None = None
) -> Size:
    """Parse "S/2" (letter and patch; without a patch it is 2) and apply overrides.

    Args:
        text: Size as typed, or a `Size`.
        depth: Number of blocks instead of the table's.
        width: Channels instead of the table's.
        heads: Attention heads instead of the table's. Without it, an overridden width has the
            table's number of heads or the largest smaller one that divides it.

    Raises:
        BackboneError: Unknown letter, a number below 1, or heads that do not divide the width.
    """
    size = text if isinstance(text, Size) else _named(str(text))
    if depth is None and width is None and heads is None:
        return size
    depth = size.depth if depth is None else depth
    width = size.width if width is None else width
    most = min(heads or size.heads, width)
    fitting_heads = next((h for h in range(most, 0, -1) if width % h == 0), 1)
    heads = fitting_heads if heads is None else heads
    require(
        heads == fitting_heads,
        f"heads={heads}: expected a divisor of width={width}, such as {fitting_heads}",
        BackboneError,
    )
    changed = (depth, width, heads) != (size.depth, size.width, size.heads)
    return replace(
        size, name="custom" if changed else size.name, depth=depth, width=width, heads=heads
    )


def _named(text: str) -> Size:
    named = re.fullmatch("([A-Z]+)(/([1-9][0-9]{0,3}))?", text)
    if named is None or named[1] not in SIZES:
        expected = f"one of {', '.join(SIZES)}, with a patch as in S/2"
        raise BackboneError(
            f"size={text}: expected {expected}{suggest(text.partition('/')[0], SIZES)}"
        )
    return replace(SIZES[named[1]], patch=int(named[3] or 2))


def build_options(
    options: type, values: Mapping[str, Any], owner: str, known_elsewhere: Collection[str] = ()
) -> Any:
    """Build a dataclass of options from plain values.

    Args:
        options: The dataclass.
        values: Values by key.
        owner: Prefix of error messages.
        known_elsewhere: Further names to suggest for a mistyped key.

    Raises:
        BackboneError: An unknown key, or a value that the dataclass does not accept.
    """
    try:
        return validate(options, values, known_elsewhere=known_elsewhere)
    except (OptionError, BackboneError) as error:
        raise BackboneError(f"{owner}: {error}") from None


@dataclass(frozen=True)
class DecoderOptions:
    """Shape of MaskDiT's decoder."""

    depth: Annotated[int, Ge(1), Le(1024), "Blocks."] = 8
    width: Annotated[int, Ge(16), Le(65536), MultipleOf(16), "Channels."] = 512
    heads: Annotated[int, Ge(1), "Attention heads."] = 16

    def check_consistency(self) -> None:
        """Raise `BackboneError` if the heads do not divide the width."""
        parse_size("S/2", self.depth, self.width, self.heads)


@dataclass(frozen=True)
class AlignOptions:
    """REPA's alignment: the block and the projector."""

    block: Annotated[
        int, Ge(0), "Block whose output is projected; inside a route, of the tokens that stayed."
    ] = 7
    channels: Annotated[int, Ge(1), "Width of the encoder's features (DINOv2-B has 768)."] = 768
    hidden: Annotated[int, Ge(1), "Hidden width of the projector (2048 in the paper)."] = 2048
