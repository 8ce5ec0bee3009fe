"""Options of data=scenes (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from experiments.data.data_options import DataOptions
from experiments.runtime.option_types import Key


@dataclass(frozen=True)
class ScenesOptions(DataOptions):
    """Procedural 32x32 pictures of one large and up to two small shapes."""

    name: str = "scenes"
    seed: int = 0
    max_shapes: Annotated[int, Key(least=1, most=3)] = 3

    sample_shape = (3, 32, 32)
    class_count = 30
    caption_shape = (32, 64)
    dataset = "experiments.data.scenes.Scenes"
    evaluation = "scenes"
