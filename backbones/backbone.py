"""The model: embed -> `routing.Stack` -> head, for every family.

    x (B, C, H p, W p) --patches + positions--> tokens (B, N, D) --blocks under c--> head --> (B, C,
    H p, W p) c = time embedding + class embedding or pooled text (B, D)

Nothing here depends on the family but the class of its blocks. Routes are `routing.Stack`'s
business: a forward pass hands it a `Routing`, or none for a dense pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backbones import layers
from backbones.hub import Pretrained
from backbones.ops.dispatch import resolve
from backbones.registry import block_class, parse_options
from backbones.sizes import BackboneError, Size, parse_size
from routing.layout import Layout
from routing.stack import Stack

if TYPE_CHECKING:
    from routing.stack import Routing


@dataclass
class Output:
    """What a forward pass returns with `return_output=True`.

    Attributes:
        sample: Prediction (B, C_out, H p, W p).
        taps: Block index -> its output (B, T, D) as it left the block, prefix first; -1 is the
            input of block 0.
    """

    sample: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)


class Backbone(nn.Module, Pretrained):
    """Diffusion backbone of any family (see `backbones.create`).

    Args:
        name: Family.
        size: Letter and patch, as "S/2".
        in_channels: Image (latent) channels C.
        input_size: Side in pixels, or (height, width); multiples of the patch.
        num_classes: Classes; 0 builds a model without labels. The null class has index
            `num_classes`.
        text: (L, E) of text states that go in as L prefix tokens, or None.
        learn_sigma: Predict 2 C channels, as the DDPM checkpoints of DiT do.
        attention: A hybrid stack: the indices of the blocks that are attention blocks (family
            `dit`), or a number k for every k-th block; 0 or () for none.
        depth: Overrides the size's depth.
        width: Overrides the size's width.
        heads: Overrides the size's attention heads.
        **options: The family's own options.

    Attributes:
        grid: Patches (H, W).
        num_tokens: H W, without prefix tokens.
        prefix: Number of prefix (text) tokens.
        config: Every argument, json-able; `create(**config)` builds the same model again.

    Raises:
        BackboneError: Unknown size or option, or values that do not fit.
    """

    def __init__(
        self,
        name: str,
        size: str | Size = "S/2",
        *,
        in_channels: int = 4,
        input_size: int | Sequence[int] = 32,
        num_classes: int = 1000,
        text: Sequence[int] | None = None,
        learn_sigma: bool = False,
        attention: int | Sequence[int] = 0,
        depth: int | None = None,
        width: int | None = None,
        heads: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        shape = parse_size(size, depth, width, heads)
        family = parse_options(name, options, COMMON)
        self.name, self.size = name, shape
        self.depth, self.width = shape.depth, shape.width
        self.in_channels, self.num_classes = in_channels, num_classes
        self.out_channels = in_channels * (2 if learn_sigma else 1)
        self.grid = _grid(input_size, shape.patch)
        self.num_tokens = self.grid[0] * self.grid[1]
        self.prefix = int(text[0]) if text else 0
        self.config = {
            "name": name,
            "size": str(size),
            "in_channels": in_channels,
            "input_size": [s * shape.patch for s in self.grid],
            "num_classes": num_classes,
            "text": [int(n) for n in text] if text else None,
            "learn_sigma": learn_sigma,
            "attention": attention if isinstance(attention, int) else list(attention),
            "depth": shape.depth,
            "width": shape.width,
            "heads": shape.heads,
            **dataclasses.asdict(family),
        }

        self.patches = layers.PatchEmbed(in_channels, shape.patch, shape.width)
        positions = layers.sincos_2d(shape.width, self.grid)
        self.register_buffer("positions", positions, persistent=False)
        self.time = layers.TimeEmbedder(shape.width)
        self.labels = layers.LabelEmbedder(num_classes, shape.width) if num_classes else None
        self.text = layers.TextEmbedder(*map(int, text), shape.width) if text else None
        self.modulate = layers.Modulation(shape.width, shape.depth)
        self.stack = Stack(_blocks(name, shape, self.grid, family, attention))
        norm = block_class(name).head_norm
        self.head = layers.Head(shape.width, shape.patch, self.out_channels, norm)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw every weight anew; gates and head are set to zero last, and stay so."""
        nn.init.xavier_uniform_(self.patches.project.weight)
        nn.init.zeros_(self.patches.project.bias)
        for block in self.stack.blocks:
            block.initialise()
        for part in (self.time, self.labels, self.text, self.modulate, self.head):
            if part is not None:
                part.initialise()

    def embed(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        text: Tensor | None = None,
        text_drop: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens (B, prefix + N, D), in raster order after the prefix, and c (B, D)."""
        if tuple(x.shape[1:]) != (self.in_channels, *self.config["input_size"]):
            raise BackboneError(
                f"input of shape {tuple(x.shape)} does not fit this model, which takes (batch, "
                f"{self.in_channels}, {', '.join(map(str, self.config['input_size']))})"
            )
        tokens = self.patches(x) + self.positions
        c = self.time(t.expand(x.shape[0]))
        if self.labels is not None:
            c = c + self.labels(y, x.shape[0])
        if self.text is not None:
            words, pooled = self.text(text, x.shape[0], text_drop)
            tokens, c = torch.cat([words.to(tokens.dtype), tokens], dim=1), c + pooled
        return tokens, c

    def layout(self) -> Layout:
        """Return the layout of a dense pass: every grid token, after the prefix."""
        return Layout(self.grid, prefix=self.prefix, device=self.positions.device)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        text: Tensor | None = None,
        text_drop: Tensor | None = None,
        routing: Routing | None = None,
        taps: Collection[int] = (),
        return_output: bool = False,
    ) -> Tensor | Output:
        """Predict.

        Args:
            x: Noisy images (B, C, H p, W p).
            t: The network's time input (B,), any float.
            y: Labels (B,), `num_classes` for no class; None for no class in the whole batch.
            text: Text states (B, L, E); None for no text in the whole batch.
            text_drop: Mask (B,), true where the text is replaced by the learned null text.
            routing: What this pass does about routes; None for a dense pass.
            taps: Blocks whose outputs are wanted; -1 is the input of block 0.
            return_output: Return an `Output` instead of the prediction alone.

        Returns:
            The prediction (B, C_out, H p, W p), or `Output`.
        """
        tokens, c = self.embed(x, t, y, text, text_drop)
        wanted = [i for i in taps if i >= 0]
        out = self.stack(tokens, self.modulate(c), self.layout(), routing, taps=wanted)
        rows = self.head(out.x[:, self.prefix :], c)
        sample = layers.unpatchify(rows, self.grid, self.size.patch)
        if not (return_output or taps):
            return sample
        found = {**({-1: tokens} if -1 in taps else {}), **out.taps}
        return Output(sample, found)

    def forward_intermediates(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        indices: int | Sequence[int] | None = None,
        **conditions: Any,
    ) -> list[Tensor]:
        """Return what blocks put out, as timm's method of this name does.

        Args:
            x: Noisy images (B, C, H p, W p).
            t: The network's time input (B,).
            y: Labels (B,) or None.
            indices: Blocks wanted; a number n for the last n; None for all. -1 is the input of
                block 0.
            **conditions: `text`, `text_drop` and `routing` of `forward`.

        Returns:
            One (B, T, D) tensor per index, in the order asked for, prefix tokens first; within a
            route it holds the tokens that were present.
        """
        if indices is None:
            indices = range(self.depth)
        elif isinstance(indices, int):
            indices = range(self.depth - indices, self.depth)
        bad = [i for i in indices if not -1 <= i < self.depth]
        if bad:
            raise BackboneError(
                f"there is no block {bad[0]}: blocks are 0..{self.depth - 1}, -1 their input"
            )
        output = self(x, t, y, taps=tuple(indices), return_output=True, **conditions)
        return [output.taps[i] for i in indices]

    def describe(self) -> list[str]:
        """Return one line per operation: which implementation runs, and why."""
        device = self.positions.device.type
        asked = {pair: None for block in self.stack.blocks for pair in block.ops()}
        chosen = [resolve(op, kernel, device) for op, kernel in asked]
        lines = [f"{choice.op}: {choice.name} ({choice.why})" for choice in chosen]
        if any(isinstance(block, block_class("dit")) for block in self.stack.blocks):
            lines.append(
                "attention: torch scaled_dot_product_attention (the fastest that is there)"
            )
        return lines


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
)


def _grid(input_size: int | Sequence[int], patch: int) -> tuple[int, int]:
    sides = (input_size, input_size) if isinstance(input_size, int) else tuple(map(int, input_size))
    if len(sides) != 2 or any(s < patch or s % patch for s in sides):
        raise BackboneError(
            f"input_size={input_size} cannot be cut into patches of side {patch}; "
            f"take multiples of {patch}"
        )
    return sides[0] // patch, sides[1] // patch


def attention_blocks(attention: int | Sequence[int], depth: int) -> tuple[int, ...]:
    """Resolve the option `attention` of a hybrid stack to block indices.

    Raises:
        BackboneError: An index outside the stack.
    """
    if isinstance(attention, int):
        return tuple(range(attention - 1, depth, attention)) if attention > 0 else ()
    bad = [i for i in attention if not 0 <= i < depth]
    if bad:
        raise BackboneError(
            f"attention={list(attention)}: there is no block {bad[0]}, blocks are 0..{depth - 1}"
        )
    return tuple(sorted(set(map(int, attention))))


def _blocks(
    name: str, size: Size, grid: tuple[int, int], options: Any, attention: int | Sequence[int]
) -> nn.ModuleList:
    own, dit = block_class(name), block_class("dit")
    chosen = set(attention_blocks(attention, size.depth))
    return nn.ModuleList(
        dit(size, i, grid, dit.Options()) if i in chosen else own(size, i, grid, options)
        for i in range(size.depth)
    )
