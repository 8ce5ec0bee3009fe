"""Seeded generation: image `i` depends on its own seed, never on its batch, rank or neighbours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.diffusion_options import DiffusionError
from experiments.diffusion.guidance import Guidance
from experiments.diffusion.objective import Objective
from experiments.diffusion.samplers import Sampler
from experiments.sampling.block_reuse import plan_reuse
from experiments.sampling.guided import SAMPLING_SEED, Guided, check_conditions
from routing.rng import Draws

#: `progress(done, total, seconds_left)`.
Progress = Callable[[int, int, float], None]


def labels_from_seeds(seeds: Tensor, num_classes: int, how: str = "from-seed") -> Tensor | None:
    """Return a class for each seed, `(n,)`, or None for a model without classes.

    Args:
        seeds: int64 `(n,)`.
        num_classes: Number of classes.
        how: `from-seed` draws it (ADM's protocol); `balanced` is seed modulo classes.
    """
    if not num_classes:
        return None
    if how == "balanced":
        return seeds % num_classes
    if how != "from-seed":
        raise DiffusionError(f"labels={how}: choose from-seed or balanced, or give class numbers")
    return Draws(SAMPLING_SEED, 0, seeds).integers("label", 1, num_classes)[:, 0]


def seeded_noise(seeds: Tensor, draw: int, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal noise of each seed, `(n, *shape)`; `draw` 0 is the start."""
    return Draws(SAMPLING_SEED, 0, seeds).normal(f"sampler.{draw}", shape)


def image_shape(model: Any) -> tuple[int, int, int]:
    """Return (C, H, W) of what `model` denoises."""
    size = model.config["input_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return model.in_channels, int(height), int(width)


def generate(
    model: Any,
    objective: Objective,
    sampler: Sampler,
    guidance: Guidance,
    seeds: Tensor,
    labels: Tensor | str | None = "from-seed",
    text: Tensor | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    on_batch: Callable[[int, Tensor], None] | None = None,
    *,
    weak_model: Any = None,
    shape: tuple[int, int, int] | None = None,
) -> Tensor:
    """Generate one image per seed.

    The last batch is filled up, so that every image is made in a batch of the same size: the same
    seed then gives the same image bit for bit, and at another batch size to rounding (in float32
    below 1e-4 of the largest value).

    Args:
        model: The network (in evaluation mode during the call), with the EMA weights if wanted.
        objective: What it was trained on.
        sampler: How to walk.
        guidance: How to guide.
        seeds: One per image, int64 `(n,)`.
        labels: Classes `(n,)`, `from-seed`, `balanced`, or None for the null class.
        text: Text states `(n, L, E)`; None for no text.
        batch: Images at once.
        device: Where to sample; the model's device if not given.
        progress: Called after every batch as `progress(done, total, seconds_left)`.
        on_batch: Called after every batch as `on_batch(start, images)`.
        weak_model: The weaker network of autoguidance or routed guidance.
        shape: (C, H, W); the model's own if not given.

    Returns:
        Images `(n, C, H, W)` in data space, float32, on `device`.

    Raises:
        DiffusionError: If guidance, labels or text do not fit the model.
    """
    guidance.check(model, weak_model)
    depth = getattr(model, "depth", 0)
    plan_reuse(sampler.options, depth, guidance.sparse)
    device = torch.device(device) if device is not None else device_of(model)
    seeds = seeds.to(device, torch.int64)
    classes = getattr(model, "num_classes", 0)
    if isinstance(labels, str):
        labels = labels_from_seeds(seeds, classes, labels)
    check_conditions(model, labels, text)
    labels = None if labels is None else labels.to(device, torch.int64)

    def guided(rows: Tensor) -> Guided:
        return Guided(
            model,
            objective,
            guidance,
            seeds[rows],
            sampler.steps,
            None if labels is None else labels[rows],
            None if text is None else text[rows.to(text.device)].to(device),
            weak_model,
            plan_reuse(sampler.options, depth, guidance.sparse),
        )

    shape = shape or image_shape(model)
    with torch.no_grad(), evaluating(model, weak_model):
        batches = _batches(guided, sampler, shape, len(seeds), min(batch, len(seeds)), device)
        images = list(_told(batches, len(seeds), progress, on_batch))
    return torch.cat(images) if images else torch.empty((0, *shape), device=device)


def _batches(
    guided: Callable[[Tensor], Guided],
    sampler: Sampler,
    shape: tuple[int, ...],
    count: int,
    batch: int,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield images batch by batch; the last batch repeats its last image to be full."""
    for start in range(0, count, max(batch, 1)):
        rows = torch.arange(start, start + batch, device=device).clamp(max=count - 1)
        yield _batch(guided(rows), sampler, shape)[: count - start]


def _told(
    batches: Iterator[Tensor],
    count: int,
    progress: Progress | None,
    on_batch: Callable[[int, Tensor], None] | None,
) -> Iterator[Tensor]:
    """Pass batches on, and tell the callbacks of each."""
    done, began = 0, time.monotonic()
    for images in batches:
        if on_batch:
            on_batch(done, images)
        done += len(images)
        if progress:
            progress(done, count, (time.monotonic() - began) / done * (count - done))
        yield images


def _batch(guided: Guided, sampler: Sampler, shape: tuple[int, ...]) -> Tensor:
    """Sample one batch; the walk is in float64 where the device has it (as EDM's is)."""
    dtype = torch.float32 if guided.seeds.device.type == "mps" else torch.float64
    start = seeded_noise(guided.seeds, 0, shape).to(dtype)

    def noise(i: int, x: Tensor) -> Tensor:
        return seeded_noise(guided.seeds, i + 1, tuple(x.shape[1:])).to(x)

    return sampler.sample(guided, sampler.start(start), noise).to(torch.float32)


class evaluating:
    """Put models in evaluation mode for a while."""

    def __init__(self, *models: Any) -> None:
        self.models = [m for m in models if isinstance(m, torch.nn.Module)]

    def __enter__(self) -> None:
        self.modes = [m.training for m in self.models]
        for model in self.models:
            model.eval()

    def __exit__(self, *error: object) -> None:
        for model, mode in zip(self.models, self.modes, strict=True):
            model.train(mode)


def device_of(model: Any) -> torch.device:
    """Return the device of a model's first parameter, or the CPU."""
    first = next(iter(model.parameters()), None) if isinstance(model, torch.nn.Module) else None
    return first.device if first is not None else torch.device("cpu")
