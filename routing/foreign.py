"""What has to be known about foreign blocks: where tokens and tables are, and their limits."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from routing.moves import Move
from routing.options import RoutingError

# Arguments that hold one row for each token, in the block lists of diffusers and timm.
TABLES = ("image_rotary_emb", "rotary_emb", "rope", "freqs_cis", "rotary_pos_emb")
MASKS = ("attn_mask", "attention_mask")
_TOKENS = ("hidden_states", "x")
_TEXT = ("encoder_hidden_states",)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Unfold, nn.Upsample)


class AttachError(RoutingError):
    """Blocks that tokens cannot be routed past, or a call that does not say enough."""


def inner(block: nn.Module) -> nn.Module:
    """Return the module behind `torch.compile`'s wrapper.

    Args:
        block: A block, compiled or not.
    """
    return getattr(block, "_orig_mod", block)


class Signature:
    """Where a block's call holds its tokens, tables and masks, by name or by position.

    Args:
        block: The block.
        extra: Names of further per-token arguments.
    """

    def __init__(self, block: nn.Module, extra: Sequence[str] = ()) -> None:
        names = list(inspect.signature(inner(block).forward).parameters)
        self.places = {name: place for place, name in enumerate(names)}
        self.tokens = next((name for name in _TOKENS if name in self.places), names[0])
        self.tables = tuple(name for name in (*TABLES, *extra) if name in self.places)
        self.text = next((name for name in _TEXT if name in self.places), None)


class Call:
    """The arguments of one call of a block, read and replaced by name.

    Args:
        signature: Of the block.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    def __init__(self, signature: Signature, args: tuple, kwargs: dict[str, Any]) -> None:
        self.signature, self.args, self.kwargs = signature, args, kwargs

    def get(self, name: str | None) -> Any:
        """Return an argument, or None if it was not given.

        Args:
            name: Its name in the block's signature.
        """
        if name is None:
            return None
        if name in self.kwargs:
            return self.kwargs[name]
        place = self.signature.places.get(name, len(self.args))
        return self.args[place] if place < len(self.args) else None

    def put(self, name: str, value: Any) -> None:
        """Replace an argument that was given.

        Args:
            name: Its name in the block's signature.
            value: What to pass instead.
        """
        if name in self.kwargs:
            self.kwargs = {**self.kwargs, name: value}
        else:
            place = self.signature.places[name]
            self.args = (*self.args[:place], value, *self.args[place + 1 :])

    @property
    def tokens(self) -> Tensor:
        """The image tokens, `(B, T, D)`.

        Raises:
            AttachError: If the block got none.
        """
        x = self.get(self.signature.tokens)
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise AttachError("a block got no tokens of shape (batch, tokens, width)")
        return x

    @tokens.setter
    def tokens(self, value: Tensor) -> None:
        self.put(self.signature.tokens, value)

    def lengths(self, tokens: int, prefix: int) -> set[int]:
        """Return how many rows a per-token table may have.

        Args:
            tokens: Grid tokens outside the route.
            prefix: Tokens before them in the same sequence.
        """
        text = self.get(self.signature.text)
        joint = text.shape[1] if isinstance(text, Tensor) else 0
        return {tokens + front for front in (0, prefix, joint, prefix + joint)}


def read_output(output: Any, name: str) -> Tensor:
    """Return the image tokens of a block's output: a tensor, or the last of (text, image).

    Args:
        output: What the block returned.
        name: What to call the block in an error.

    Raises:
        AttachError: If it is neither.
    """
    tokens = output[-1] if isinstance(output, tuple | list) and len(output) == 2 else output
    if not isinstance(tokens, Tensor) or tokens.dim() != 3:
        raise AttachError(f"{name} returns no tokens of shape (batch, tokens, width)")
    return tokens


def write_output(output: Any, tokens: Tensor) -> Any:
    """Return a block's output with its image tokens replaced.

    Args:
        output: What the block returned.
        tokens: The image tokens to return instead.
    """
    if isinstance(output, tuple | list):
        return type(output)((*output[:-1], tokens))
    return tokens


def refuse_positional(block: nn.Module) -> None:
    """Refuse a block that mixes tokens by their place in the sequence or image.

    Args:
        block: The block.

    Raises:
        AttachError: If it has convolutions over tokens, pooling, windows or a table of relative
            positions: none of them has a meaning for a subset of the tokens.
    """
    whole = inner(block)
    for path, module in whole.named_modules():
        what = None
        if isinstance(module, _CONVOLUTIONS) and max(module.kernel_size) > 1:
            what = "a convolution"
        elif isinstance(module, _POOLS):
            what = "pooling"
        elif any(_positive(getattr(module, key, None)) for key in ("window_size", "shift_size")):
            what = "attention in windows"
        elif any(
            getattr(module, key, None) is not None
            for key in ("relative_position_bias_table", "rel_pos_bias", "rel_pos", "rel_pos_h")
        ):
            what = "a table of relative positions"
        if what is not None:
            where = f"{type(whole).__name__}{'.' + path if path else ''}"
            raise AttachError(
                f"{where} is {what}, which mixes tokens by position; attach to blocks of plain "
                "attention and MLPs"
            )


def _positive(value: Any) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values)


def geometry(model: nn.Module) -> tuple[list[nn.Module], tuple[int, int] | None, int]:
    """Return a known model's blocks, its grid of tokens and its number of prefix tokens.

    Args:
        model: A diffusers transformer (`transformer_blocks`, then `single_transformer_blocks`) or
            a timm transformer (`blocks`).

    Raises:
        AttachError: If it has no list of blocks by those names.
    """
    lists = [
        getattr(model, key, None) for key in ("transformer_blocks", "single_transformer_blocks")
    ]
    blocks = [block for blocks in lists if isinstance(blocks, nn.ModuleList) for block in blocks]
    prefix = 0
    if not blocks and isinstance(getattr(model, "blocks", None), nn.Module):
        blocks = list(model.blocks.children())  # type: ignore[union-attr, operator]
        prefix = int(getattr(model, "num_prefix_tokens", 0))
    if not blocks:
        raise AttachError(
            f"{type(model).__name__} has no list of blocks that is known; attach to the list itself"
        )
    return blocks, _grid(model), prefix


def _grid(model: nn.Module) -> tuple[int, int] | None:
    embed = getattr(model, "patch_embed", None) or getattr(model, "pos_embed", None)
    grid = getattr(embed, "grid_size", None)
    if isinstance(grid, tuple) and len(grid) == 2:
        return int(grid[0]), int(grid[1])
    height, width = getattr(embed, "height", None), getattr(embed, "width", None)
    if isinstance(height, int) and isinstance(width, int):
        return height, width
    return None


def needs_prefix(block: nn.Module) -> bool:
    """Whether the block comes from a library whose sequences usually begin with a class token.

    Args:
        block: The block.
    """
    return type(inner(block)).__module__.startswith("timm.")


def rows(table: Any, move: Move, lengths: Collection[int], batch: int) -> Any:
    """Gather the rows of the tokens that stay from a per-token table, or from each of several.

    Args:
        table: A tensor `(T, ...)` that the batch shares or `(B, T, ...)`, or a tuple of them.
        move: The gather of grid tokens that stay; `move.length` of them are there in all.
        lengths: Lengths T that a table may have; what is before the grid's rows stays.
        batch: B.

    Raises:
        AttachError: If no dimension has one of these lengths.
    """
    if isinstance(table, tuple | list):
        return type(table)(rows(item, move, lengths, batch) for item in table)
    if table.dim() > 2 and table.shape[0] == batch and table.shape[1] in lengths:
        front = table.shape[1] - move.length
        return _joined(table, move, front)
    if table.shape[0] in lengths and move.shared:
        front = table.shape[0] - move.length
        return _joined(table.unsqueeze(0), move, front)[0]
    raise AttachError(
        f"a per-token table of shape {tuple(table.shape)} has no dimension of "
        f"{' or '.join(map(str, sorted(set(lengths))))} tokens"
    )


def _joined(table: Tensor, move: Move, front: int) -> Tensor:
    kept = move.take(table[:, front:])
    return kept if front == 0 else torch.cat((table[:, :front], kept), 1)


def batchless(table: Any, lengths: Collection[int], batch: int) -> bool:
    """Whether a per-token table has no batch dimension, so that samples cannot differ in it.

    Args:
        table: A tensor or a tuple of them.
        lengths: Lengths that a table may have.
        batch: B.
    """
    if isinstance(table, tuple | list):
        return any(batchless(item, lengths, batch) for item in table)
    per_sample = table.dim() > 2 and table.shape[0] == batch and table.shape[1] in lengths
    return not per_sample and table.shape[0] in lengths
