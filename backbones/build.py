"""Builds the blocks of a model from its arguments, and says which kernels they run on."""

import pkgutil
from collections.abc import Iterable
from typing import Any

from torch import nn

from backbones.context import with_context
from backbones.cost import check_block_params
from backbones.dit import DiTBlock
from backbones.long_skips import with_long_skips
from backbones.ops.dispatch import Choice, resolve
from backbones.options import ModelConfig
from backbones.options.dit import DiTOptions
from backbones.registry import find
from routing.learned import Fuse
from routing.stack import Stack


def build_stack(config: ModelConfig) -> Stack:
    """Return the blocks of a model, and SPRINT's fusion around them where there is one.

    Raises:
        BackboneError: A block has other parameters than its family counts.
    """
    shape, family = config.shape, find(config.name)
    options = family.parse(shape, config.grid, config.options)
    block_class = pkgutil.resolve_name(family.block)
    blocks: list[nn.Module] = []
    for index in range(shape.depth):
        if index in config.attention_blocks:
            block: nn.Module = DiTBlock(shape, index, config.grid, DiTOptions())
        else:
            block = block_class(shape, index, config.grid, options)
        blocks.append(block)
    if config.skips:
        blocks = with_long_skips(blocks, shape.width)
    if config.context_tokens:
        blocks = with_context(blocks, config.context_tokens, config.context_block)
    params = []
    for block in blocks:
        params.append(sum(parameter.numel() for parameter in block.parameters()))
    check_block_params(config, params)
    fuse = Fuse(shape.width, config.fuse, shape.depth) if config.fuse else None
    return Stack(blocks, fuse=fuse)


def kernels(blocks: Iterable[Any], device: str | None = None) -> list[Choice]:
    """Return the implementation of each operation of the blocks, in the order of first use.

    Args:
        blocks: The blocks of a stack.
        device: Type of the device that they run on, as in "cuda"; None for the machine's fastest.

    Raises:
        KernelError: A kernel that was requested by name is not available.
    """
    requests: dict[tuple[str, str], None] = {}
    for block in blocks:
        requests |= dict.fromkeys(block.kernels)
    return [resolve(operation, kernel, device) for operation, kernel in requests]


def describe_kernels(blocks: Iterable[Any], device: str) -> list[str]:
    """Return one line per operation of the blocks: which implementation runs, and why."""
    blocks = list(blocks)
    lines = [str(choice) for choice in kernels(blocks, device)]
    if any(isinstance(getattr(block, "block", block), DiTBlock) for block in blocks):
        lines += ["attention: torch scaled_dot_product_attention (fastest available backend)"]
    return lines
