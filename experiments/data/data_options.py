"""Options of the data sets: frozen dataclasses, checked when they are made (no torch here)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from routing.errors import UserError, suggest

TASKS = ("class", "text", "none")


class DataError(UserError):
    """Data that are missing, damaged, or laid out otherwise than they should be."""


class ShapeError(DataError):
    """Latents of another shape than `data.shape`."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise DataError(message)


def _one_of(key: str, value: str, options: tuple[str, ...]) -> None:
    _require(
        value in options,
        f"data.{key}={value}: expected one of {', '.join(options)}{suggest(value, options)}",
    )


@dataclass(frozen=True)
class DataOptions:
    """What every data set has: its name and the standard deviation it is scaled to.

    Args:
        name: Which data set.
        sigma_data: Standard deviation of the data as the model sees them (EDM, table 1: 0.5).
    """

    name: str
    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        _require(
            0 < self.sigma_data < float("inf"),
            f"data.sigma_data={self.sigma_data}: must be positive; the paper uses "
            "data.sigma_data=0.5",
        )


@dataclass(frozen=True)
class DigitsOptions(DataOptions):
    """scikit-learn's 1797 handwritten digits, 8x8 grey.

    Args:
        name: Always `digits`.
        sigma_data: Standard deviation of the scaled data.
        test_fraction: Share of every class that is held out from training.
        split_seed: Which samples are held out.
    """

    name: str = "digits"
    test_fraction: float = 0.2
    split_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            0.01 <= self.test_fraction <= 0.9,
            f"data.test_fraction={self.test_fraction}: must lie in 0.01..0.9; try "
            "data.test_fraction=0.2",
        )


@dataclass(frozen=True)
class ScenesOptions(DataOptions):
    """Procedural 32x32 pictures of one large and up to two small shapes.

    Args:
        name: Always `scenes`.
        sigma_data: Standard deviation of the scaled data.
        seed: Another seed is another stream of pictures from the same distribution.
        max_shapes: Most shapes in one picture: 1, 2 or 3.
    """

    name: str = "scenes"
    seed: int = 0
    max_shapes: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.max_shapes in (1, 2, 3),
            f"data.max_shapes={self.max_shapes}: a picture holds 1, 2 or 3 shapes; try "
            "data.max_shapes=3",
        )


@dataclass(frozen=True)
class LatentsOptions(DataOptions):
    """Precomputed VAE latents: ImageNet-256 (4x32x32), ImageNet-512 (4x64x64), COCO.

    Args:
        name: Always `latents`.
        sigma_data: Standard deviation that the objective assumes.
        path: Folder of the store: from `experiments/prepare.py`, WebDataset tars, or
            LightningDiT's shards.
        shape: (C, H, W) that the latents must have, or None for any.
        test: A second store for the held-out split, or None.
        held_out: Number of samples taken out of `path` for the held-out split where `test` is None.
        flip: `auto`: stored flips where there are any; `mirror`: mirror the latent itself; `none`.
        scale: `factor`: times the VAE's scale factor; `std`: every channel to mean 0 and
            `sigma_data`.
        scale_factor: Overrides the VAE's scale factor where a store names none (SD: 0.18215).
        scaled: `auto`: what the store says; `yes` or `no`: whether foreign latents are already
            scaled.
        kind: `auto`, or what foreign latents hold: `sample` or `moments` (mean and log variance).
        num_classes: Number of classes where a store names none; None: highest label plus one.
        vae: diffusers AutoencoderKL for pixels, a name or a folder; `auto`: the store's own.
        vae_dtype: `float32` or `bfloat16` for decoding.
        decode_batch: Latents decoded at a time.
        verify: Check every shard's SHA-256 at the start (reads the whole store).
    """

    name: str = "latents"
    path: str | None = None
    shape: Sequence[int] | None = None
    test: str | None = None
    held_out: int = 0
    flip: str = "auto"
    scale: str = "factor"
    scale_factor: float | None = None
    scaled: str = "auto"
    kind: str = "auto"
    num_classes: int | None = None
    vae: str = "auto"
    vae_dtype: str = "float32"
    decode_batch: int = 16
    verify: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.shape is None
            or (len(self.shape) == 3 and all(type(n) is int and n > 0 for n in self.shape)),
            f"data.shape={self.shape}: expected null or three sizes such as data.shape=[32,16,16]",
        )
        _one_of("flip", self.flip, ("auto", "mirror", "none"))
        _one_of("scale", self.scale, ("factor", "std"))
        _one_of("kind", self.kind, ("auto", "sample", "moments"))
        _one_of("scaled", self.scaled, ("auto", "yes", "no"))
        _one_of("vae_dtype", self.vae_dtype, ("float32", "bfloat16"))
        _require(
            self.held_out >= 0,
            f"data.held_out={self.held_out}: must be 0 or a number of samples; try "
            "data.held_out=5000",
        )
        _require(
            self.decode_batch >= 1,
            f"data.decode_batch={self.decode_batch}: must be at least 1; try data.decode_batch=16",
        )
        _require(
            self.scale_factor is None or self.scale_factor > 0,
            f"data.scale_factor={self.scale_factor}: must be positive; SD's VAE has "
            "data.scale_factor=0.18215",
        )
        _require(
            self.num_classes is None or self.num_classes >= 0,
            f"data.num_classes={self.num_classes}: must be 0 or more; ImageNet has "
            "data.num_classes=1000",
        )
        _require(
            self.held_out == 0 or self.test is None,
            "data.held_out and data.test are both set; set data.held_out=0 to use the store of "
            "data.test",
        )


OPTIONS: dict[str, type[DataOptions]] = {
    "digits": DigitsOptions,
    "scenes": ScenesOptions,
    "latents": LatentsOptions,
}


def names() -> tuple[str, ...]:
    """Return the names that `data=` takes."""
    return tuple(OPTIONS)


def parse(options: DataOptions | Mapping[str, Any]) -> DataOptions:
    """Return checked options from a mapping with a `name`, or the options themselves.

    Args:
        options: A dataclass of this module, or a mapping (dict, DictConfig) with the same keys.

    Raises:
        DataError: An unknown data set or key.
    """
    if isinstance(options, DataOptions):
        return options
    values = dict(options)
    name = str(values.get("name", ""))
    _require(
        name in OPTIONS,
        f"unknown data set {name!r}: expected one of {', '.join(OPTIONS)}{suggest(name, OPTIONS)}",
    )
    known = {field.name: str(field.type) for field in dataclasses.fields(OPTIONS[name])}
    for key, value in values.items():
        _require(key in known, f"unknown key data.{key} of data={name}{suggest(key, known)}")
        words = known[key] not in ("str", "str | None") or isinstance(value, str | PurePath | None)
        _require(words, f"data.{key}={value!r}: expected text")
    try:
        return OPTIONS[name](**values)
    except (TypeError, OverflowError, AttributeError) as error:
        raise DataError(f"data={name}: a value of the wrong type ({error})") from None
