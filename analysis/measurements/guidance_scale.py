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

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from analysis.errors import AnalysisError
from analysis.measurements.guidance_scale_file import FORMAT, LEVELS
from analysis.measurements.measured import check_protocol
from experiments.config.schema import Config
from experiments.evaluation.heldout import HeldOut, no_split, routed_pass
from experiments.evaluation.images import split_indices
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
    x, s, w = map(_flat, (clean, strong, weak))
    z = np.zeros_like(x) if direction is None else _flat(direction)
    pairs = ((s - w, s - w), (x - w, s - w), (x - s, x - s), (x - w, x - w), (s - w, z), (x - w, z))
    return np.stack([(first * second).mean(axis=1) for first, second in pairs], axis=1)


def _flat(values: Any) -> np.ndarray:
    """Return (n, ...) as (n, elements) in float64."""
    return np.asarray(values, np.float64).reshape(len(values), -1)


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
    counts = np.ones((REPLICATES + 1, n))  # the first row takes every sample once
    for replicate in range(1, REPLICATES + 1):
        counts[replicate] = np.bincount(rng.integers(n, size=n), minlength=n)
    values = form(np.einsum("rn,lnk->rlk", counts / n, measured, optimize=True))
    if minus is not None:
        values -= form(np.einsum("rn,lnk->rlk", counts / n, minus, optimize=True))
    values = np.concatenate((values, values.mean(axis=1, keepdims=True)), axis=1)
    point, replicates = values[0], values[1:]
    undefined = np.isnan(replicates)
    below, above = np.where(undefined, -np.inf, replicates), np.where(undefined, np.inf, replicates)
    low = np.quantile(below, 0.025, axis=0, method="nearest")
    high = np.quantile(above, 0.975, axis=0, method="nearest")
    result = np.stack((point, low, high), axis=1)
    result[np.isnan(point)] = np.nan
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
    conditional: np.ndarray
    unconditional: np.ndarray


def _is_dense(config: Config) -> bool:
    return config.resolved_route == "none" and config.init is None


def _kind(config: Config) -> list[Any]:
    """Return what an independent run of another seed must share with a run."""
    return [config.backbone.name, config.size, config.data, config.task, config.objective]


class Measurement:
    """Effective guidance scales of several runs; computes each prediction and loss once.

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
        self, runs: Sequence[Path], levels: Sequence[float] = LEVELS,
        samples: int = 2000, batch: int = 64, device: str | None = None,
    ) -> None:  # fmt: skip
        check_protocol("guidance-scale", levels, samples, batch, least=2)
        self.levels, self.samples, self.batch = sorted(levels), samples, batch
        self.open = functools.lru_cache(2)(functools.partial(HeldOut.open, device=device))
        # Several runs in a row share an instrument.
        self.predict = functools.lru_cache(4)(self._predict)
        self.loss = functools.lru_cache(None)(self._loss)
        self.configs: dict[Path, Config] = {}
        for run in runs:
            try:
                self.configs[run] = self.open(run).config
            except UserError:
                continue  # reported when this run is measured

    def measure(self, run: Path, against: Weights | None = None) -> dict[str, Any]:
        """Measure a run: its metadata, and a row per pair of predictions and noise level.

        With `against`, the predictions of those weights are used as the weak ones as well.

        Raises:
            AnalysisError: A model without a null class, data with nothing held out, or `against` of
                other data.
            UserError: What `HeldOut.open` refuses.
        """
        data, predictions = self.open(run), self.predict(Weights(run))
        config, instrument = data.config, self._instrument(run)
        if instrument is None:
            note = (
                f"{run.name}: plain form only, for want of an instrument; give a dense run of "
                "another seed of the same backbone, size, data and objective, too."
            )
        else:
            note = f"{run.name}: the instrument is {instrument.name}."
        notes = [note]
        clean, conditional, unconditional = predictions
        z = self._direction(instrument)
        sums = {"dense": _products(clean, conditional, unconditional, z)}
        if config.routing.reinsert != "none" and routed_pass(config, None):
            routed = self.predict(Weights(run), True)
            sums["routed"] = _products(clean, routed.conditional, routed.unconditional, z)
            sums["dense over routed"] = _products(clean, conditional, routed.conditional, z)
        if not _is_dense(config):
            equal = self._equal_loss(run)
            if equal:
                direction = self._direction(self._instrument(equal.run))
                sums["equal loss"] = _products(*self.predict(equal), direction)
                losses = f"{self.loss(equal):.4f} to {self.loss(Weights(run)):.4f}"
                notes.append(f"{run.name}: equal loss is that of {equal}, {losses}.")
        elif instrument:
            weak = self.predict(Weights(instrument)).conditional
            sums["two seeds"] = _products(clean, conditional, weak, None)
        if against:
            self._check_against(run, against)
            weak = self.predict(against).conditional
            # A run must not be its own instrument under another path.
            is_instrument = instrument is not None and against.run.samefile(instrument)
            direction = None if is_instrument else z
            sums[f"over {against}"] = _products(clean, conditional, weak, direction)
        return {
            "format": FORMAT, "run": run.name, "backbone": config.backbone.name,
            "size": config.size, "data": config.data.name, "route": config.resolved_route,
            "seed": config.seed, "step": data.step, "samples": clean.shape[1], "notes": notes,
            "rows": list(self._rows(sums)),
        }  # fmt: skip

    def _check_against(self, run: Path, against: Weights) -> None:
        if _kind(self.open(*against).config)[2:] != _kind(self.open(run).config)[2:]:
            raise AnalysisError(
                f"--against {against} has other data, task or objective than {run.name}; give "
                "a run that differs in its model or route alone"
            )

    def _rows(self, sums: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        """Yield the scales of every pair and contrast, by level and for the mean over levels."""
        for name, measured in sums.items():
            rows = self._scale_rows(name, measured)
            means = measured.mean(axis=1)
            for row, mean in zip(rows, [*means, means.mean(axis=0)], strict=True):
                row["square"] = float(mean[0])
                row["loss_strong"], row["loss_weak"] = float(mean[2]), float(mean[3])
            yield from rows
        for name in ("routed", "equal loss"):
            if name in sums:
                yield from self._scale_rows(f"dense - {name}", sums["dense"], sums[name])

    def _scale_rows(
        self, pair: str, measured: np.ndarray, minus: np.ndarray | None = None
    ) -> list[dict[str, Any]]:
        """Return both forms with their intervals, a row per level and one for their mean."""
        rows: list[dict[str, Any]] = []
        for level in (*self.levels, None):
            rows.append({"pair": pair, "level": level})
        # Without an instrument its products are zero.
        has_instrument = measured[..., 4:].any() and (minus is None or minus[..., 4:].any())
        for form in (plain, instrumented) if has_instrument else (plain,):
            for row, values in zip(rows, estimates(form, measured, minus), strict=True):
                for end, value in zip(("", "_low", "_high"), values, strict=True):
                    number = float(value) if math.isfinite(value) else None
                    row[f"{form.__name__}{end}"] = number
        return rows

    def _similar_runs(self, run: Path) -> dict[Path, Config]:
        """Return the dense runs of a run's kind that know the null class."""
        kind = _kind(self.configs[run])
        runs = {}
        for path, config in self.configs.items():
            if _is_dense(config) and config.train.label_drop and _kind(config) == kind:
                runs[path] = config
        return runs

    def _instrument(self, run: Path) -> Path | None:
        """Return the dense run of the lowest other seed, if there is one."""
        seeds = {}
        for path, config in self._similar_runs(run).items():
            if config.seed != self.configs[run].seed:
                seeds[path] = config.seed
        return min(seeds, key=seeds.__getitem__, default=None)

    def _direction(self, run: Path | None) -> np.ndarray | None:
        """Return what the class changes in the predictions of an instrument."""
        if run is None:
            return None
        predictions = self.predict(Weights(run))
        return predictions.conditional - predictions.unconditional

    def _equal_loss(self, run: Path) -> Weights | None:
        """Return the dense weights whose held-out loss is nearest to a run's, if there are any."""
        candidates = []
        for path in self._similar_runs(run):
            # An exported file has no checkpoints.
            steps = [step for step, _ in listed(path)] if path.is_dir() else []
            stride = math.ceil(len(steps) / _MOST_CHECKPOINTS) or 1
            candidates.append(Weights(path))
            for step in steps[::-stride]:
                candidates.append(Weights(path, step))
        loss = self.loss(Weights(run))
        return min(candidates, key=lambda weights: abs(self.loss(weights) - loss), default=None)

    def _batches(self, data: HeldOut, most: int) -> Sequence[torch.Tensor]:
        missing = no_split(data.dataset)
        if missing:
            raise AnalysisError(missing)
        return split_indices(data.dataset, "test", most).split(self.batch)

    @torch.inference_mode()
    def _predict(self, weights: Weights, routed: bool = False) -> Predictions:
        data = self.open(*weights)
        if (
            not (data.model.num_classes or data.model.text is not None)
            or not data.config.train.label_drop
        ):
            raise AnalysisError(f"{weights} has no null class (task=none, or train.label_drop=0)")
        clean: list[torch.Tensor] = []
        conditional: list[torch.Tensor] = []
        unconditional: list[torch.Tensor] = []
        for stream, level in enumerate(self.levels):
            for index in self._batches(data, self.samples):
                held_out = data.sample(index, stream)
                noisy, time = data.noisy(held_out, level)
                routing = routed_pass(data.config, held_out.draws) if routed else None
                clean.append(held_out.x)
                for part, cond in ((conditional, held_out.cond), (unconditional, held_out.null)):
                    prediction = data.objective.predict(
                        data.model, noisy, time, **cond, routing=routing
                    )
                    part.append(prediction.x0)
        return Predictions(*map(self._by_level, (clean, conditional, unconditional)))

    def _by_level(self, batches: list[torch.Tensor]) -> np.ndarray:
        """Return batches of all levels in turn as (levels, n, C, H, W)."""
        values = torch.cat(batches).float().cpu()
        return values.unflatten(0, (len(self.levels), -1)).numpy()

    @torch.inference_mode()
    def _loss(self, weights: Weights) -> float:
        data = self.open(*weights)
        batches = self._batches(data, _LOSS_SAMPLES)
        total = sum(len(index) * float(data.losses(index)[0]) for index in batches)
        return total / sum(map(len, batches))


def _products(
    clean: np.ndarray, strong: np.ndarray, weak: np.ndarray, z: np.ndarray | None
) -> np.ndarray:
    """Return `products` of every level, (levels, n, 6)."""
    directions = [None] * len(clean) if z is None else z
    return np.stack(list(map(products, clean, strong, weak, directions)))
