"""Options of data=fashion (no torch here)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.data.data_options import DataError, DataOptions
from experiments.data.idx_files import NAMES

_WAYS = (
    "give data.path=FOLDER with its four IDX files (Debian's package dataset-fashion-mnist is such "
    "a folder, /usr/share/datasets/fashion-mnist), or leave data.path out to download them"
)


@dataclass(frozen=True)
class FashionOptions(DataOptions):
    """Fashion-MNIST (Xiao et al. 2017): 70,000 pictures of clothes, 28x28 grey in 32x32.

    Args:
        name: Always `fashion`.
        sigma_data: Standard deviation of the scaled data.
        path: Folder with the four IDX files, packed (.gz) or not; None: downloaded once.
    """

    name: str = "fashion"
    path: str | None = None

    sample_shape = (1, 32, 32)
    class_count = 10
    patch = 4
    p_mean = 0.0
    places = ("path",)
    dataset = "experiments.data.fashion.Fashion"
    evaluation = "fashion"

    def check(self) -> None:
        """Refuse a folder in which a file is missing; without one, they are downloaded."""
        if self.path:
            with explained():
                files_of(Path(self.path).expanduser())


def files_of(folder: Path) -> dict[str, Path]:
    """Return the four files by their published names, packed or not.

    Raises:
        DataError: One is missing.
    """
    found = {}
    for name in itertools.chain(*NAMES.values()):
        path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
        if path is None:
            raise DataError(f"there is no {name} or {name}.gz in {folder}")
        found[name] = path
    return found


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Add to what is wrong with the files whose they are, and how to get them."""
    try:
        yield
    except DataError as error:
        raise DataError(f"data=fashion: {error}; {_WAYS}") from None
