"""Does a variant pay per multiply-add? Step penalty s and relative cost s * m.

    s(N)   steps that the variant needs to reach the held-out loss of the baseline after N steps,
           divided by N
    m      multiply-adds per training step, variant over baseline
    s * m  below 1: the variant reaches the same loss with fewer multiply-adds

The variant is usually routed and the baseline dense. Held-out losses are logged on the way without
sampling (`eval.metrics=[heldout_loss] eval.every=500`). Between two logged steps the loss is
interpolated linearly in the logarithm of the step. A seed whose variant never reaches the target is
censored: its s is NaN, it is counted, and it is never dropped silently.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.comparison.aggregation import Estimate, interval, ratio
from analysis.errors import AnalysisError
from analysis.runs.loading import Runs, scores


def loss_curves(runs: Runs) -> dict[str, pd.DataFrame]:
    """Return the held-out losses of every run by the run's name, one row per scored step.

    Only a run's own scores count (its own weights and protocol). Columns: `step`, `macs` (training
    multiply-adds spent by then), `loss` of the dense pass and `routed_loss` of the routed one, NaN
    for a dense run.
    """
    frame = scores(runs)
    if frame.empty:
        return {}
    return curves_by_run(frame[frame["own"].astype(bool)], "run")


def curves_by_run(scores: pd.DataFrame, column: str) -> dict[str, pd.DataFrame]:
    """Return the held-out losses of every run as `loss_curves` does, from its own scores.

    Args:
        scores: Scores under a run's own protocol.
        column: What names a run: `run` or `path`.
    """
    curves = {}
    scores = scores[[column, "key", "step", "macs", "value"]]  # of some 150: slices are copies
    for run, part in scores.groupby(column, sort=False):
        dense = part[part["key"] == "heldout_loss"]
        if dense.empty:
            continue
        dense = dense.drop_duplicates("step", keep="last").set_index("step")
        routed = part[part["key"] == "heldout_loss_routed"]
        routed = routed.drop_duplicates("step", keep="last").set_index("step")
        curve = pd.DataFrame({"macs": dense["macs"], "loss": dense["value"]})
        curve["routed_loss"] = routed["value"].reindex(curve.index)
        curves[str(run)] = curve.sort_index().reset_index()
    return curves


def has_loss_at(curve: pd.DataFrame, axis: str, position: float) -> bool:
    """Return whether a `step` or number of `macs` lies within the logged ones."""
    points = curve[axis].to_numpy(float)
    # Steps are whole numbers: a total that is equal up to rounding counts as reached.
    return bool(points.min() * (1 - 1e-3) <= position <= points.max() * (1 + 1e-3))


def loss_at(curve: pd.DataFrame, axis: str, position: float) -> float:
    """Return the loss at a `step` or after so many `macs`, linear in its logarithm in between.

    Raises:
        AnalysisError: The position lies outside the logged ones.
    """
    points = curve[axis].to_numpy(float)
    if not has_loss_at(curve, axis, position):
        raise AnalysisError(
            f"no held-out loss at {axis} {position:g}: expected a value between "
            f"{points.min():g} and {points.max():g}, where it was logged"
        )
    return float(np.interp(math.log(position), np.log(points), curve["loss"].to_numpy(float)))


def steps_to_reach(curve: pd.DataFrame, target: float) -> float:
    """Return the first step at which the loss is at most `target`, NaN if it never is.

    Raises:
        AnalysisError: It is already so low at the first logged step, so the step is unknown.
    """
    steps, losses = curve["step"].to_numpy(float), curve["loss"].to_numpy(float)
    if losses[0] < target:
        raise AnalysisError(
            f"the loss at the first logged step, {steps[0]:g}, is {losses[0]:.5g} and below the "
            f"target {target:.5g}; log earlier steps"
        )
    for i in range(len(steps)):
        if losses[i] > target:
            continue
        if losses[i] == target:
            return float(steps[i])
        share = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
        return float(steps[i - 1] * (steps[i] / steps[i - 1]) ** share)
    return math.nan


def step_penalty(baseline: pd.DataFrame, variant: pd.DataFrame, steps: float) -> float:
    """Return s(N) of one pair of runs with the same seed; NaN where the target is not reached.

    Args:
        baseline: Curve of the baseline; its loss after `steps` steps is the target.
        variant: Curve of the variant.
        steps: N, within the baseline's logged steps.
    """
    return steps_to_reach(variant, loss_at(baseline, "step", steps)) / steps


def macs_ratio(baseline: pd.DataFrame, variant: pd.DataFrame) -> float:
    """Return m: multiply-adds per training step, variant over baseline, each at its last step."""
    first, second = baseline.iloc[-1], variant.iloc[-1]
    return float((second["macs"] / second["step"]) / (first["macs"] / first["step"]))


@dataclass(frozen=True)
class Penalty:
    """Step penalty and relative cost over paired seeds."""

    # One row per paired seed: `s` (NaN: censored), `m`, `sm`, `censored`
    seeds: pd.DataFrame
    s: Estimate | None  # mean of s with a t-interval; None while a seed is censored
    # Geometric mean of s * m with a t-interval on ln(s * m); None while a seed is censored
    sm: Estimate | None

    @property
    def censored(self) -> int:
        """Number of seeds whose variant did not reach the target."""
        return int(self.seeds["censored"].sum())

    @property
    def censored_text(self) -> str:
        """How many seeds are censored, `undecided: 1 of 3 seeds censored`."""
        return f"undecided: {self.censored} of {len(self.seeds)} seeds censored"


def paired_penalty(
    baselines: Mapping[Any, pd.DataFrame], variants: Mapping[Any, pd.DataFrame], steps: float
) -> Penalty:
    """Return step penalty and relative cost over the seeds that both have, curves by seed.

    With a censored seed there is no mean: leaving that seed out would favour the variant.

    Raises:
        AnalysisError: No seed is in both.
    """
    common = sorted(set(baselines) & set(variants))
    if not common:
        raise AnalysisError("no seed has both runs; a step penalty needs pairs of one seed")
    rows = {}
    for seed in common:
        s = step_penalty(baselines[seed], variants[seed], steps)
        m = macs_ratio(baselines[seed], variants[seed])
        rows[seed] = {"s": s, "m": m, "sm": s * m, "censored": math.isnan(s)}
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame["censored"] = frame["censored"].astype(bool)
    if frame["censored"].any():
        return Penalty(frame, None, None)
    return Penalty(frame, interval(list(frame["s"])), ratio(list(frame["sm"])))


def penalties_by_step(
    baselines: Mapping[Any, pd.DataFrame], variants: Mapping[Any, pd.DataFrame]
) -> dict[float, Penalty]:
    """Return the step penalty at every step N that the baselines of all paired seeds logged.

    A target that a variant meets at its first logged step is left out: when it was met is unknown.

    Args:
        baselines: Curves of the baselines by seed.
        variants: Curves of the variants by seed; seeds that only one side has are ignored.
    """
    seeds = sorted(baselines.keys() & variants.keys())
    if not seeds:
        return {}
    paired_baselines = {seed: baselines[seed] for seed in seeds}
    common = set.intersection(*(set(curve["step"]) for curve in paired_baselines.values()))
    penalties = {}
    for step in sorted(common):
        try:
            penalties[float(step)] = paired_penalty(paired_baselines, variants, step)
        except AnalysisError:
            continue
    return penalties


def log_ratio_at_equal_macs(
    baselines: Mapping[Any, pd.DataFrame], variants: Mapping[Any, pd.DataFrame], macs: float
) -> dict[Any, float]:
    """Return ln(variant's loss / baseline's loss) by seed after the same multiply-adds.

    It is the primary endpoint of the experiment `study_equal_macs`: negative favours the variant.
    """
    ratios = {}
    for seed in sorted(set(baselines) & set(variants)):
        loss = loss_at(variants[seed], "macs", macs)
        ratios[seed] = math.log(loss / loss_at(baselines[seed], "macs", macs))
    return ratios
