"""scikit-learn's handwritten digits: real, 8x8, 1 channel, 10 classes, nothing to download."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.data.published_files import LabelledImages, SplitOptions


@dataclass(frozen=True)
class DigitsOptions(SplitOptions):
    """scikit-learn's 1797 handwritten digits, 8x8 grey."""

    name: str = "digits"

    sample_shape = (1, 8, 8)
    class_count = 10
    evaluation = "digits"
    patch = 1

    def read(self) -> LabelledImages:
        """Return the images; a pixel counts the ink of a 4x4 cell, 0 to 16."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        return self.split(images, labels, white=16)
