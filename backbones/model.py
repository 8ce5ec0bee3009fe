"""The model: embed -> `routing.Stack` -> head, for every family.

    x (B, C, H p, W p) --patches + positions--> tokens (B, N, D)
    c (B, D) = time embedding + class embedding or pooled text
    tokens --blocks under c--> head --> prediction (B, C, H p, W p)

Only the blocks and the head's norm depend on the family. Routes are handled by `routing.Stack`: a
forward pass gives it a `Routing`, or None for a dense pass.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from backbones.build import build_stack, describe_kernels, kernels
from backbones.heads import (
    BlockNorms,
    ContextTokens,
    Decoder,
    Head,
    LabelEmbedder,
    Modulation,
    PatchEmbed,
    Projector,
    TextEmbedder,
    TimeEmbedder,
    sincos_2d,
    unpatchify,
)
from backbones.ops import native
from backbones.options import ModelConfig
from backbones.registry import branches, find, model_config
from backbones.sizes import AlignOptions, BackboneError, DecoderOptions, Size, build_options
from backbones.weights import Pretrained
from routing.layout import Layout, Move
from routing.routed_pass import Routing
from routing.stack import StackOutput

LARGEST_INITIAL_VALUE = 1e4  # Uninitialised memory is often beyond it, or NaN.


@dataclass
class Output:
    """What a forward pass returns with `return_output=True`.

    Attributes:
        sample: Prediction (B, C_out, H p, W p); 0 where a token was dropped for good and no decoder
            predicts it.
        taps: Block index -> its output (B, T, D), prefix first; -1 is the input of block 0.
        tap_layouts: Which tokens each tap holds.
        inner: The layout inside each segment of the route: `.ids` are the tokens that stayed.
        kept: Mask of the grid tokens that are in the prediction, (B, N) or (1, N), where some were
            dropped for good; None otherwise. With a decoder: those that it saw.
        aligned: Projected tokens (B, K, channels) of the aligned block (REPA), without the prefix.
        aligned_layout: Which grid tokens those are: `.take_batched` picks their targets.
    """

    sample: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    tap_layouts: dict[int, Layout] = field(default_factory=dict)
    inner: tuple[Layout, ...] = ()
    kept: Tensor | None = None
    aligned: Tensor | None = None
    aligned_layout: Layout | None = None


class Backbone(nn.Module, Pretrained):
    """Diffusion backbone of any family (see `backbones.create`).

    Args:
        config: The model's arguments, from `registry.model_config`.

    Attributes:
        name: Family.
        size: Shape of the stack.
        grid: Patches (H, W).
        num_tokens: H W, without prefix tokens.
        residual: Type of the residual stream in a training pass under autocast; None keeps float32.
        prefix: Number of prefix tokens: class tokens (`context_tokens`), text, and with
            `condition=prefix` time and class.
        config: Every argument, fit for JSON; `create(**config)` builds the same model.

    Raises:
        BackboneError: Values that do not fit, a block with more or fewer parameters than its family
            counts, or a parameter that the block's `initialise()` does not set.
    """

    positions: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape, family = config.shape, find(config.name)
        self.name, self.size, self.grid = config.name, shape, config.grid
        self.depth, self.width = shape.depth, shape.width
        self.in_channels, self.out_channels = config.in_channels, config.out_channels
        self.num_classes, self.prefix = config.num_classes, config.prefix
        self.num_tokens = config.num_tokens
        self.residual: torch.dtype | None = None
        self.config: dict[str, Any] = config.arguments()

        self.patches = PatchEmbed(config.in_channels, shape.patch, shape.width, config.bottleneck)
        self.register_buffer("positions", sincos_2d(shape.width, self.grid), persistent=False)
        self.time = TimeEmbedder(shape.width, *config.time_shape)
        self.labels = LabelEmbedder(config.num_classes, shape.width) if config.num_classes else None
        self.text = TextEmbedder(config.text, shape.width) if config.text else None
        self.context: ContextTokens | None = None
        if config.context_tokens:
            self.context = ContextTokens(config.context_tokens, shape.width)
        self.condition = config.condition
        self.modulate: Modulation | BlockNorms
        if config.condition == "adaln":
            self.modulate = Modulation(shape.width, shape.depth, 3 * branches(config))
        else:
            self.modulate = BlockNorms(shape.width, shape.depth, branches(config))
        self.stack = build_stack(config)
        kernels(self.stack.blocks)  # An unavailable kernel is an error now, not in step 1.
        self.head: Head | None = None
        self.decoder: Decoder | None = None
        if config.decoder is None:
            self.head = Head(
                shape.width, shape.patch, self.out_channels, weighted=family.weighted_norms
            )
        else:
            decoder = build_options(DecoderOptions, config.decoder, "decoder")
            self.decoder = Decoder(shape.width, decoder, self.grid, shape.patch, self.out_channels)
        self.align: Projector | None = None
        if config.align is not None:
            align = build_options(AlignOptions, config.align, "align")
            if align.block >= self.depth:
                raise BackboneError(
                    f"align: there is no block {align.block}: blocks are 0..{self.depth - 1}"
                )
            self.align = Projector(shape.width, align)
        self.initialise()
        self._check_initialised()

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type, which images must have."""
        return self.patches.project.weight.dtype

    @torch.no_grad()
    def initialise(self) -> None:
        """Initialise all weights but those of SPRINT's fusion; gates and head start at zero."""
        self.patches.initialise()
        blocks: Any = self.stack.blocks
        for block in blocks:
            block.initialise()
        embedders = (self.time, self.labels, self.text, self.context, self.modulate)
        for module in (*embedders, self.head, self.decoder, self.align):
            if module is not None:
                module.initialise()

    def _check_initialised(self) -> None:
        """Refuse a block with a parameter that still holds the garbage of `torch.empty`."""
        for name, parameter in self.stack.blocks.named_parameters():
            values = parameter.data
            if values.is_meta or type(values) is not Tensor or values.numel() == 0:
                continue  # a shape without values: on the meta device, or a fake tensor
            largest = float(torch.stack(values.aminmax()).abs().max())  # copies no weights
            if not largest < LARGEST_INITIAL_VALUE:
                raise BackboneError(
                    f"backbone {self.name}: parameter {name} of the blocks has values up to "
                    f"{largest:.3g} after initialisation; set it in the block's initialise()"
                )

    def embed(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        text: Tensor | None = None,
        text_drop: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens (B, prefix + N, D), in raster order after the prefix, and c (B, D)."""
        expected = [("input", x, (self.in_channels, *self.config["input_size"]))]
        if self.text is not None and text is not None:
            expected.append(("text", text, self.text.shape))
        for name, tensor, shape in expected:
            if tuple(tensor.shape) != (len(x), *shape):
                raise BackboneError(
                    f"{name} of shape {tuple(tensor.shape)} does not fit this model, which takes "
                    f"(batch, {', '.join(map(str, shape))})"
                )
        tokens = self.patches(x) + self.positions
        time = c = self.time(t.expand(x.shape[0]))
        condition_tokens = [time]
        if self.labels is not None:
            label = self.labels(y, x.shape[0])
            c = c + label
            condition_tokens.append(label)
        if self.condition == "prefix":
            front = torch.stack(condition_tokens, dim=1).to(tokens.dtype)
            tokens = torch.cat([front, tokens], dim=1)
        if self.text is not None:
            prefix, pooled = self.text(text, x.shape[0], text_drop)
            tokens, c = torch.cat([prefix.to(tokens.dtype), tokens], dim=1), c + pooled
        if self.context is not None:
            tokens = torch.cat([self.context(label).to(tokens.dtype), tokens], dim=1)
        return tokens, c

    def conditions(
        self, y: Tensor | None, text: Tensor | None, drop: Tensor
    ) -> dict[str, Tensor | None]:
        """Return labels or captions as `forward` takes them, some dropped (for guidance).

        Args:
            y: Labels (B,), or None.
            text: Text states (B, L, E), or None.
            drop: Samples (B,) that get no class, or the learned null text.
        """
        conditions: dict[str, Tensor | None] = {}
        if y is not None and self.num_classes:
            # The class after the last one is the null class.
            conditions["y"] = torch.where(drop, torch.full_like(y, self.num_classes), y)
        if self.text is not None:
            conditions.update(text=text, text_drop=drop)
        return conditions

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
            routing: Routing of this pass; None for a dense pass.
            taps: Blocks whose outputs are wanted; -1 is the input of block 0.
            return_output: Return an `Output` instead of the prediction alone; so do taps.

        Returns:
            The prediction (B, C_out, H p, W p), or `Output`.
        """
        is_cpu = x.device.type == "cpu"
        if native.ACTIVE.library is None and is_cpu and not torch.compiler.is_compiling():
            native.library()  # builds or loads the element-wise operations of every block
        tokens, c = self.embed(x, t, y, text, text_drop)
        if self.residual is not None and self.training and torch.is_autocast_enabled(x.device.type):
            tokens = tokens.to(self.residual)
        align = self.align if return_output else None
        tapped = {*taps} if align is None else {*taps, align.block}
        layout = self.layout()
        out = self.stack(tokens, self.modulate(c), layout, routing, taps=tapped)
        sample = unpatchify(self._predict(out, c, layout), self.grid, self.size.patch)
        if not (return_output or taps):
            return sample
        output = Output(sample, out.taps, out.tap_layouts, out.inner, out.kept)
        if align is not None:
            output.aligned_layout = out.tap_layouts[align.block]
            output.aligned = align(out.taps[align.block][:, self.prefix :])
        return output

    def _predict(self, out: StackOutput, c: Tensor, layout: Layout) -> Tensor:
        """Return the pixels of each grid token's patch, (B, N, p p C)."""
        if self.decoder is not None:
            move = None if out.kept is None else layout.move_to(out.layout)
            return self.decoder(out.x, c, move, layout)
        assert self.head is not None
        patches, ids = self.head(out.x[:, self.prefix :], c), out.layout.ids
        if ids is None:
            return patches
        empty = patches.new_zeros(patches.shape[0], self.num_tokens, patches.shape[-1])
        return Move(ids, self.num_tokens).put(empty, patches)

    def describe(self) -> list[str]:
        """Return one line per operation: which implementation runs, and why."""
        return describe_kernels(self.stack.blocks, self.positions.device.type)


def create(name: str, size: str | Size = "S/2", **options: Any) -> Backbone:
    """Build a model.

    Args:
        name: Family, one of `names()`.
        size: Letter and patch, as "S/2" (`backbones.sizes.SIZES`).
        **options: The other arguments of `backbones.options.ModelConfig`, and the family's own
            options.

    Raises:
        BackboneError: Unknown name, size or option, or a value that does not fit.
    """
    return Backbone(model_config(name, size, **options))
