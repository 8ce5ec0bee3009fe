"""Learned parts that some baselines add to a backbone; none of them is there by default.

* `Decoder`: MaskDiT (arXiv 2306.09305). Tokens that were dropped for good come back as a learned
mask
  token, and a small DiT predicts every patch.
* `Projector`: REPA (arXiv 2410.06940). Maps a block's tokens to the width of a frozen encoder's
features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backbones import layers
from backbones.cost import ALIGN, check_decoder
from backbones.dit import DiTBlock
from backbones.sizes import BackboneError, Size
from routing.errors import suggest
from routing.layout import Layout
from routing.stack import Stack

if TYPE_CHECKING:
    from routing.moves import Move


@dataclass(frozen=True)
class DecoderOptions:
    """Shape of MaskDiT's decoder.

    Attributes:
        depth: Blocks.
        width: Channels.
        heads: Attention heads.
    """

    depth: int = 8
    width: int = 512
    heads: int = 16

    def __post_init__(self) -> None:
        check_decoder(self.depth, self.width, self.heads)


@dataclass(frozen=True)
class AlignOptions:
    """What REPA aligns.

    Attributes:
        block: Block whose output is projected; inside a route that is the tokens that stayed.
        channels: Width of the encoder's features (DINOv2-B has 768).
        hidden: Hidden width of the projector.
    """

    block: int = 7
    channels: int = ALIGN["channels"]
    hidden: int = ALIGN["hidden"]


def options(cls: type, given: Mapping[str, Any] | None, what: str) -> Any:
    """Build options from a mapping, or return None for None.

    Args:
        cls: `DecoderOptions` or `AlignOptions`.
        given: Keys and values; missing ones take the default.
        what: What to call them in an error.

    Raises:
        BackboneError: An unknown key.
    """
    if given is None:
        return None
    known = [field.name for field in dataclasses.fields(cls)]
    for key in given:
        if key not in known:
            raise BackboneError(
                f"{what} has no option {key!r}: its options are {', '.join(known)}"
                + suggest(key, known)
            )
    return cls(**given)


class Projector(nn.Module):
    """Tokens of one block -> features of an encoder: (B, T, D) -> (B, T, channels)."""

    def __init__(self, width: int, given: AlignOptions) -> None:
        super().__init__()
        self.block = given.block
        self.mlp = nn.Sequential(
            nn.Linear(width, given.hidden),
            nn.SiLU(),
            nn.Linear(given.hidden, given.hidden),
            nn.SiLU(),
            nn.Linear(given.hidden, given.channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Project tokens (B, T, D)."""
        return self.mlp(x)

    def initialise(self) -> None:
        """Draw the weights."""
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)


class Decoder(nn.Module):
    """A small DiT over all tokens, mask tokens where the backbone has none; it ends in a head.

    Args:
        width: Channels D of the backbone.
        given: Shape of the decoder.
        grid: Patches (H, W).
        patch: Side of a patch.
        channels: Channels of the prediction.
    """

    positions: Tensor

    def __init__(
        self, width: int, given: DecoderOptions, grid: tuple[int, int], patch: int, channels: int
    ) -> None:
        super().__init__()
        size = Size("custom", given.depth, given.width, given.heads, patch)
        self.norm = layers.Head(width, 1, given.width)
        self.mask = nn.Parameter(torch.zeros(given.width))
        table = layers.sincos_2d(given.width, grid)
        self.register_buffer("positions", table, persistent=False)
        self.condition = nn.Linear(width, given.width)
        self.modulate = layers.Modulation(given.width, given.depth)
        none = DiTBlock.Options()
        self.stack = Stack([DiTBlock(size, b, grid, none) for b in range(given.depth)])
        self.head = layers.Head(given.width, patch, channels)

    def forward(self, x: Tensor, c: Tensor, move: Move | None, layout: Layout) -> Tensor:
        """Predict patches.

        Args:
            x: Tokens of the backbone (B, T', D), prefix first.
            c: Conditioning vector (B, D).
            move: Which of the full sequence's tokens they are; None for all of them.
            layout: Of the full sequence.

        Returns:
            Rows (B, N, p p C) for every grid token.
        """
        x = self.norm(x, c)
        if move is not None:
            x = move.put(self.mask.to(x.dtype).expand(x.shape[0], layout.length, -1), x)
        x = torch.cat([x[:, : layout.prefix], x[:, layout.prefix :] + self.positions], dim=1)
        c = self.condition(c)
        x = self.stack(x, self.modulate(c), layout).x
        return self.head(x[:, layout.prefix :], c)

    def initialise(self) -> None:
        """Draw the weights; gates and head start at zero, the way in does not."""
        blocks: Any = self.stack.blocks
        for block in blocks:
            block.initialise()
        for layer in (self.norm.project, self.condition):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.mask, std=0.02)
        self.norm.modulate.initialise()
        self.modulate.initialise()
        self.head.initialise()
