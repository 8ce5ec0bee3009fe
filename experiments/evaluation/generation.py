"""Seeded generation: image `i` depends on its own seed, never on its batch, rank or neighbours.

`Guided` is the denoiser that a sampler sees: it runs the passes of a guidance, batching those that
can be; `generate` integrates from each seed's noise to its image.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.guidance import Guidance, Pass, has_text
from experiments.diffusion.objective import Objective, Prediction
from experiments.diffusion.samplers import Sampler
from experiments.options.diffusion import DiffusionError
from experiments.runtime import signals
from routing.rng import Draws, widest
from routing.route import Route, keep_count
from routing.stack import Routing

#: Called with images done and images in all.
Progress = Callable[[int, int], None]

#: Images depend on their own seed alone, so the run's seed has no part in sampling.
SAMPLING_SEED = 0
_PASSES = 8  # room for passes that draw their own tokens, in the counter of one evaluation


@dataclass
class Guided:
    """Denoise one batch under guidance."""

    model: Any  # the network
    objective: Objective  # how its answer becomes a clean image
    guidance: Guidance  # which passes to make
    seeds: Tensor  # seed of each image, int64 `(B,)`
    steps: int  # number of sampling steps, for schedules over them
    labels: Tensor | None = None  # class of each image, `(B,)`, or None
    text: Tensor | None = None  # text states `(B, L, E)`, or None
    weak_model: Any = None  # the weaker network of autoguidance or routed guidance
    # What a guidance keeps between evaluations
    memory: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, x: Tensor, time: float, step: int, evaluation: int) -> Prediction:
        """Return the guided estimate of the clean images; the variance is the first pass's.

        Each `evaluation` in a trajectory draws its own tokens; `time` is native to the objective.
        """
        signals.answer()
        level = float(self.objective.level(torch.tensor(time, dtype=torch.float64)))
        passes = self.guidance.passes(progress_of(step, self.steps), level)
        images: list[Tensor] = []
        variance = None
        for group in batches(passes):
            model = self.weak_model if group[0].weak else self.model
            copies = len(group)
            found = self.objective.predict(
                model,
                x.repeat(copies, 1, 1, 1),
                torch.full((copies * len(x),), time, dtype=x.dtype, device=x.device),
                **self._conditions(group, evaluation),
                **self._routing(model, group[0], copies, evaluation, len(images)),
            )
            if not images and found.variance is not None:
                variance = found.variance[: len(x)]
            images += found.x0.chunk(copies)
        return Prediction(self.guidance.combine(images, self.memory), variance)

    def _conditions(self, group: list[Pass], evaluation: int) -> dict[str, Tensor]:
        """Return labels and text of the passes of one batch, one after the other."""
        found = [self._condition(item.label, evaluation) for item in group]
        return {key: torch.cat([each[key] for each in found]) for key in found[0]}

    def _condition(self, kind: str, evaluation: int) -> dict[str, Tensor]:
        """Return labels (B,), or text states (B, L, E) and whether they are dropped, of a pass."""
        found, random = {}, self._draws(evaluation, 1, 0)
        if classes := getattr(self.model, "num_classes", 0):
            null = torch.full_like(self.seeds, classes)
            found["y"] = null if kind == "null" or self.labels is None else self.labels
            if kind == "random":
                found["y"] = random.integers("icg", 1, classes)[:, 0]
        if has_text(self.model) and (text := self.text) is not None:
            found["text_drop"] = torch.full_like(self.seeds, kind == "null", dtype=torch.bool)
            found["text"] = text
            if kind == "random":  # ICG for text (Sadat et al. 2024): noise of the states' spread
                noise = random.normal("icg", tuple(text.shape[1:])).to(text)
                found["text"] = noise * text.std(dim=(1, 2), keepdim=True)
        return found

    def _routing(
        self, model: Any, item: Pass, copies: int, evaluation: int, first: int
    ) -> dict[str, Any]:
        """Return the `routing` of a pass, if any; joined passes keep the same tokens."""
        tokens, rate = getattr(model, "num_tokens", None), item.rate
        if item.drop:
            draws = self._draws(evaluation, copies, first)
            return {"routing": Routing(route=Route(), draws=draws, path_drop=1.0)}
        if rate <= 0 or (tokens and keep_count(tokens, rate) == tokens):
            return {}
        nested = getattr(self.guidance.options, "subsets", "independent") == "nested"
        route = self.guidance.route.with_rate(rate).resolve(model.depth)
        draws = self._draws(evaluation, copies, 0 if nested else first)
        return {"routing": Routing(route=route, draws=draws, **self.guidance.routing)}

    def _draws(self, evaluation: int, copies: int, branch: int) -> Draws:
        return Draws(SAMPLING_SEED, evaluation * _PASSES + branch, self.seeds.repeat(copies))


def batches(passes: list[Pass]) -> list[list[Pass]]:
    """Group passes that can be one batch: the same network on the same number of tokens."""
    alike = groupby(passes, key=lambda item: (item.weak, item.rate, item.drop))
    return [list(group) for _, group in alike]


def progress_of(step: int, steps: int) -> float:
    """Return 0 at the first and 1 at the last of `steps` steps."""
    return step / (steps - 1) if steps > 1 else 0.0


def labels_from_seeds(seeds: Tensor, num_classes: int, how: str = "from-seed") -> Tensor | None:
    """Return a class `(n,)` for each of `seeds`, int64 `(n,)`; None for a model without classes.

    `how` is `from-seed`, which draws it (ADM's protocol), or `balanced`: seed modulo classes.
    """
    if not num_classes:
        return None
    if how == "balanced":
        return seeds % num_classes
    if how != "from-seed":
        raise DiffusionError(f"labels={how}: choose from-seed or balanced, or give class numbers")
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
) -> Tensor:
    """Generate one image per seed.

    The last batch is filled up, so that every image is made in a batch of the same size: the same
    seed then gives the same image bit for bit, and at another batch size to rounding (in float32
    below 1e-4 of the largest value).

    Args:
        model: The network (in evaluation mode during the call), with the EMA weights if wanted.
        objective: What it was trained on.
        sampler: How to integrate from noise to data.
        guidance: How to guide.
        seeds: One per image, int64 `(n,)`.
        labels: Classes `(n,)`, `from-seed`, `balanced`, or None for the null class.
        text: Text states `(n, L, E)`; None for no text.
        batch: Images at once.
        device: Where to sample; the model's device if not given.
        progress: Called after every batch with images done and images in all.
        weak_model: The weaker network of autoguidance or routed guidance.

    Returns:
        Images `(n, C, H, W)` in data space, float32, on `device`.

    Raises:
        DiffusionError: If guidance, labels or text do not fit the model.
    """
    for what, given in (("labels", labels), ("text", text)):
        if isinstance(given, Tensor) and len(given) != len(seeds):
            raise DiffusionError(f"{what} for {len(given)} images, and {len(seeds)} seeds")
    guidance.check(model, weak_model)
    if device is None:  # the model's
        first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
        device = "cpu" if first is None else first.device
    seeds = seeds.to(device, torch.int64)
    classes = getattr(model, "num_classes", 0)
    if isinstance(labels, str):
        labels = labels_from_seeds(seeds, classes, labels)
    if labels is not None and not classes:
        raise DiffusionError("this model has no classes; leave the labels out")
    if labels is not None:
        labels = labels.to(device, torch.int64)
        if wrong := [v for v in labels.unique().tolist() if not 0 <= v <= classes]:
            known = f"this model knows classes 0..{classes - 1}, and {classes} for none"
            raise DiffusionError(f"class {wrong[0]}: {known}")
    if text is not None and not has_text(model):
        raise DiffusionError("this model is not conditioned on text; leave the captions out")

    size = model.config["input_size"]
    shape = (model.in_channels, *((size, size) if isinstance(size, int) else size))
    images: list[Tensor] = []
    count = len(seeds)
    batch = max(min(batch, count), 1)
    with torch.no_grad(), evaluating(model, weak_model):
        for start in range(0, count, batch):
            # The last batch repeats its last image to be full.
            rows = torch.arange(start, start + batch, device=device).clamp(max=count - 1)
            guided = Guided(
                model,
                objective,
                guidance,
                seeds[rows],
                sampler.steps,
                None if labels is None else labels[rows],
                None if text is None else text[rows.to(text.device)].to(device),
                weak_model,
            )
            images.append(_batch(guided, sampler, shape)[: count - start])
            if progress:
                progress(min(start + batch, count), count)
    return torch.cat(images) if images else torch.empty((0, *shape), device=device)


def _batch(guided: Guided, sampler: Sampler, shape: tuple[int, ...]) -> Tensor:
    """Sample one batch; the state is in float64 where the device has it (as EDM's is)."""
    draws = Draws(SAMPLING_SEED, 0, guided.seeds)

    def noise(i: int, x: Tensor) -> Tensor:
        return draws.normal(f"sampler.{i + 1}", shape).to(x)

    start = draws.normal("sampler.0", shape).to(widest(guided.seeds.device))
    return sampler.sample(guided, sampler.start(start), noise).to(torch.float32)


@contextlib.contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """Put models in evaluation mode inside the block."""
    modes = [(m, m.training) for m in models if isinstance(m, torch.nn.Module)]
    for model, _ in modes:
        model.eval()
    try:
        yield
    finally:
        for model, mode in modes:
            model.train(mode)
