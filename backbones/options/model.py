"""The arguments of a model, once (no torch here)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MultipleOf

from backbones.sizes import BackboneError, Size, parse_size, patch_grid
from routing.errors import require
from routing.options import OMITTED_AT_DEFAULT

# Removed arguments and their former defaults, which weights files of earlier versions contain.
REMOVED = {"router": None}


Condition = Annotated[
    Literal["adaln", "prefix"],
    OMITTED_AT_DEFAULT,
    "adaln: time and class modulate every block; prefix: they are tokens before the image's, as in "
    "DiS, and modulate the head alone.",
]
Skips = Annotated[
    bool,
    OMITTED_AT_DEFAULT,
    "Long skip connections (U-ViT): block i of the first half is joined to block depth-1-i by "
    "Linear(concat); they work across a route.",
]
# Options of every family, declared once for `ModelConfig` and for `backbone.` keys.
Attention = Annotated[
    int | list[int],
    "Attention blocks in a hybrid stack: 4 makes every fourth block one, [5,11] names them; 0: "
    "none.",
]
Depth = Annotated[Annotated[int, Ge(1), Le(1024)] | None, "Blocks; null: as the size says."]
Width = Annotated[
    Annotated[int, Ge(16), Le(65536), MultipleOf(16)] | None,
    "Channels, a multiple of 16; null: as the size says.",
]
Heads = Annotated[Annotated[int, Ge(1)] | None, "Attention heads; null: as the size says."]
Bottleneck = Annotated[
    Annotated[int, Ge(1)] | None,
    OMITTED_AT_DEFAULT,
    "Channels between the two linear layers of the patch embedding (JiT: 128, for B/16); null: "
    "one layer.",
]
ContextTokens = Annotated[
    int,
    Ge(0),
    OMITTED_AT_DEFAULT,
    "Class tokens before the image's, beside the class in adaLN (JiT: 32); a route never removes "
    "them. 0: none.",
]
ContextStart = Annotated[
    Annotated[int, Ge(0)] | None,
    OMITTED_AT_DEFAULT,
    "First block that sees the class tokens; null: a third of the depth, as in every size of JiT.",
]


@dataclass(frozen=True)
class ModelConfig:
    """The arguments of a model with all defaults filled in: plain values, fit for JSON."""

    name: Annotated[str, "Family."]
    size: Annotated[str, "Letter and patch, as in S/2."] = "S/2"
    in_channels: Annotated[int, Ge(1), "Image (latent) channels C."] = 4
    input_size: Annotated[
        int | list[int], "Side in pixels, or height and width; multiples of the patch."
    ] = 32
    num_classes: Annotated[int, Ge(0), "Classes; the null class has this index. 0: no labels."] = (
        1000
    )
    text: Annotated[
        tuple[Annotated[int, Ge(1)], Annotated[int, Ge(1)]] | None,
        "Length L and channels E of text states, which become L prefix tokens.",
    ] = None
    learn_sigma: Annotated[bool, "Predict 2 C channels, as DiT's DDPM checkpoints do."] = False
    attention: Attention = 0
    depth: Depth = None
    width: Width = None
    heads: Heads = None
    bottleneck: Bottleneck = None
    fuse: Annotated[
        str | None, "Route of SPRINT's fusion (one segment), fused in every pass, dense ones too."
    ] = None
    decoder: Annotated[
        dict[str, Any] | None, "MaskDiT's decoder (`DecoderOptions`, {} for its defaults)."
    ] = None
    align: Annotated[dict[str, Any] | None, "REPA's projector (`AlignOptions`)."] = None
    condition: Condition = "adaln"
    skips: Skips = False
    context_tokens: ContextTokens = 0
    context_start: ContextStart = None
    options: Annotated[dict[str, Any], "The family's own options."] = dataclasses.field(
        default_factory=dict
    )

    @property
    def shape(self) -> Size:
        """Depth, width, heads and patch."""
        return parse_size(self.size, self.depth, self.width, self.heads)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches (H, W)."""
        return patch_grid(self.input_size, self.shape.patch)

    @property
    def num_tokens(self) -> int:
        """Number of patches H W, without prefix tokens."""
        rows, columns = self.grid
        return rows * columns

    @property
    def prefix(self) -> int:
        """Number of prefix tokens: class tokens, text, with `condition=prefix` time and class."""
        condition = self.context_tokens
        if self.condition == "prefix":
            condition += 2 if self.num_classes else 1
        return (self.text[0] if self.text else 0) + condition

    @property
    def context_block(self) -> int:
        """The first block that sees the class tokens (`context_start`); 0 without them."""
        if not self.context_tokens:
            return 0
        return self.shape.depth // 3 if self.context_start is None else self.context_start

    @property
    def time_shape(self) -> tuple[int, int]:
        """Sinusoids of the time embedding, and its hidden width: DiT's, or DiS's as a token."""
        width = self.shape.width
        return (width // 2, 4 * width) if self.condition == "prefix" else (128, width)

    @property
    def out_channels(self) -> int:
        """Channels of the prediction."""
        return self.in_channels * (2 if self.learn_sigma else 1)

    @property
    def attention_blocks(self) -> set[int]:
        """Indices of the attention blocks in a hybrid stack.

        Raises:
            BackboneError: One of them is outside the stack.
        """
        attention, depth = self.attention, self.shape.depth
        if isinstance(attention, int):
            inside = 0 <= attention <= depth
            blocks = set(range(attention - 1, depth, attention)) if attention else set()
        else:
            blocks = set(attention)
            inside = blocks <= set(range(depth))
        require(
            inside,
            f"attention={attention}: expected blocks of 0..{depth - 1}, such as [2,5], or 4 for "
            "every fourth",
            BackboneError,
        )
        return blocks

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `backbones.create`: fit for JSON, family options among them."""
        arguments = dataclasses.asdict(self)
        options = arguments.pop("options")
        if self.text:
            arguments["text"] = list(self.text)
        return arguments | options


def without_removed(arguments: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Drop removed arguments that have their former default.

    Raises:
        BackboneError: A removed argument with another value.
    """
    remaining = dict(arguments)
    for key, default in REMOVED.items():
        value = remaining.pop(key, default)
        if value != default:
            raise BackboneError(
                f"{owner}: {key}={value}: {key} was removed; only its former default "
                f"{key}={default} is accepted"
            )
    return remaining
