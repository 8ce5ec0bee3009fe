"""Pieces of a model that follow from its arguments: the grid, and the list of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from backbones.counts import attention_blocks
from backbones.registry import block_class
from backbones.sizes import BackboneError, Size

# What every family takes, for suggestions.
COMMON = (
    "in_channels",
    "input_size",
    "num_classes",
    "text",
    "learn_sigma",
    "attention",
    "depth",
    "width",
    "heads",
    "fuse",
    "router",
    "decoder",
    "align",
)


def grid_of(input_size: int | Sequence[int], patch: int) -> tuple[int, int]:
    """Return the patches (H, W) of an input side or (height, width)."""
    sides = (input_size, input_size) if isinstance(input_size, int) else tuple(map(int, input_size))
    if len(sides) != 2 or any(s < patch or s % patch for s in sides):
        raise BackboneError(
            f"input_size={input_size} cannot be cut into patches of side {patch}; "
            f"take multiples of {patch}"
        )
    return sides[0] // patch, sides[1] // patch


def make_blocks(
    name: str, size: Size, grid: tuple[int, int], options: Any, attention: int | Sequence[int]
) -> nn.ModuleList:
    """Return the blocks: the family's own, and attention blocks where the stack is a hybrid."""
    own, dit = block_class(name), block_class("dit")
    chosen = set(attention_blocks(attention, size.depth))
    return nn.ModuleList(
        dit(size, i, grid, dit.Options()) if i in chosen else own(size, i, grid, options)
        for i in range(size.depth)
    )
