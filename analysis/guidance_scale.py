"""Measure the effective guidance scale of trained models by noise level, w_eff.

docs/guidance.md says which pairs of predictions are measured on held-out samples, under noise that
depends on nothing but these. For predictions D_s and D_w of x from one noisy input, d = D_s - D_w,

    plain          w = |d|^2 / <x - D_w, d>  =  2 / (1 + (L_w - L_s) / |d|^2),   L = |x - D|^2
    instrumented   w = <d, z> / <x - D_w, z>

with sums over samples. The plain form is 1 over the step along d that minimises the error: 1 for a
calibrated pair, w for one that is guided with w over the same weak model. An error of D_s of its
own raises it: by |e|^2 / |d|^2 if it is independent, to 2 for two nets that are equally good. What
is independent of z drops out of the instrumented form (the cure for errors in variables), so z is
the conditional minus the unconditional prediction of another net, trained on its own.

A scale whose denominator is not positive is undefined: NaN. Intervals are percentiles of the
bootstrap over samples (Efron and Tibshirani 1993).
"""

import argparse
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from analysis.figures.guidance_figures import draw
from analysis.runs.run_records import AnalysisError, one_by_one, result_path, with_weights
from analysis.tables import guidance_table
from analysis.tables.render import write
from analysis.tables.table import markdown
from experiments.config.parent import split
from experiments.config.routes import routed_pass
from experiments.config.schema import Config
from experiments.evaluation.heldout import HeldOut, no_split
from experiments.evaluation.images import split_indices
from experiments.runtime.files import atomic_write
from experiments.runtime.run_folder import listed
from routing.errors import UserError

REPLICATES = 1000  # of the bootstrap
_LOSS_SAMPLES = 500
_MOST_CHECKPOINTS = 8
Form = Callable[[np.ndarray], np.ndarray]


def products(clean: Any, strong: Any, weak: Any, direction: Any = None) -> np.ndarray:
    """Return what the scales are ratios of, per sample and as a mean over its elements.

    Args:
        clean: x, (n, ...).
        strong: D_s, like `clean`.
        weak: D_w, like `clean`.
        direction: z, like `clean`; None leaves the instrumented form undefined.

    Returns:
        (n, 6) float64: |d|^2, <x - D_w, d>, L_s, L_w, <d, z>, <x - D_w, z>.
    """
    flat = [np.asarray(v, np.float64).reshape(len(v), -1) for v in (clean, strong, weak)]
    z = np.zeros_like(flat[0]) if direction is None else np.asarray(direction, np.float64)
    z, (x, s, w) = z.reshape(len(z), -1), flat
    pairs = ((s - w, s - w), (x - w, s - w), (x - s, x - s), (x - w, x - w), (s - w, z), (x - w, z))
    return np.stack([(first * second).mean(axis=1) for first, second in pairs], axis=1)


def plain(sums: np.ndarray) -> np.ndarray:
    """Return the plain scale of sums (or means) of `products`, (..., 6) to (...)."""
    return _ratio(sums[..., 0], sums[..., 1])


def instrumented(sums: np.ndarray) -> np.ndarray:
    """Return the instrumented scale of sums (or means) of `products`, (..., 6) to (...)."""
    return _ratio(sums[..., 4], sums[..., 5])


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def estimates(form: Form, measured: np.ndarray, minus: np.ndarray | None = None) -> np.ndarray:
    """Return a scale with its 95 % interval, per noise level and for the mean over levels.

    Args:
        form: `plain` or `instrumented`.
        measured: What `products` returned per level, (levels, n, 6).
        minus: The same of another pair, for the contrast of both scales: one bootstrap draws the
            samples of both, so that what they share leaves it.

    Returns:
        (levels + 1, 3): value, low and high of each level and, last, of the mean over levels. NaN
        where undefined; an interval in which a scale becomes undefined is open (infinite).
    """
    n, rng = measured.shape[1], np.random.default_rng(0)
    drawn = (np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(REPLICATES))
    weights = np.stack([np.ones(n), *drawn]) / n  # the first takes every sample once
    found = form(np.einsum("rn,lnk->rlk", weights, measured, optimize=True))
    if minus is not None:
        found -= form(np.einsum("rn,lnk->rlk", weights, minus, optimize=True))
    found = np.concatenate((found, found.mean(axis=1, keepdims=True)), axis=1)
    lost = np.isnan(found[1:])
    ends = [
        np.quantile(np.where(lost, side * np.inf, found[1:]), part, axis=0, method="nearest")
        for side, part in ((-1, 0.025), (1, 0.975))
    ]
    result = np.stack((found[0], *ends), axis=1)
    result[np.isnan(found[0])] = np.nan
    return result


class Weights(NamedTuple):
    """A run and the step of its weights; None is the last."""

    run: Path
    step: int | None = None

    def __str__(self) -> str:
        return self.run.name + ("" if self.step is None else f"@{self.step}")


class Predictions(NamedTuple):
    """Clean data and their predictions with and without the class: (levels, n, C, H, W) each."""

    clean: np.ndarray
    given: np.ndarray
    null: np.ndarray


def _dense(config: Config) -> bool:
    return config.resolved_route == "none" and config.init is None


def _kind(config: Config) -> list[Any]:
    """Return what an independent run of another seed must share with a run."""
    return [config.backbone["name"], config.size, config.data, config.task, config.objective]


class Measurement:
    """Predictions and losses of the runs of one command, each computed once.

    Args:
        runs: The runs, which are each other's instruments and controls.
        levels: Noise levels sigma / alpha over the data's standard deviation.
        samples: Held-out samples at most.
        batch: Samples per pass.
        device: Where to compute; None is CUDA where there is one.

    Raises:
        AnalysisError: For no level, one that is not above 0, or fewer than 2 samples.
    """

    def __init__(
        self, runs: Sequence[Path], levels: Sequence[float] = guidance_table.LEVELS,
        samples: int = 2000, batch: int = 64, device: str | None = None,
    ) -> None:  # fmt: skip
        if not levels or not all(0 < level < math.inf for level in levels):
            raise AnalysisError("guidance-scale needs noise levels above 0, such as 1.5 4 19")
        if samples < 2 or batch < 1:
            raise AnalysisError("guidance-scale needs at least 2 samples and a batch of at least 1")
        self.levels, self.samples, self.batch = sorted(levels), samples, batch
        self.open = functools.lru_cache(2)(functools.partial(HeldOut.open, device=device))
        # Those of an instrument serve several runs in a row.
        self.predict = functools.lru_cache(4)(self._predict)
        self.loss = functools.lru_cache(None)(self._loss)
        self.known: dict[Path, Config] = {}
        for run in runs:
            try:
                self.known[run] = self.open(run).config
            except UserError:
                continue  # It is named when its turn comes.

    def measure(self, run: Path, against: Weights | None = None) -> dict[str, Any]:
        """Return what is stored beside a run: what it is, and a row per pair and noise level.

        With `against` it is measured over the predictions of those weights, too.

        Raises:
            AnalysisError: A model without a null class, data with nothing held out, or `against` of
                other data.
            UserError: What `HeldOut.open` refuses.
        """
        data, own = self.open(run), self.predict(Weights(run))
        config, other, notes = data.config, self._instrument(run), []
        if other is None:
            notes.append(
                f"{run.name}: plain form only, for want of an instrument; give a dense run of "
                "another seed of the same backbone, size, data and objective, too."
            )
        else:
            notes.append(f"{run.name}: the instrument is {other.name}.")
        z = self._direction(other)
        found = {"dense": _products(own.clean, own.given, own.null, z)}
        if config.routing.reinsert != "none" and routed_pass(config, None):
            inside = self.predict(Weights(run), True)
            found["routed"] = _products(own.clean, inside.given, inside.null, z)
            found["dense over routed"] = _products(own.clean, own.given, inside.given, z)
        if _dense(config):
            if other:
                weak = self.predict(Weights(other)).given
                found["two seeds"] = _products(own.clean, own.given, weak, None)
        elif equal := self._equal(run):
            by = self._direction(self._instrument(equal.run))
            found["equal loss"] = _products(*self.predict(equal), by)
            losses = f"{self.loss(equal):.4f} to {self.loss(Weights(run)):.4f}"
            notes.append(f"{run.name}: equal loss is that of {equal}, {losses}.")
        if against:
            if _kind(self.open(*against).config)[2:] != _kind(config)[2:]:
                raise AnalysisError(
                    f"--against {against} has other data, task or objective than {run.name}; give "
                    "a run that differs in its model or route alone"
                )
            weak = self.predict(against).given
            # No run is its own instrument, however its path was typed.
            by = None if other and against.run.samefile(other) else z
            found[f"over {against}"] = _products(own.clean, own.given, weak, by)
        return {
            "format": guidance_table.FORMAT, "run": run.name, "backbone": config.backbone["name"],
            "size": config.size, "data": config.data["name"], "route": config.resolved_route,
            "seed": config.seed, "step": data.step, "samples": own.clean.shape[1], "notes": notes,
            "rows": list(self._rows(found)),
        }  # fmt: skip

    def _rows(self, found: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        """Yield the scales of every pair and contrast, by level and for the mean over levels."""
        contrasts = [("dense", other) for other in ("routed", "equal loss") if other in found]
        for pair in [*((name,) for name in found), *contrasts]:
            measured = [found[name] for name in pair]
            rows = [{"pair": " - ".join(pair), "level": at} for at in (*self.levels, None)]
            for form in (plain, instrumented):
                # Without an instrument its products are zero.
                if form is plain or all(each[..., 4:].any() for each in measured):
                    ends = [f"{form.__name__}{end}" for end in ("", "_low", "_high")]
                    for row, values in zip(rows, estimates(form, *measured), strict=True):
                        numbers = (float(v) if math.isfinite(v) else None for v in values)
                        row.update(zip(ends, numbers, strict=True))
            if len(pair) == 1:
                means = measured[0].mean(axis=1)
                for row, mean in zip(rows, [*means, means.mean(axis=0)], strict=True):
                    losses = map(float, mean[[0, 2, 3]])
                    row.update(zip(("square", "loss_strong", "loss_weak"), losses, strict=True))
            yield from rows

    def _alike(self, run: Path) -> dict[Path, Config]:
        """Return the dense runs of a run's kind that know the null class."""
        kind = _kind(self.known[run])
        fits = {path: c for path, c in self.known.items() if _dense(c) and c.train.label_drop}
        return {path: config for path, config in fits.items() if _kind(config) == kind}

    def _instrument(self, run: Path) -> Path | None:
        """Return the dense run of the lowest other seed, if there is one."""
        own, found = self.known[run].seed, self._alike(run)
        others = [path for path in found if found[path].seed != own]
        return min(others, key=lambda path: found[path].seed, default=None)

    def _direction(self, run: Path | None) -> np.ndarray | None:
        """Return what the class changes in the predictions of an instrument."""
        if run is None:
            return None
        _, given, null = self.predict(Weights(run))
        return given - null

    def _equal(self, run: Path) -> Weights | None:
        """Return the dense weights whose held-out loss is nearest to a run's, if there are any."""
        fits = []
        for path in self._alike(run):
            steps = [step for step, _ in listed(path)]
            every = math.ceil(len(steps) / _MOST_CHECKPOINTS) or 1
            fits += [Weights(path), *(Weights(path, step) for step in steps[::-every])]
        own = self.loss(Weights(run))
        return min(fits, key=lambda weights: abs(self.loss(weights) - own), default=None)

    def _batches(self, data: HeldOut, most: int) -> Sequence[torch.Tensor]:
        if missing := no_split(data.dataset):
            raise AnalysisError(missing)
        return split_indices(data.dataset, "test", most).split(self.batch)

    @torch.inference_mode()
    def _predict(self, weights: Weights, routed: bool = False) -> Predictions:
        data = self.open(*weights)
        if not (data.model.num_classes or data.model.prefix) or not data.config.train.label_drop:
            raise AnalysisError(f"{weights} has no null class (task=none, or train.label_drop=0)")
        found: list[list[torch.Tensor]] = [[], [], []]
        for place, level in enumerate(self.levels):
            for index in self._batches(data, self.samples):
                held = data.sample(index, place)
                noisy, time = data.noisy(held, level)
                routing = routed_pass(data.config, held.draws) if routed else None
                found[0].append(held.x)
                for part, cond in zip(found[1:], (held.cond, held.null), strict=True):
                    prediction = data.objective.predict(
                        data.model, noisy, time, **cond, routing=routing
                    )
                    part.append(prediction.x0)
        shape = (len(self.levels), -1)
        return Predictions(*(torch.cat(v).float().cpu().unflatten(0, shape).numpy() for v in found))

    @torch.inference_mode()
    def _loss(self, weights: Weights) -> float:
        data = self.open(*weights)
        parts = self._batches(data, _LOSS_SAMPLES)
        sums = [len(index) * float(data.losses(index)[0]) for index in parts]
        return sum(sums) / sum(map(len, parts))


def _products(
    clean: np.ndarray, strong: np.ndarray, weak: np.ndarray, z: np.ndarray | None
) -> np.ndarray:
    """Return `products` of every level, (levels, n, 6)."""
    levels = zip(clean, strong, weak, [None] * len(clean) if z is None else z, strict=True)
    return np.stack([products(*level) for level in levels])


def command(options: argparse.Namespace) -> int:
    """Measure every run with weights, and store the result in its folder or the current one."""
    runs, levels = with_weights(options.runs), options.levels or guidance_table.LEVELS
    against = None if options.against is None else Weights(*split(options.against, "--against "))
    work = Measurement(runs, levels, options.samples, options.batch)
    if against:
        work.open(*against)  # What is wrong with it is said once, before anything is measured.
    made: list[dict[str, Any]] = []
    if options.out:  # what is wrong with the folder, too
        (options.out / "tables").mkdir(parents=True, exist_ok=True)

    def stored(run: Path) -> None:
        made.append(work.measure(run, against))
        path = result_path(run, guidance_table.FILE)
        atomic_write(path, json.dumps(made[-1], indent=1) + "\n")
        print(f"{markdown(guidance_table.scale_table(made[-1:], levels=True))}\n{path}\n")

    try:
        one_by_one(runs, stored)
    finally:  # Also of what could be measured where some could not.
        if options.out and made:
            write(guidance_table.scale_table(made), options.out / "tables")
            if plot := draw(made):
                plot.save(options.out / "figures")
            print(f"{options.out}  guidance_scale in tables{' and figures' if plot else ''}")
    return 0
