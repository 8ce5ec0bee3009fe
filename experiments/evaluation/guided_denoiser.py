"""The denoiser that a sampler calls: runs the passes of a guidance and combines them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.guidance import Guidance, Pass, has_text
from experiments.diffusion.objective import Objective, Prediction
from experiments.runtime import signals
from routing.options import RoutingOptions
from routing.rng import Draws
from routing.route import Route, keep_count
from routing.routed_pass import Routing

#: Images depend on their own seed alone: the run's seed is not used in sampling.
SAMPLING_SEED = 0
# Random streams per evaluation: at least the number of passes that select their own tokens.
_STREAMS_PER_EVALUATION = 8


@dataclass
class GuidedDenoiser:
    """Denoise one batch under guidance."""

    model: Any  # the network
    objective: Objective  # how the network's output becomes a clean image
    guidance: Guidance  # which passes to make
    seeds: Tensor  # seed of each image, int64 `(B,)`
    steps: int  # number of sampling steps, for schedules over them
    labels: Tensor | None = None  # class of each image, `(B,)`, or None
    text: Tensor | None = None  # text states `(B, L, E)`, or None
    weak_model: Any = None  # the weaker network of autoguidance or routed guidance
    # State of the guidance between evaluations (the momentum of APG)
    memory: dict[str, Tensor] = field(default_factory=dict)
    # Called after each evaluation, for a progress display
    on_evaluation: Callable[[], None] | None = None

    def __call__(self, x: Tensor, time: float, step: int, evaluation: int) -> Prediction:
        """Return the guided estimate of the clean images.

        Args:
            x: Noisy images, `(B, C, H, W)`.
            time: The objective's native time.
            step: Sampling step, from 0.
            evaluation: Number of this call within the trajectory; each one draws its own tokens.

        Returns:
            The combined estimate, with the variance that the first pass predicts.
        """
        signals.check()
        level = float(self.objective.level(torch.tensor(time, dtype=torch.float64)))
        passes = self.guidance.passes(progress_of(step, self.steps), level)
        images: list[Tensor] = []
        variance = None
        for group in group_passes(passes):
            model = self.weak_model if group[0].weak else self.model
            copies = len(group)
            prediction = self.objective.predict(
                model,
                x.repeat(copies, 1, 1, 1),
                torch.full((copies * len(x),), time, dtype=x.dtype, device=x.device),
                **self._group_conditions(group, evaluation),
                **self._routing(model, group[0], copies, evaluation, len(images)),
            )
            if not images and prediction.variance is not None:
                variance = prediction.variance[: len(x)]
            images += prediction.x0.chunk(copies)
        combined = self.guidance.combine(images, self.memory)
        if self.on_evaluation is not None:
            self.on_evaluation()
        return Prediction(combined, variance)

    def select(self, index: Tensor) -> GuidedDenoiser:
        """Return the denoiser of the images at `index` `(b,)`, with a new memory."""
        text = self.text
        if text is not None:
            text = text[index.to(text.device)].to(self.seeds.device)
        labels = None if self.labels is None else self.labels[index]
        return replace(self, seeds=self.seeds[index], labels=labels, text=text, memory={})

    def _group_conditions(self, group: list[Pass], evaluation: int) -> dict[str, Tensor]:
        """Return labels and text of the passes of one batch, one pass after the other."""
        by_key: dict[str, list[Tensor]] = {}
        for item in group:
            for key, values in self._conditions(item.label, evaluation).items():
                by_key.setdefault(key, []).append(values)
        return {key: torch.cat(values) for key, values in by_key.items()}

    def _conditions(self, label: str, evaluation: int) -> dict[str, Tensor]:
        """Return the conditions of a pass whose label is `given`, `null` or `random`.

        Returns:
            Classes `y` (B,), or text states `text` (B, L, E) and `text_drop` (B,), whether they
            are replaced by the empty text.
        """
        conditions = {}
        draws = self._draws(evaluation, copies=1, stream=0)
        classes = getattr(self.model, "num_classes", 0)
        if classes:
            null = torch.full_like(self.seeds, classes)
            conditions["y"] = null if label == "null" or self.labels is None else self.labels
            if label == "random":
                conditions["y"] = draws.integers("icg", 1, classes)[:, 0]
        if has_text(self.model) and self.text is not None:
            dropped = label == "null"
            conditions["text_drop"] = torch.full_like(self.seeds, dropped, dtype=torch.bool)
            conditions["text"] = self.text
            if label == "random":  # ICG for text (Sadat et al. 2024): noise of the states' spread
                noise = draws.normal("icg", tuple(self.text.shape[1:])).to(self.text)
                conditions["text"] = noise * self.text.std(dim=(1, 2), keepdim=True)
        return conditions

    def _routing(
        self, model: Any, item: Pass, copies: int, evaluation: int, first: int
    ) -> dict[str, Any]:
        """Return the argument `routing` of a pass, if it has one.

        Passes of one batch keep the same tokens; `first` is the number of passes before it.
        """
        if item.drop:
            draws = self._draws(evaluation, copies, first)
            return {"routing": Routing(Route(), RoutingOptions(path_drop=1.0), draws)}
        if item.rate <= 0:
            return {}
        tokens = getattr(model, "num_tokens", None)
        if tokens and keep_count(tokens, item.rate) == tokens:
            return {}
        nested = getattr(self.guidance.options, "subsets", "independent") == "nested"
        route = self.guidance.route.with_rate(item.rate).resolve(model.depth)
        draws = self._draws(evaluation, copies, 0 if nested else first)
        return {"routing": Routing(route, self.guidance.routing, draws)}

    def _draws(self, evaluation: int, copies: int, stream: int) -> Draws:
        step = evaluation * _STREAMS_PER_EVALUATION + stream
        return Draws(SAMPLING_SEED, step, self.seeds.repeat(copies))


def group_passes(passes: list[Pass]) -> list[list[Pass]]:
    """Group passes that can be one batch: the same network on the same number of tokens."""
    groups = groupby(passes, key=lambda item: (item.weak, item.rate, item.drop))
    return [list(group) for _, group in groups]


def progress_of(step: int, steps: int) -> float:
    """Return 0 at the first and 1 at the last of `steps` steps."""
    return step / (steps - 1) if steps > 1 else 0.0
