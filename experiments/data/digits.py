"""scikit-learn's handwritten digits: real, 8x8, 1 channel, 10 classes, nothing to download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from experiments.data.digits_spec import DigitsOptions
from experiments.data.pixel_set import GreyImages


class Digits(GreyImages):
    """1797 digits; a pixel counts the ink of a 4x4 cell, 0 to 16."""

    def __init__(
        self, options: DigitsOptions, task: str = "class", device: torch.device | str = "cpu"
    ) -> None:
        images, labels = load_digits(return_X_y=True)
        super().__init__(options, task, device, images, labels, white=16)
