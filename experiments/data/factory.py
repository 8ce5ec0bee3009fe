"""Make a data set from its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from experiments.data.data_options import (
    DataError,
    DataOptions,
    DigitsOptions,
    LatentsOptions,
    ScenesOptions,
    parse,
)
from experiments.data.dataset import Dataset


def create(
    options: DataOptions | Mapping[str, Any],
    *,
    task: str = "class",
    device: torch.device | str = "cpu",
) -> Dataset:
    """Return the data set that `options` describe.

    Args:
        options: A dataclass of `experiments.data.data_options`, or a mapping with its keys and a
            `name`.
        task: `class`, `text` or `none`: what batches carry beside the data.
        device: Where batches are made.

    Raises:
        DataError: Options, files or task that do not fit, in one sentence.
    """
    chosen = parse(options)
    if isinstance(chosen, DigitsOptions):
        from experiments.data.digits import Digits

        return Digits(chosen, task, device)
    if isinstance(chosen, ScenesOptions):
        from experiments.data.scenes import Scenes

        return Scenes(chosen, task, device)
    if isinstance(chosen, LatentsOptions):
        from experiments.data.latents import Latents

        return Latents(chosen, task, device)
    raise DataError(f"no data set for options of type {type(chosen).__name__}")
