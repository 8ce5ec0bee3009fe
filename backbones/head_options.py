"""Options of the learned parts that some baselines add, without torch (see `heads`)."""

from __future__ import annotations

from dataclasses import dataclass

from backbones.sizes import BackboneError


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
        if self.depth < 1 or self.width % 16 or self.width % self.heads:
            raise BackboneError(
                f"decoder of depth {self.depth}, width {self.width}, heads {self.heads}: expected "
                "one block or more, a width that is a multiple of 16, and heads that divide it"
            )


@dataclass(frozen=True)
class AlignOptions:
    """What REPA aligns.

    Attributes:
        block: Block whose output is projected; inside a route that is the tokens that stayed.
        channels: Width of the encoder's features (DINOv2-B has 768).
        hidden: Hidden width of the projector (the paper's).
    """

    block: int = 7
    channels: int = 768
    hidden: int = 2048
