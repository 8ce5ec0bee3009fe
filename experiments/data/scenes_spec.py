"""Options of data=scenes (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.data.data_options import DataOptions, require


@dataclass(frozen=True)
class ScenesOptions(DataOptions):
    """Procedural 32x32 pictures of one large and up to two small shapes.

    Args:
        name: Always `scenes`.
        sigma_data: Standard deviation of the scaled data.
        seed: Another seed is another stream of pictures from the same distribution.
        max_shapes: Most shapes in one picture: 1, 2 or 3.
    """

    name: str = "scenes"
    seed: int = 0
    max_shapes: int = 3

    sample_shape = (3, 32, 32)
    class_count = 30
    caption_shape = (32, 64)
    dataset = "experiments.data.scenes.Scenes"
    evaluation = "scenes"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_shapes in (1, 2, 3),
            f"data.max_shapes={self.max_shapes}: a picture holds 1, 2 or 3 shapes; try "
            "data.max_shapes=3",
        )
