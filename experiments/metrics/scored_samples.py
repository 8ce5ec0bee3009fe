"""The samples that are scored: which seeds and conditions, in what pieces, kept on disk or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from experiments.metrics.collectives import main_first, share, world
from experiments.metrics.eval_options import EvalOptions
from experiments.metrics.metric_names import MetricError
from experiments.runtime.files import atomic_path, atomic_write

if TYPE_CHECKING:
    from experiments.sampling.recipe import Setup


@dataclass
class Piece:
    """Some images with what was asked for.

    Attributes:
        images: uint8, with shape `(B, 3, H, W)`.
        labels: Classes `(B,)`, or None.
        captions: Captions, or None.
    """

    images: Tensor
    labels: Tensor | None = None
    captions: list[str] | None = None


def conditions(
    dataset: Any, model: Any, options: EvalOptions, index: Tensor, device: torch.device
) -> tuple[Tensor | None, Tensor | None, list[str] | None]:
    """Return labels, text states and captions of the samples at `index`, None where not taken.

    Labels are balanced or drawn per seed; captions are those of the held-out split, in order.
    """
    from experiments.sampling import labels_from_seeds

    if getattr(model, "num_classes", 0):
        how = "balanced" if options.labels == "balanced" else "from-seed"
        return labels_from_seeds(options.seed + index, model.num_classes, how), None, None
    if not (getattr(model, "config", None) or {}).get("text"):
        return None, None, None
    found = dataset.prompts(index)
    return None, found.text.to(device), found.captions


def pieces(
    setup: Setup,
    dataset: Any,
    options: EvalOptions,
    device: torch.device,
    folder: Path | None = None,
) -> Iterator[Piece]:
    """Yield this process's share of the samples, made now or read from `folder`.

    Every piece is sampled as one full batch (a short one is filled up and cut), so that an image
    does not depend on where a run was interrupted, nor on the number of processes.

    Args:
        setup: How images are made.
        dataset: Turns them into pixels, and has captions.
        options: Number, seeds, labels and batch.
        device: Where to sample.
        folder: Keep finished pieces here, and take those that are there.
    """
    from experiments.sampling import generate

    mine, batch = share(options.samples), min(options.batch, options.samples)
    model = setup.loaded.model
    for start in range(mine.start, mine.stop, batch):
        stop = min(start + batch, mine.stop)
        index = torch.arange(start, stop)
        labels, text, captions = conditions(dataset, model, options, index, device)
        kept = folder / f"{start:07d}-{stop:07d}.npy" if folder else None
        images = _read(kept, len(index)) if kept else None
        if images is None:
            fill = torch.arange(batch).clamp_max(len(index) - 1)
            made = generate(
                model, setup.objective, setup.sampler, setup.guidance,
                (options.seed + index)[fill],
                None if labels is None else labels[fill],
                None if text is None else text[fill.to(text.device)],
                batch=batch, device=device, weak_model=setup.weak,
            )[: len(index)]  # fmt: skip
            if not bool(made.isfinite().all()):
                raise MetricError(
                    "the model samples NaN or infinite pixels: it diverged; try a smaller train.lr"
                )
            images = dataset.to_pixels(made.to(dataset.device)).cpu()
            if kept:
                with atomic_path(kept) as temporary:
                    np.save(temporary, images.numpy(), allow_pickle=False)
        yield Piece(images, labels, captions)


def _read(path: Path, n: int) -> Tensor | None:
    """Return a kept piece, or None if it is absent or damaged: it is then made again."""
    try:
        array = np.load(path, allow_pickle=False)
    except Exception:
        # numpy's parser of headers raises a dozen types on damaged ones; a piece is made again.
        return None
    if not isinstance(array, np.ndarray):
        return None
    fits = array.dtype == np.uint8 and array.ndim == 4 and array.shape[:2] == (n, 3)
    return torch.from_numpy(array) if fits else None


def open_folder(folder: Path, about: dict[str, Any]) -> Path:
    """Return the folder for samples made in exactly this way; another way has another folder.

    Args:
        folder: Where such folders are kept.
        about: Everything that decides the images, JSON-able.
    """
    text = json.dumps({**about, "processes": world()[1]}, sort_keys=True, indent=1)
    target = folder / hashlib.sha256(text.encode()).hexdigest()[:12]
    with main_first():
        target.mkdir(parents=True, exist_ok=True)
        if not world()[0]:
            atomic_write(target / "about.json", text + "\n")
    return target


def kept_images(folder: Path) -> Iterator[Tensor]:
    """Yield the pieces in a folder as uint8 batches, in the order of their seeds."""
    for path in sorted(folder.glob("*.npy")):
        yield torch.from_numpy(np.load(path, allow_pickle=False))


def kept_pieces(folder: Path, labels: Tensor | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield images `(B, H, W, 3)` and labels `(B,)`, -1 for none, as `write_npz` takes them."""
    done = 0
    for images in kept_images(folder):
        stop = done + len(images)
        chosen = torch.full((len(images),), -1) if labels is None else labels[done:stop]
        yield images.permute(0, 2, 3, 1).numpy(), chosen.numpy()
        done = stop
