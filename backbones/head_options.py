"""Options of the learned parts that some baselines add, without torch (see `heads`)."""

from __future__ import annotations

from dataclasses import dataclass

from backbones.sizes import BackboneError, check_positive, parse_size


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
        try:
            check_positive(depth=self.depth, width=self.width, heads=self.heads)
            parse_size("S/2", self.depth, self.width, self.heads)
        except BackboneError as error:
            raise BackboneError(f"decoder: {error}") from None


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

    def __post_init__(self) -> None:
        try:
            check_positive(channels=self.channels, hidden=self.hidden)
        except BackboneError as error:
            raise BackboneError(f"align: {error}") from None
        if type(self.block) is not int:
            raise BackboneError(f"align: block={self.block} is no number of a block")
