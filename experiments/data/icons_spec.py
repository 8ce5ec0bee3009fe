"""Options of data=icons (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.data.data_options import DataOptions
from experiments.data.published_files import package_folder


@dataclass(frozen=True)
class IconsOptions(DataOptions):
    """Icons of free fonts, 28x28 grey in 32x32; a class is the first word of an icon's name.

    Args:
        name: Always `icons`.
        sigma_data: Standard deviation of the scaled data.
    """

    name: str = "icons"

    sample_shape = (1, 32, 32)
    class_count = 50
    patch = 4
    dataset = "experiments.data.icons.Icons"
    evaluation = "icons"

    def check(self) -> None:
        """Refuse the set where the package that brings the fonts is not installed."""
        self.package()

    @staticmethod
    def package() -> Path:
        """Return the folder of that package."""
        return package_folder("qtawesome", "data=icons", "the fonts")
