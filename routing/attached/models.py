"""Which models and blocks of other libraries can be routed, and where their image tokens begin.

This is what their classes and attributes show; `routing.attached.positions` looks at a run.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from routing.attached.calls import TEXT, Call, Signature, inner
from routing.attached.keep import AttachError
from routing.errors import require

_COUNTED = ("joint_transformer_blocks", "transformer_blocks", "single_transformer_blocks")
# Lists of blocks after all others, where the class token joins the sequence.
_CLASS_ONLY = ("blocks_token_only", "cls_attn_blocks")
_EMBEDDINGS = ("patch_embed", "pos_embed", "x_embedder")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Unfold, nn.Upsample)
# Attributes of timm's and other attentions that hold positions of tokens relative to each other.
_RELATIVE = (
    "relative_position_bias_table", "rel_pos_bias", "rel_pos", "rel_pos_h", "rel_indices"
)  # fmt: skip
# Layers of MLP-Mixer, ResMLP and gMLP whose input features are the tokens.
_OVER_TOKENS = ("mlp_tokens", "linear_tokens", "tokens_mlp", "token_mix", "token_mixing")
_PREFIX_ADVICE = (
    "prefix=N if N text or class tokens come before the image's, protect=slice(N, None) if text "
    "comes after the image's N, prefix=0 if there is none"
)
# Blocks whose sequence has text after the image, or on both sides: `prefix` cannot describe it.
_TEXT_AROUND = {
    "ZImageTransformerBlock": (
        "its text comes after the image's tokens, and in omni mode on both sides of them; pass "
        "protect=slice(N, None) for N image tokens, or protect=[slice(0, A), slice(B, None)] in "
        "omni mode for those from A to B"
    )
}


def block_list(blocks: Any) -> list[nn.Module]:
    """Return the blocks as a list, each of them once."""
    members = list(blocks) if isinstance(blocks, Iterable) else []
    require(
        members and all(isinstance(block, nn.Module) for block in members),
        "blocks: expected a model or its list of blocks, as in model.blocks",
        AttachError,
    )
    for i, first in enumerate(map(members.index, members)):
        require(
            first == i,
            f"block {i} is block {first} once more, and their calls cannot be told apart; pass a "
            "list in which every block is another module",
            AttachError,
        )
    return members


def refuse_positional(block: nn.Module, ordered: bool = False, own: bool = False) -> None:
    """Refuse a block that mixes tokens by their position in the sequence or image.

    Args:
        block: The block.
        ordered: Accept causal convolutions and recurrences.
        own: Accept all that mixes tokens by position.

    Raises:
        AttachError: If it has convolutions over tokens, pooling, windows, a table of relative
            positions or a linear layer over tokens, none of which is defined on a subset of the
            tokens; if a second sequence runs beside the tokens; or if the batch does not come
            first.
    """
    original = inner(block)
    block_name = type(original).__name__
    two_sequences = hasattr(original, "attn_in") and hasattr(original, "attn_out")
    require(
        not two_sequences,
        f"{block_name} carries a second sequence, of pixels inside every token (TNT), which "
        "cannot skip with it; attach to blocks of plain attention and MLPs",
        AttachError,
    )
    for path, module in original.named_modules():
        layer = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        require(
            not layer or module.self_attn.batch_first,  # type: ignore[union-attr]
            f"{type(module).__name__} takes (tokens, batch, width), and the route would drop "
            "samples; build it with batch_first=True",
            AttachError,
        )
        module_path = f"{block_name}.{path}" if path else block_name
        mixer = None if own else _mixes_by_order(module)
        require(
            mixer is None or ordered,
            f"{module_path} is {mixer}, which mixes tokens along the sequence; pass ordered=True "
            "if it should see the tokens of a route as one sequence",
            AttachError,
        )
        reason = None if own or mixer else _mixes_by_position(module, path.split(".")[-1])
        require(
            reason is None,
            f"{module_path} is {reason}, which mixes tokens by position; attach to blocks of "
            'plain attention and MLPs (positions="own" routes these all the same)',
            AttachError,
        )


def _mixes_by_order(module: nn.Module) -> str | None:
    """Return what kind of causal layer mixes tokens along the sequence; None if it does not."""
    if isinstance(module, nn.RNNBase):
        return "a recurrence"
    if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
        # Padded by its reach on both sides and cut, or padded on the left by the block itself.
        reach = (module.kernel_size[0] - 1) * module.dilation[0]
        if module.padding in ((0,), (reach,)):
            return "a causal convolution"
    return None


def _mixes_by_position(module: nn.Module, name: str) -> str | None:
    """Return what kind of layer mixes tokens by position, for a message; None if it does not."""
    if isinstance(module, _CONVOLUTIONS) and max(module.kernel_size) > 1:
        return "a convolution"
    if isinstance(module, _POOLS):
        return "pooling"
    for key in _RELATIVE:
        if getattr(module, key, None) is not None:
            return "a table of relative positions"
    for key in ("window_size", "shift_size"):
        if _is_positive(getattr(module, key, None)):
            return "attention in windows"
    if name in _OVER_TOKENS or type(module).__name__ == "SpatialGatingUnit":
        return "a linear layer over tokens"
    return None


def _is_positive(value: Any) -> bool:
    """Whether a size, or one side of it, is a positive integer."""
    for side in value if isinstance(value, tuple | list) else (value,):
        if isinstance(side, int) and not isinstance(side, bool) and side > 0:
            return True
    return False


def refuse_long_skips(signatures: Sequence[Signature]) -> None:
    """Refuse blocks that also take the output of an earlier block, in an argument `skip`.

    A route would hand them the tokens of another subset, or of another number.
    """
    for i, signature in enumerate(signatures):
        require(
            "skip" not in signature.positions,
            f"block {i} ({signature.name}) takes a long skip connection (its argument skip), whose "
            "tokens would be others than those of the route; attach to blocks without one",
            AttachError,
        )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model behind wrappers of data parallelism, which hide its attributes."""
    known = isinstance(getattr(model, "blocks", None), nn.Module) or hasattr(model, _COUNTED[1])
    wrapped = getattr(model, "module", None)
    return unwrap(wrapped) if isinstance(wrapped, nn.Module) and not known else model


def geometry(model: nn.Module) -> tuple[list[nn.Module], tuple[int, int] | None, int | None]:
    """Return a model's blocks, its grid of tokens and its number of prefix tokens, None if unknown.

    Supported are transformers of diffusers (`transformer_blocks` or `joint_transformer_blocks`,
    then `single_transformer_blocks`) and of timm (`blocks`).

    Raises:
        AttachError: If it has no list of blocks by those names, or further ones.
    """
    name = type(inner(model)).__name__
    counted: list[str] = []
    blocks: list[nn.Module] = []
    for key in _COUNTED:
        block_list = getattr(model, key, None)
        if isinstance(block_list, nn.ModuleList):
            counted.append(key)
            blocks += block_list
    prefix = None
    timm_blocks = getattr(model, "blocks", None)
    if not blocks and isinstance(timm_blocks, nn.ModuleList | nn.Sequential):
        counted, blocks = ["blocks"], [*timm_blocks]  # not children(): it has a shared block once
        prefix = getattr(model, "num_prefix_tokens", None)
        if any(hasattr(model, key) for key in _CLASS_ONLY):
            prefix = 0
    if not blocks:
        layers = getattr(model, "layers", None)
        first = (
            type(inner(layers[0])).__name__ if isinstance(layers, nn.ModuleList) and layers else ""
        )
        advice = _TEXT_AROUND.get(first)
        require(advice is None, f"{name}: attach to its list, model.layers; {advice}", AttachError)
        raise AttachError(f"{name} has no known list of blocks; attach to the list itself")
    for key, child in inner(model).named_children():
        is_list = isinstance(child, nn.ModuleList) and len(child) and key not in _CLASS_ONLY
        is_block_list = is_list and re.search("(blocks|layers|refiner)$", key)
        require(
            not is_block_list or key in counted,
            f"{name} has {key} beside {' and '.join(counted)}, so block numbers are ambiguous; "
            f"attach to one list, with {_PREFIX_ADVICE}",
            AttachError,
        )
    return blocks, _grid(model), prefix if prefix is None else int(prefix)


def _grid(model: nn.Module) -> tuple[int, int] | None:
    for key in _EMBEDDINGS:
        embed = getattr(model, key, None)
        sides: Any = getattr(embed, "height", None), getattr(embed, "width", None)
        sides = getattr(embed, "grid_size", None) or sides
        if isinstance(sides, tuple) and len(sides) == 2 and None not in sides:
            return int(sides[0]), int(sides[1])
    return None


def refuse_prefix(signatures: Sequence[Signature], prefix: int | None) -> None:
    """Refuse a prefix of blocks whose text is not in front of the image.

    Raises:
        AttachError: If one is given.
    """
    for signature in signatures:
        advice = _TEXT_AROUND.get(signature.name)
        require(
            prefix is None or advice is None,
            f"prefix={prefix}: {signature.name} needs more: {advice}",
            AttachError,
        )


def refuse_unknown_prefix(call: Call, grid: tuple[int, int] | None, whole: bool) -> None:
    """Refuse a call of a route's first block in which text may be in front of the image.

    The grid is that of the image's tokens, and `whole` says that a model was attached to.

    Raises:
        AttachError: If there are not as many tokens as in the grid, or how many of
            them are the image's is unknown.
    """
    if isinstance(call.get(TEXT), Tensor):
        return  # text has an argument of its own
    tokens, name = call.tokens.shape[1], call.signature.name
    advice = _TEXT_AROUND.get(name)
    require(
        advice is None,
        f"which of the {tokens} tokens that come into {name} are the image's is unknown: {advice}",
        AttachError,
    )
    if grid is not None:
        rows, columns = grid
        require(
            rows * columns == tokens,
            f"{tokens} tokens come into {name} where the grid {rows}x{columns} has "
            f"{rows * columns}; pass {_PREFIX_ADVICE}",
            AttachError,
        )
    arguments = call.signature.positions
    has_text = TEXT in arguments or any("text" in argument for argument in arguments)
    joined = "Single" in name or not has_text  # text and image in one sequence
    may_have_prefix = whole or (joined and call.signature.library == "diffusers")
    require(
        grid is not None or not may_have_prefix,
        f"how many of the {tokens} tokens that come into {name} are the image's is unknown; "
        f"pass {_PREFIX_ADVICE}",
        AttachError,
    )


class JoinedText:
    """Notes the text of blocks that get it in an argument, to recognise where it joins the image.

    Text in front may be longer than the prompt: AuraFlow puts 8 register tokens before it.
    """

    def __init__(self) -> None:
        # Tokens of the latest block that got its text in an argument of its own.
        self._image, self._text = 0, 0
        self._segments: dict[int, bool] = {}  # whether the blocks of each segment do

    def note(self, call: Call) -> None:
        """Note how many tokens of image and text come into a block, outside of routes."""
        text, image = call.get(TEXT), call.get(call.signature.tokens)
        sequences = [x for x in (text, image) if isinstance(x, Tensor) and x.dim() == 3]
        if len(sequences) == 2:
            self._text, self._image = (x.shape[1] for x in sequences)

    def check(self, call: Call, segment: int, routable: int, prefix: int) -> None:
        """Refuse a route over text that has joined the image, or one prefix for both forms.

        Args:
            call: That of the first block of the route's segment.
            segment: Number of the segment.
            routable: Tokens that may skip.
            prefix: The stated number of tokens in front.

        Raises:
            AttachError: If more tokens may skip than the image has, or if a prefix is stated for
                blocks of diffusers that get their text in an argument, or for segments of which
                some do and some do not.
        """
        apart = isinstance(call.get(TEXT), Tensor)
        self._segments[segment] = apart
        length, name = call.tokens.shape[1], call.signature.name
        joined = not apart and self._text > 0 and length == self._image + self._text
        require(
            not joined or routable <= self._image,
            f"{length} tokens come into {name}, {self._text} of text (registers included) and "
            f"{self._image} of the image, and prefix={prefix} routes some of the text; pass "
            f"prefix={self._text} if it comes first, protect=slice({self._image}, None) if last",
            AttachError,
        )
        require(
            not prefix or not apart or call.signature.library != "diffusers",
            f"prefix={prefix}: {name} gets its text in a separate argument, so the prefix would be "
            f"image tokens; leave it out, or pass protect=slice(0, {prefix}) if they must not skip "
            "(where other blocks get text and image in one sequence, attach twice, once to each "
            "list of blocks)",
            AttachError,
        )
        require(
            not prefix or len(set(self._segments.values())) == 1,
            f"prefix={prefix} is counted in blocks such as {name} and in others, and only some of "
            "them get text and image in one sequence; attach twice, once to each list of blocks, "
            "with the prefix of each",
            AttachError,
        )
