"""Options that all backbones share (no torch here)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from backbones.options.model import (
    Attention,
    Bottleneck,
    Condition,
    ContextStart,
    ContextTokens,
    Depth,
    Heads,
    Skips,
    Width,
)
from backbones.sizes import AlignOptions, DecoderOptions, Size, parse_size
from experiments.options.roles import ROUTES


@dataclass(frozen=True)
class SharedBackboneOptions:
    """Options of every `backbone=`, beside those of the family."""

    attention: Attention = 0
    depth: Depth = None
    width: Width = None
    heads: Heads = None
    condition: Condition = "adaln"
    skips: Skips = False
    bottleneck: Bottleneck = None
    context_tokens: ContextTokens = 0
    context_start: ContextStart = None
    decoder: Annotated[
        DecoderOptions | None,
        ROUTES,
        "MaskDiT's decoder, e.g. {depth: 8, width: 512, heads: 16}, which predicts dropped tokens.",
    ] = None
    align: Annotated[
        AlignOptions | None,
        ROUTES,
        "REPA's projector, e.g. {block: 7, channels: 768}; null: chosen if train.encoder is set.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class BackboneOptions(SharedBackboneOptions):
    """The options of one `backbone=`: those that all share, and those of its family."""

    name: str
    family: Any  # the family's own dataclass (`backbones.options.Spec.options`)

    def shape(self, size: str) -> Size:
        """Return the shape of a stack of this size, such as S/2, with these overrides."""
        return parse_size(size, self.depth, self.width, self.heads)

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of `backbones.create`."""
        shared = asdict(self)
        family = shared.pop("family")
        # Null leaves the choice to the size.
        return {key: value for key, value in shared.items() if value is not None} | family
