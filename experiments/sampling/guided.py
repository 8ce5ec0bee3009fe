"""The denoiser a sampler sees: runs the passes of a guidance, batching those that can be."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.diffusion_options import DiffusionError
from experiments.diffusion.guidance import Guidance, Pass, has_text
from experiments.diffusion.objective import Objective, Prediction
from experiments.runtime import signals
from experiments.sampling.block_reuse import ReusePlan
from routing.rng import Draws
from routing.route import keep_count

#: Images depend on their own seed alone, so the run's seed has no part in sampling.
SAMPLING_SEED = 0
_PASSES = 8  # room for passes that draw their own tokens, in the counter of one evaluation


@dataclass
class Guided:
    """Denoise one batch under guidance.

    Attributes:
        model: The network.
        objective: How its answer becomes a clean image.
        guidance: Which passes to make.
        seeds: Seed of each image, int64 `(B,)`.
        steps: Number of sampling steps, for schedules over them.
        labels: Class of each image, `(B,)`, or None.
        text: Text states `(B, L, E)`, or None.
        weak_model: The weaker network of autoguidance or routed guidance.
        reuse: Which blocks are reused between evaluations, if any.
        memory: What a guidance keeps between evaluations.
    """

    model: Any
    objective: Objective
    guidance: Guidance
    seeds: Tensor
    steps: int
    labels: Tensor | None = None
    text: Tensor | None = None
    weak_model: Any = None
    reuse: ReusePlan | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, x: Tensor, time: float, step: int, evaluation: int) -> Prediction:
        """Return the guided estimate of the clean images; the variance is the first pass's.

        Args:
            x: Noisy images, `(B, C, H, W)`.
            time: Native time of the objective.
            step: Index of the sampling step.
            evaluation: Index of this call in the walk: every one draws its own tokens.
        """
        signals.answer()
        level = float(self.objective.level(torch.tensor(time, dtype=torch.float64)))
        passes = self.guidance.passes(progress_of(step, self.steps), level)
        outputs: dict[int, Prediction] = {}
        for group in batches(passes):
            times = torch.full((len(group) * len(x),), time, dtype=x.dtype, device=x.device)
            model = self.weak_model if passes[group[0]].weak else self.model
            with self._reusing(model, passes[group[0]], len(group), evaluation):
                found = self.objective.predict(
                    model,
                    x.repeat(len(group), 1, 1, 1),
                    times,
                    **self._conditions([passes[i] for i in group], evaluation),
                    **self._routing(model, passes[group[0]], len(group), evaluation, group[0]),
                )
            for position, i in enumerate(group):
                rows = slice(position * len(x), (position + 1) * len(x))
                variance = None if found.variance is None else found.variance[rows]
                outputs[i] = Prediction(found.x0[rows], variance)
        images = [outputs[i].x0 for i in range(len(passes))]
        return Prediction(self.guidance.combine(images, self.memory), outputs[0].variance)

    def _reusing(self, model: Any, first: Pass, copies: int, evaluation: int) -> Any:
        # A weaker model may have other blocks: only the main one's are reused.
        if self.reuse is None or first.weak:
            return contextlib.nullcontext()
        return self.reuse.run(model, evaluation, copies)

    def _conditions(self, group: list[Pass], evaluation: int) -> dict[str, Tensor]:
        """Return labels and text of the passes of one batch, one after the other."""
        conditions: dict[str, Tensor] = {}
        if getattr(self.model, "num_classes", 0):
            conditions["y"] = torch.cat([self._labels(p.label, evaluation) for p in group])
        if has_text(self.model) and self.text is not None:
            conditions["text"] = torch.cat([self._text(p.label, evaluation) for p in group])
            dropped = [
                torch.full_like(self.seeds, p.label == "null", dtype=torch.bool) for p in group
            ]
            conditions["text_drop"] = torch.cat(dropped)
        return conditions

    def _labels(self, kind: str, evaluation: int) -> Tensor:
        classes = self.model.num_classes
        if kind == "random":
            return self._draws(evaluation, 1, 0).integers("icg", 1, classes)[:, 0]
        if kind == "null" or self.labels is None:
            return torch.full_like(self.seeds, classes)
        return self.labels

    def _text(self, kind: str, evaluation: int) -> Tensor:
        assert self.text is not None
        if kind != "random":
            return self.text
        # ICG for text (Sadat et al. 2024): noise of the embedding's spread.
        noise = self._draws(evaluation, 1, 0).normal("icg", tuple(self.text.shape[1:]))
        return noise.to(self.text) * self.text.std(dim=(1, 2), keepdim=True)

    def _routing(
        self, model: Any, item: Pass, copies: int, evaluation: int, first: int
    ) -> dict[str, Any]:
        """Return the `routing` argument of a pass; joined passes keep the same tokens."""
        tokens, rate = getattr(model, "num_tokens", None), item.rate
        if item.drop:
            from routing.route import Route
            from routing.stack import Routing

            draws = self._draws(evaluation, copies, first)
            return {"routing": Routing(route=Route(), draws=draws, path_drop=1.0)}
        if rate <= 0 or (tokens and keep_count(tokens, rate) == tokens):
            return {}
        from routing.stack import Routing

        nested = getattr(self.guidance.options, "subsets", "independent") == "nested"
        route = self.guidance.route.with_rate(rate).resolve(model.depth)
        extra = dict(self.guidance.routing)
        if self.guidance.selection is not None:
            extra["selection"] = self.guidance.selection
        draws = self._draws(evaluation, copies, 0 if nested else first)
        return {"routing": Routing(route=route, draws=draws, **extra)}

    def _draws(self, evaluation: int, copies: int, branch: int) -> Draws:
        return Draws(SAMPLING_SEED, evaluation * _PASSES + branch, self.seeds.repeat(copies))


def batches(passes: list[Pass]) -> list[list[int]]:
    """Group passes that can be one batch: the same network on the same number of tokens."""
    groups: dict[tuple[bool, float, bool], list[int]] = {}
    for i, item in enumerate(passes):
        groups.setdefault(item.batch, []).append(i)
    return list(groups.values())


def progress_of(step: int, steps: int) -> float:
    """Return 0 at the first and 1 at the last of `steps` steps."""
    return step / (steps - 1) if steps > 1 else 0.0


def check_conditions(model: Any, labels: Tensor | None, text: Tensor | None) -> None:
    """Refuse labels and text that the model cannot take.

    Raises:
        DiffusionError: One sentence with the way out.
    """
    classes = getattr(model, "num_classes", 0)
    if labels is not None and not classes:
        raise DiffusionError("this model has no classes; leave the labels out")
    wrong = [] if labels is None else [v for v in labels.unique().tolist() if not 0 <= v <= classes]
    if wrong:
        raise DiffusionError(
            f"class {wrong[0]}: this model knows classes 0..{classes - 1}, and {classes} for none"
        )
    if text is not None and not has_text(model):
        raise DiffusionError("this model is not conditioned on text; leave the captions out")
