"""Options of data=torchvision, and what is known of each of its sets (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.data.data_options import DataOptions, one_of

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
class TorchvisionOptions(DataOptions):
    """A small data set as torchvision downloads it: CIFAR-10 and -100, SVHN, MNIST and its kin.

    Args:
        name: Always `torchvision`.
        sigma_data: Standard deviation of the scaled data.
        set: Which one, a name of `SETS`.
        root: torchvision's `root`; None: the user's cache folder. What is not there is downloaded.
        flip: `auto`: CIFAR is mirrored at random while training; `mirror` or `none`: for any set.
    """

    name: str = "torchvision"
    set: str = "CIFAR10"
    root: str | None = None
    flip: str = "auto"

    sample_shape = _COLOUR
    class_count = 10
    patch = 4
    places = ("root",)
    dataset = "experiments.data.torchvision.Torchvision"
    evaluation = "torchvision"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("data.set", self.set, SETS)
        one_of("data.flip", self.flip, ("auto", "mirror", "none"))
        shape, classes, _ = SETS[self.set]
        object.__setattr__(self, "sample_shape", shape)
        object.__setattr__(self, "class_count", classes)

    @property
    def mirrored(self) -> bool:
        """Whether training images are mirrored at random."""
        return self.flip == "mirror" or (self.flip == "auto" and SETS[self.set][2])
