"""Options that all backbones share (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from experiments.options.roles import ROUTES


@dataclass(frozen=True)
class SharedBackboneOptions:
    """Options of every `backbone=`, beside those of the family."""

    attention: Annotated[
        int | list[int],
        "Attention blocks in a hybrid stack: 4 makes every fourth block one, [5,11] names them; 0: "
        "none.",
    ] = 0
    depth: Annotated[Annotated[int, Ge(1)] | None, "Blocks; null: as the size says."] = None
    width: Annotated[
        Annotated[int, Ge(1)] | None, "Channels, a multiple of 16; null: as the size says."
    ] = None
    heads: Annotated[Annotated[int, Ge(1)] | None, "Attention heads; null: as the size says."] = (
        None
    )
    bottleneck: Annotated[
        Annotated[int, Ge(1)] | None,
        "Channels between the two linear layers of the patch embedding (JiT: 128, for B/16); null: "
        "one layer.",
    ] = None
    decoder: Annotated[
        dict[str, Any] | None,
        ROUTES,
        "MaskDiT's decoder, e.g. {depth: 8, width: 512, heads: 16}, which predicts dropped tokens.",
    ] = None
    align: Annotated[
        dict[str, Any] | None,
        ROUTES,
        "REPA's projector, e.g. {block: 7, channels: 768}; null: chosen if train.encoder is set.",
    ] = None
