"""scikit-learn's handwritten digits: real, 8x8, 1 channel, 10 classes, nothing to download."""

from __future__ import annotations

import hashlib

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from experiments.data.dataset import Batch, Dataset, Rows, to_uint8
from experiments.data.digits_spec import DigitsOptions
from routing.rng import Draws

_LEVELS = 16  # a pixel counts the ink of a 4x4 cell: 0..16


class Digits(Dataset):
    """1797 digits, split once into train and held-out with the same share of every class.

    The data are shifted and scaled by two numbers, the mean and standard deviation of the training
    pixels, to mean 0 and `sigma_data`. There are no flips: a mirrored 2 is no digit.
    """

    def __init__(
        self, options: DigitsOptions, task: str = "class", device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(options, task, device)
        images, labels = load_digits(return_X_y=True)
        train, test = train_test_split(
            range(len(labels)),
            test_size=options.test_fraction,
            random_state=options.split_seed,
            stratify=labels,
        )
        pixels = torch.from_numpy(images).float().view(-1, 1, 8, 8)
        classes = torch.from_numpy(labels).long()
        # Ascending, so that the split alone, not the library's order, defines sample i.
        chosen = {"train": sorted(train), "test": sorted(test)}
        self.class_names = tuple(str(digit) for digit in range(self.num_classes))
        self.sizes = {split: len(rows) for split, rows in chosen.items()}
        ink = pixels[chosen["train"]].double()
        self._mean, self._std = float(ink.mean()), float(ink.std(correction=0))
        scaled = ((pixels.double() - self._mean) * (self.sigma_data / self._std)).float()
        self._x = {split: scaled[rows].to(self.device) for split, rows in chosen.items()}
        self._y = {split: classes[rows].to(self.device) for split, rows in chosen.items()}
        digest = hashlib.sha256(images.tobytes() + labels.tobytes())
        digest.update(repr((options, chosen["test"])).encode())
        self.fingerprint = digest.hexdigest()[:16]

    def batch(
        self,
        index: Tensor,
        draws: Draws | None = None,
        split: str = "train",
        rows: Rows | None = None,
    ) -> Batch:
        """Return digits and their labels; nothing is random."""
        self._check(index, split)
        index = index.to(self.device)
        y = self._y[split][index] if self.task == "class" else None
        return Batch(self._x[split][index], y)

    def to_pixels(self, x: Tensor) -> Tensor:
        """Turn (B, 1, 8, 8) into uint8 grey RGB (B, 3, 8, 8), ink white."""
        ink = x.float() * (self._std / self.sigma_data) + self._mean
        return to_uint8(ink * (255 / _LEVELS)).expand(-1, 3, -1, -1).contiguous()
