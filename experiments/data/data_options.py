"""Base class of the options of a data set, which describe it before any file is read (no torch)."""

from __future__ import annotations

import functools
import textwrap
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from experiments.options.roles import Default
from experiments.runtime.digest import File
from routing import errors
from routing.errors import UserError

TASKS = ("class", "text", "none")
#: Suffixes of the images that `experiments/prepare.py` reads.
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
#: What an error about another data set says to a user who has pictures.
OWN_PICTURES = "for pictures of your own, type data=folder data.path=DIR"
# Columns of the line on the contents.
_LINE_WIDTH = 80


class DataError(UserError):
    """Data that are missing, damaged, or in an unexpected layout."""


class ShapeError(DataError):
    """Latents whose shape differs from `data.shape`."""


#: Refuse data unless a condition holds: `require(condition, message)`.
require = functools.partial(errors.require, error=DataError)


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def contents_lines(
    sizes: Mapping[str, int | None], class_names: Sequence[str], task: str
) -> list[str]:
    """Return the console line on the samples of each split and the classes; none if not known.

    Of many classes it names the first ones; classes that are numbered have no names.
    """
    if not sizes.get("train"):
        return []
    line = f"data        {sizes['train']:,} training pictures, {sizes.get('test') or 0:,} held out"
    if task != "class" or not class_names:
        return [line]
    line += f", {len(class_names):,} {'class' if len(class_names) == 1 else 'classes'}"
    if not all(name.isdecimal() for name in class_names):
        width = max(4, _LINE_WIDTH - len(line) - 2)
        names = textwrap.shorten(", ".join(class_names), width, placeholder=" ...")
        line += f": {names}"
    return [line]


def warn_of_empty_classes(name: str, present: Collection[int], class_names: Sequence[str]) -> None:
    """Warn of classes of data `name` without a training sample; `present` are those with one."""
    empty = [number for number in range(len(class_names)) if number not in present]
    if empty:
        warnings.warn(
            f"data={name}: {len(empty):,} of {len(class_names):,} classes have no training sample, "
            f"such as {class_names[empty[0]]}; the model does not learn what they look like",
            stacklevel=2,
        )


@dataclass(frozen=True)
class DataOptions:
    """Base class of the options of a data set.

    The class attributes describe the data set without reading it. They are enough to name a run,
    count its parameters and FLOPs and check it before submission, also on a machine that does not
    hold the data.
    """

    name: str
    sigma_data: Annotated[
        float,
        Gt(0),
        Default("${objective.sigma_data}"),
        "Standard deviation to which the data are scaled; follows the objective (EDM, Table 1: "
        "0.5).",
    ] = 0.5

    sample_shape: ClassVar[tuple[int, int, int]] = (0, 0, 0)  # (C, H, W)
    class_count: ClassVar[int] = 0  # 0 without labels
    caption_shape: ClassVar[tuple[int, int] | None] = None  # (L, E), or None without captions
    dataset: ClassVar[str]  # "module:Class" of the `Dataset`
    patch: ClassVar[int] = 2  # patch size at scale `tiny`
    # Mean of ln(sigma) in EDM's training. Images with redundant pixels need more noise before their
    # content is hidden. The default is the paper's for latents.
    p_mean: ClassVar[float] = -1.2
    cfg_scale: ClassVar[float] = 1.5  # scale of classifier-free guidance
    # Options that only say where the data are. They are not part of a run's identity, which holds
    # the fingerprint of what lies there.
    location_keys: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[str] = ""  # origin and licence; exported with the weights

    def actual_shape(self) -> tuple[int, int, int]:
        """Return (C, H, W) of one sample: `sample_shape`, unless the files say otherwise."""
        return self.sample_shape

    def describe(self) -> dict[str, Any]:
        """Return name, shape, number of classes and caption shape of the data.

        Raises:
            DataError: The files exist and contradict the options.
        """
        return {
            "name": self.name,
            "shape": list(self.actual_shape()),
            "num_classes": self.class_count,
            "text": list(self.caption_shape) if self.caption_shape else None,
        }

    def check_files(self) -> None:
        """Raise `DataError` for missing files, without reading any."""

    def check_contents(self, task: str) -> None:
        """Raise `DataError` for contents that cannot train this `task`; used by a dry run."""

    def contents_lines(self, task: str) -> list[str]:
        """Return `contents_lines` where no sample must be read for it; used by a dry run."""
        return []

    def left_out(self) -> str:
        """Return what lies beside the samples and is not read, for the console; empty for none."""
        return ""

    def undecodable_reason(self) -> str:
        """Return why samples cannot become images on this machine; empty if they can."""
        return ""

    def path_fingerprints(self) -> dict[str, str]:
        """Return what a run's hash holds in place of further options that are paths."""
        return {}

    def content_files(self) -> list[File]:
        """Return the files whose content must be the same when a run resumes.

        None for data that are a function of the options, or checked against published checksums.
        """
        return []

    def fingerprint(self) -> str:
        """Return the part of a run's hash that follows the data's contents.

        It is `embedded` for data that are a function of the options, and `absent` for missing data.
        """
        return "embedded"
