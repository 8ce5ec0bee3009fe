"""From seeds to images: image `i` depends on its own seed, not on its batch, rank or neighbours."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.guidance import Guidance, has_text
from experiments.diffusion.objective import Objective
from experiments.diffusion.samplers import Sampler
from experiments.evaluation.guided_denoiser import SAMPLING_SEED, GuidedDenoiser, group_passes
from experiments.options.roles import ConfigError
from routing.errors import require
from routing.rng import Draws, widest

# Values of one activation (images x tokens x width) that fit into a core's cache together with the
# others of a block, and the fewest images per pass. Other numbers were slower on an EPYC.
_CACHED_VALUES, _FEWEST_IMAGES = 1 << 17, 4

#: Called with the number of finished images and the number of all.
Progress = Callable[[int, int], None]


def labels_from_seeds(seeds: Tensor, num_classes: int, how: str = "from-seed") -> Tensor | None:
    """Return a class `(n,)` for each of `seeds`, int64 `(n,)`; None for a model without classes.

    `how` is `from-seed`, which draws it (ADM's protocol), or `balanced`: seed modulo classes.
    """
    if not num_classes:
        return None
    if how == "balanced":
        return seeds % num_classes
    require(
        how == "from-seed",
        f"labels={how}: choose from-seed or balanced, or give class numbers",
        ConfigError,
    )
    return Draws(SAMPLING_SEED, 0, seeds).integers("label", 1, num_classes)[:, 0]


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
    *,
    weak_model: Any = None,
    batch_progress: Callable[[float], None] | None = None,
) -> Tensor:
    """Generate one image per seed.

    Every batch has the same size (the last one is filled up), so that a seed gives the same image
    bit for bit; another batch size changes it by rounding only (in float32 by less than 1e-4 of
    the largest value).

    Args:
        model: The network (in evaluation mode during the call), with the EMA weights if wanted.
        objective: The objective that it was trained on.
        sampler: The sampler.
        guidance: The guidance.
        seeds: One per image, int64 `(n,)`.
        labels: Classes `(n,)`, `from-seed`, `balanced`, or None for the null class.
        text: Text states `(n, L, E)`; None for no text.
        batch: Images per batch.
        device: Where to sample; by default the model's device (without weights, that of `seeds`).
        progress: Called after every batch.
        weak_model: The weaker network of autoguidance or routed guidance.
        batch_progress: Called within a batch, with its finished share (0 to 1).

    Returns:
        Images `(n, C, H, W)` in data space, float32, on `device`.

    Raises:
        ConfigError: If guidance, labels or text do not fit the model.
    """
    for name, values in (("labels", labels), ("text", text)):
        if isinstance(values, Tensor) and len(values) != len(seeds):
            raise ConfigError(f"{name} for {len(values)} images, and {len(seeds)} seeds")
    guidance.check(model, weak_model)
    require(
        text is None or has_text(model),
        "this model is not conditioned on text; leave the captions out",
        ConfigError,
    )
    if device is None and isinstance(model, torch.nn.Module):
        device = next(model.parameters(), seeds).device
    seeds = seeds.to(device, torch.int64)
    classes = _classes(model, seeds, labels)
    denoiser = GuidedDenoiser(
        model, objective, guidance, seeds, sampler.steps, classes, text, weak_model
    )
    with torch.no_grad(), evaluating(model, weak_model):
        return _sample_batches(denoiser, sampler, batch, progress, batch_progress)


def _sample_batches(
    denoiser: GuidedDenoiser,
    sampler: Sampler,
    batch: int,
    progress: Progress | None,
    batch_progress: Callable[[float], None] | None,
) -> Tensor:
    """Sample an image for each of the denoiser's seeds.

    On a CPU a batch is sampled in parts of one size that fit into its cache. The last batch, and
    the last part of a batch, are filled up with copies of their last image.
    """
    device, count = denoiser.seeds.device, len(denoiser.seeds)
    shape = _image_shape(denoiser.model)
    if count == 0:
        return torch.empty((0, *shape), device=device)
    batch = min(batch, count)
    part = _cached_images(denoiser, batch)
    if batch_progress is not None:
        evaluations = len(sampler.evaluations()) * math.ceil(batch / part)
        share = itertools.cycle(range(1, evaluations + 1))  # anew for each batch
        denoiser.on_evaluation = lambda: batch_progress(next(share) / evaluations)
    images = []
    for start in range(0, count, batch):
        parts = []
        for first in range(start, start + batch, part):
            index = torch.arange(first, first + part, device=device)
            index = index.clamp(max=min(start + batch, count) - 1)
            parts.append(_sample_part(denoiser.select(index), sampler, shape))
        images.append(torch.cat(parts)[: min(batch, count - start)])
        if progress:
            progress(min(start + batch, count), count)
    return torch.cat(images)


def _cached_images(denoiser: GuidedDenoiser, batch: int) -> int:
    """Return how many of a batch to sample at once, so that activations stay in the CPU's cache.

    All of them on other devices, and for a network that does not say how wide it is.
    """
    width = getattr(getattr(denoiser.model, "size", None), "width", None)
    if denoiser.seeds.device.type != "cpu" or width is None:
        return batch
    copies = max(map(len, group_passes(denoiser.guidance.guided(0.0))))
    values = torch.get_num_threads() * _CACHED_VALUES
    fitting = values // (copies * denoiser.model.num_tokens * width)
    parts = math.ceil(batch / max(_FEWEST_IMAGES, fitting))
    return math.ceil(batch / parts)


def _sample_part(denoiser: GuidedDenoiser, sampler: Sampler, shape: tuple[int, ...]) -> Tensor:
    """Sample images together; the state is float64 where the device has it (as EDM's is)."""
    draws = Draws(SAMPLING_SEED, 0, denoiser.seeds)

    def step_noise(i: int, x: Tensor) -> Tensor:
        return draws.normal(f"sampler.{i + 1}", shape).to(x)

    noise = draws.normal("sampler.0", shape).to(widest(denoiser.seeds.device))
    return sampler.sample(denoiser, sampler.start(noise), step_noise).to(torch.float32)


def _classes(model: Any, seeds: Tensor, labels: Tensor | str | None) -> Tensor | None:
    """Return the class of each seed, `(n,)` on the device of `seeds`, or None."""
    num_classes = getattr(model, "num_classes", 0)
    if isinstance(labels, str):
        labels = labels_from_seeds(seeds, num_classes, labels)
    if labels is None:
        return None
    require(num_classes, "this model has no classes; leave the labels out", ConfigError)
    labels = labels.to(seeds.device, torch.int64)
    for label in labels.unique().tolist():
        require(
            0 <= label <= num_classes,
            f"class {label}: expected 0..{num_classes - 1}, or {num_classes} for no class",
            ConfigError,
        )
    return labels


def _image_shape(model: Any) -> tuple[int, ...]:
    """Return the shape (C, H, W) of the model's input."""
    size = model.config["input_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return model.in_channels, height, width


@contextlib.contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """Temporarily put models in evaluation mode; None and plain functions are skipped."""
    modules = [model for model in models if isinstance(model, torch.nn.Module)]
    modes = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)
