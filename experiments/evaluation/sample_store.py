"""Samples as files: numbered shards, the .npz of ADM's evaluator, grids, PNGs, GIFs.

    FOLDER/manifest.json     what the samples are (settings, number, seeds)
    FOLDER/shard-00000.npz   images (n, H, W, 3) uint8, seeds (n,), labels (n,)

Many samples are shards, so that a kill costs one and ranks share the work. A shard is written whole
or not at all. The same call again makes what is missing, whatever the
number of processes is by then; another setting in the same folder is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from experiments.config.removed_keys import former_defaults
from experiments.evaluation.generation import Progress, labels_from_seeds
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.options.diffusion import DiffusionError
from experiments.options.fields import differing
from experiments.runtime.files import atomic_path, atomic_write
from experiments.runtime.parsing import json_of
from experiments.runtime.processes import gather, world

FORMAT = "tread-suite-samples/1"
SHARD = 512
Text = Callable[[Tensor], Tensor]
#: Images `(n, H, W, 3)`, seeds `(n,)` and labels `(n,)`, -1 for none.
Shard = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True)
class SampleStore:
    """A folder of samples, with the manifest and the shards."""

    folder: Path

    def path(self, number: int) -> Path:
        """Return where a shard is."""
        return self.folder / f"shard-{number:05d}.npz"

    def claim(self, about: Mapping[str, Any], finished: bool = False) -> None:
        """Write the manifest, or compare it with the one that is there.

        A folder without samples yet, from a call that failed at once, may be claimed anew.
        `about` is JSON-able and has at least `count` and `shard` (images a shard); `finished`:
        the shards were used and removed already.
        """
        path = self.folder / "manifest.json"
        about = json.loads(json.dumps(about, default=str))
        if not finished and not any(self.folder.glob("shard-*.npz")):
            atomic_write(path, json.dumps(about, indent=1) + "\n")
            return
        found = json_of(path.read_bytes(), str(path)) if path.exists() else {}
        if other := differing(found if isinstance(found, dict) else {}, about):
            raise DiffusionError(
                f"{self.folder} holds samples with another {', '.join(other)}; give another "
                "folder (--out), or remove this one"
            )

    def write(self, number: int, pixels: Tensor, seeds: Tensor, labels: Tensor | None) -> None:
        """Write one shard of uint8 images `(n, 3, H, W)`; label -1 means none."""
        labels = torch.full_like(seeds, -1) if labels is None else labels
        images = pixels.permute(0, 2, 3, 1).contiguous()
        with atomic_path(self.path(number)) as temporary, temporary.open("wb") as handle:
            np.savez(handle, images=images.numpy(), seeds=seeds.numpy(), labels=labels.numpy())

    def read(self, number: int) -> Shard:
        """Return one shard."""
        path = self.path(number)
        try:
            # numpy leaves a file open that it cannot read: this one is closed here.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
                images, seeds, labels = data["images"], data["seeds"], data["labels"]
                good = images.ndim == 4 and images.dtype == np.uint8
                good = good and all(v.shape == images.shape[:1] for v in (seeds, labels))
                good = good and all(v.dtype.kind in "iu" for v in (seeds, labels))
        except Exception:
            # Zip, zlib and numpy's own parser raise a dozen types between them.
            good = False
        if not good:
            raise DiffusionError(
                f"{path} is damaged; delete it and run the sampling command again to make it"
            )
        return images, seeds, labels

    def shards(self) -> Iterator[Shard]:
        """Yield all shards in order."""
        try:
            about = json_of((self.folder / "manifest.json").read_bytes())
            total = about.get("shards", -(-about["count"] // about["shard"]))
            found = len(list(self.folder.glob("shard-*.npz")))
            if type(total) is not int or total < 1:
                raise ValueError("counts")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
            raise DiffusionError(
                f"{self.folder} is no folder of samples: it has no manifest.json that says how many"
            ) from None
        if found < total:
            raise DiffusionError(
                f"{self.folder} has {found} of {total} shards; run the sampling command again to "
                "make the others"
            )
        for k in range(total):
            yield self.read(k)


def read_shards(folder: str | os.PathLike[str]) -> Iterator[Shard]:
    """Yield (images `(n, H, W, 3)`, seeds `(n,)`, labels `(n,)`, -1 for none) shard by shard.

    Raises:
        DiffusionError: If the folder holds no samples or not yet all of them.
    """
    return SampleStore(Path(folder)).shards()


def generate_shards(
    folder: str | os.PathLike[str],
    pipeline: SamplingPipeline,
    seeds: Tensor,
    labels: Tensor | str | None = "from-seed",
    text: Text | None = None,
    *,
    to_pixels: Callable[[Tensor], Tensor],
    settings: Mapping[str, Any] | None = None,
    shard: int = SHARD,
    batch: int = 64,
    progress: Progress | None = None,
    finished: bool = False,
) -> list[Path]:
    """Generate one image per seed into a folder, going on where an earlier call stopped.

    A collective call: the processes share the shards.

    Args:
        folder: Where the shards are.
        pipeline: The model, and how it is sampled.
        seeds: One per image, int64 `(n,)`.
        labels: As for `generate`.
        text: Function from positions in `seeds`, `(b,)`, to text states `(b, L, E)`.
        to_pixels: From data space `(b, C, H, W)` to uint8 `(b, 3, h, w)`.
        settings: What else identifies the samples, JSON-able (weights, data, ...).
        shard: Images per file.
        batch: Images at once.
        progress: Called with images done and images in all, of this process's share.
        finished: Only compare the settings: the shards were used and removed already.

    Returns:
        All shards in order, those of other processes too (they wait for each other).

    Raises:
        DiffusionError: If the folder holds samples of other settings.
    """
    store, seeds = SampleStore(Path(folder)), seeds.cpu()
    if isinstance(labels, str):
        labels = labels_from_seeds(seeds, getattr(pipeline.model, "num_classes", 0), labels)
    labels = None if labels is None else labels.cpu()
    rank, processes = world()
    parts = ("objective", "sampler", "guidance")
    options = {part: dataclasses.asdict(getattr(pipeline, part).options) for part in parts}
    options["sampler"] |= former_defaults("sampler")  # as older shards have them
    route = pipeline.guidance.route
    options["guidance"]["route"] = str(route) if route else None
    about = {
        "format": FORMAT,
        "count": len(seeds),
        "shard": shard,
        "batch": batch,
        "conditions": _digest(seeds, labels, "none" if text is None else "text"),
        **options,
        "settings": dict(settings or {}),
    }
    if rank == 0:
        store.claim(about, finished)
    gather(None)  # where the first process refuses the folder, the others must not have begun
    pieces = torch.arange(len(seeds)).split(shard)
    paths = [store.path(k) for k in range(len(pieces))]
    if finished:
        return paths
    mine = range(rank, len(pieces), processes)
    done, total = 0, sum(len(pieces[k]) for k in mine)
    report = progress or (lambda *_: None)
    for k in mine:
        rows = pieces[k]
        if not paths[k].exists():
            images = pipeline.generate(
                seeds[rows],
                None if labels is None else labels[rows],
                None if text is None else text(rows),
                batch=batch,
                # Its last batch is reported below, once the shard is written.
                progress=lambda n, of, done=done: n < of and report(done + n, total),  # type: ignore
            )
            pixels = torch.cat([to_pixels(piece).cpu() for piece in images.split(batch)])
            store.write(k, pixels, seeds[rows], None if labels is None else labels[rows])
        done += len(rows)
        report(done, total)
    gather(None)
    return paths


def _digest(seeds: Tensor, labels: Tensor | None, text: str) -> str:
    drawn = b"none" if labels is None else labels.numpy().tobytes()
    # What the texts are is the caller's to say, in `settings`.
    return hashlib.sha256(seeds.numpy().tobytes() + drawn + text.encode()).hexdigest()[:16]


def write_npz(
    pieces: Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]],
    count: int,
    path: str | os.PathLike[str],
) -> None:
    """Write the sample batch that ADM's evaluator reads: `arr_0` images, `arr_1` labels if any.

    Images are streamed: 50,000 of 256x256 are 9.8 GB, more than many machines hold.

    Args:
        pieces: (images uint8 `(n, H, W, 3)`, labels `(n,)`) in order; labels -1 mean none.
        count: Number of images in all.
        path: The `.npz` file.

    Raises:
        ValueError: If the pieces do not add up to `count`.
    """
    labels, written = [], 0
    with (
        atomic_path(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        with archive.open("arr_0.npy", "w", force_zip64=True) as handle:
            for images, classes in pieces:
                if not written:
                    shape = (count, *images.shape[1:])
                    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(handle, header)
                handle.write(np.ascontiguousarray(images).tobytes())
                written += len(images)
                labels.append(np.asarray(classes))
        if written != count:
            raise ValueError(f"{written} images were given for a file of {count}")
        classes = np.concatenate(labels).astype(np.int64)
        if (classes >= 0).all():
            with archive.open("arr_1.npy", "w") as handle:
                np.lib.format.write_array(handle, classes, allow_pickle=False)


# --- pictures -------------------------------------------------------------------------------------


#: Images smaller than this are enlarged by a whole factor: an 8x8 digit is no use at 8x8.
SMALLEST = 48
GAP = 2
PAPER = 255  # white, as the page that a grid is printed on


def image_grid(
    images: Tensor, columns: int | None = None, row_names: Sequence[str] | None = None
) -> NDArray[np.uint8]:
    """Tile uint8 images `(N, 3, H, W)` row by row: uint8 `(height, width, 3)`.

    Without `columns` it is about square; `row_names` stand to the left; places without an image are
    white. The pixels of images whose shorter side is below `SMALLEST` are repeated.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images are uint8 (N, 3, H, W), got {images.dtype} {tuple(images.shape)}")
    scale = max(1, math.ceil(SMALLEST / min(images.shape[2:])))
    tiles = images.cpu().repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    columns = columns or max(1, math.ceil(math.sqrt(len(tiles))))
    rows, height, width = math.ceil(len(tiles) / columns), *(side + GAP for side in tiles.shape[2:])
    # Each with a gap above and to the left.
    cells = tiles.new_full((rows * columns, 3, height, width), PAPER)
    cells[: len(tiles), :, GAP:, GAP:] = tiles
    cells = cells.view(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)
    pixels = cells.reshape(rows * height, columns * width, 3).numpy()
    picture = np.pad(pixels, ((0, GAP), (0, GAP), (0, 0)), constant_values=PAPER)
    return _named(picture, row_names, height) if row_names else picture


def _named(picture: NDArray[np.uint8], names: Sequence[str], pitch: int) -> NDArray[np.uint8]:
    """Add a margin on the left with one name per row."""
    font = ImageFont.load_default()
    lines = [textwrap.wrap(name, 24, max_lines=3, placeholder="...") for name in names]
    widths = [font.getlength(line) for block in lines for line in block]
    margin = math.ceil(max(widths, default=0)) + 3 * GAP
    page = Image.new("RGB", (picture.shape[1] + margin, picture.shape[0]), (PAPER,) * 3)
    page.paste(Image.fromarray(picture), (margin, 0))
    draw = ImageDraw.Draw(page)
    for row, block in enumerate(lines):
        middle = GAP + row * pitch + pitch // 2
        draw.multiline_text((GAP * 2, middle), "\n".join(block), fill=0, font=font, anchor="lm")
    return np.asarray(page)


def save_png(picture: NDArray[np.uint8], path: str | os.PathLike[str]) -> None:
    """Write a picture, uint8 `(height, width, 3)`, whole or not at all."""
    with atomic_path(path) as temporary:
        Image.fromarray(np.ascontiguousarray(picture)).save(temporary, format="PNG")


def save_gif(
    frames: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str], seconds: float = 0.4
) -> None:
    """Make a looping GIF of PNG files; the last one stays longer.

    Smaller ones are put on a page of the largest one's size.
    """
    pages: list[Any] = []
    for name in frames:
        with Image.open(name) as image:
            pages.append(image.convert("RGB"))
    width, height = max(page.width for page in pages), max(page.height for page in pages)
    sheets = [
        ImageOps.expand(page, (0, 0, width - page.width, height - page.height), fill="white")
        for page in pages
    ]
    times = [round(1000 * seconds)] * (len(sheets) - 1) + [round(4000 * seconds)]
    with atomic_path(path) as temporary:
        sheets[0].save(
            temporary, format="GIF", save_all=True, append_images=sheets[1:], duration=times, loop=0
        )
