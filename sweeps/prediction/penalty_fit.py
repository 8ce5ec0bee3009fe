"""The step penalty of a short pilot, fitted and extrapolated: does the route save compute?

    ln s_i(N) = a_i + b_i ln N     one line per seed i, least squares over the logged steps N

s and m are those of `analysis.comparison.step_penalty`: s(N) is how many times the dense run's N
steps a routed run needs for the same held-out loss, m is its multiply-adds per step over those of
the dense run, and s * m is the relative cost of that loss. The prediction is the mean of the
seeds' lines; its interval is Student's, of the seeds' ln(s * m), so it contains how uncertain the
slopes are. A step N that some seed's routed run does not reach (censored) is left out for all
seeds and listed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.comparison.aggregation import Estimate, interval, ratio
from analysis.comparison.step_penalty import Penalty
from routing.errors import require
from sweeps import SweepError

#: Predictions are supported up to this multiple of the last fitted step.
HORIZON = 2.0
#: Bound on the relative error of a predicted s * m up to the horizon; the largest one measured on
#: steps that were not fitted is 18 % (docs/predict.md). A prediction is undecided if its interval,
#: widened by this, contains 1.
MODEL_ERROR = 0.2


@dataclass(frozen=True)
class PenaltyFit:
    """Step penalty of a route as a function of N, a line of ln s against ln N per seed.

    Attributes:
        steps: The steps N that were fitted.
        left_out: Logged steps N that some seed's routed run does not reach.
        intercepts: ln s at N = 1, by seed.
        slopes: Growth of ln s with ln N, by seed.
        m: Multiply-adds per step, routed over dense, by seed.
    """

    steps: tuple[float, ...]
    left_out: tuple[float, ...]
    intercepts: pd.Series
    slopes: pd.Series
    m: pd.Series

    @property
    def horizon(self) -> float:
        """The largest N of which a prediction is supported."""
        return HORIZON * max(self.steps)

    @property
    def slope(self) -> Estimate:
        """Mean slope over the seeds, with its t-interval."""
        return _estimate(interval(self.slopes))

    def penalty(self, steps: float) -> Estimate:
        """Return s(N): geometric mean over the seeds, with a t-interval on ln s."""
        return _estimate(ratio(self._penalties(steps)))

    def relative_cost(self, steps: float) -> Estimate:
        """Return s(N) * m: geometric mean over the seeds, with a t-interval on ln(s * m)."""
        return _estimate(ratio(self._penalties(steps) * self.m))

    def _penalties(self, steps: float) -> pd.Series:
        return (self.intercepts + self.slopes * math.log(steps)).map(math.exp)


def _estimate(estimate: Estimate | None) -> Estimate:
    assert estimate is not None  # there is at least one seed, and no s is censored
    return estimate


def fit_penalty(penalties: Mapping[float, Penalty]) -> PenaltyFit:
    """Fit ln s, given by N for the same seeds, linearly in ln N, seed by seed.

    Raises:
        SweepError: All seeds reach the dense loss at fewer than two steps.
    """
    steps: list[float] = []
    left_out: list[float] = []
    for step, penalty in penalties.items():
        (left_out if penalty.censored else steps).append(step)
    require(
        len(steps) >= 2,
        f"s is defined for all seeds at {len(steps)} of {len(penalties)} logged steps, expected at "
        "least 2: use a longer pilot (steps=), or one that is logged more often",
        SweepError,
    )
    seeds = penalties[steps[0]].seeds
    by_step = pd.DataFrame({step: penalties[step].seeds["s"] for step in steps})
    slopes, intercepts = np.polyfit(np.log(steps), np.log(by_step.to_numpy().T), 1)
    return PenaltyFit(
        tuple(steps),
        tuple(left_out),
        pd.Series(intercepts, seeds.index),
        pd.Series(slopes, seeds.index),
        seeds["m"],
    )


@dataclass(frozen=True)
class HeldOutStep:
    """s * m at a step N that was not fitted, predicted from earlier ones, and as measured."""

    step: float
    supported: bool  # within the horizon of the fit
    predicted: Estimate
    measured: Estimate

    @property
    def error(self) -> float:
        """Relative error of the predicted s * m."""
        return self.predicted.mean / self.measured.mean - 1


def check_fit(penalties: Mapping[float, Penalty]) -> list[HeldOutStep]:
    """Fit the first half of the steps at which s is defined, and predict s * m at the others.

    Returns:
        The others in order; none where the first half has fewer than two steps.
    """
    complete = {step: penalty for step, penalty in penalties.items() if not penalty.censored}
    steps = sorted(complete)
    fitted = steps[: math.ceil(len(steps) / 2)]
    try:
        fit = fit_penalty({step: complete[step] for step in fitted})
    except SweepError:
        return []
    results = []
    for step in steps[len(fitted) :]:
        measured = _estimate(complete[step].sm)
        supported = step <= fit.horizon
        results.append(HeldOutStep(step, supported, fit.relative_cost(step), measured))
    return results


def describe_fit(fit: PenaltyFit, full_steps: int, macs_per_step: float) -> list[str]:
    """Return lines about a fit: s, its growth, the horizon, and what a full run saves or costs.

    `macs_per_step` are the training multiply-adds of a dense step.
    """
    last = max(fit.steps)
    lines = [
        f"fitted at {len(fit.steps)} steps, N = {min(fit.steps):g} to {last:g}, "
        f"{len(fit.slopes)} paired seed{'s' if len(fit.slopes) > 1 else ''}; "
        f"m = {fit.m.mean():.3f}"
    ]
    if fit.left_out:
        texts = ", ".join(f"{step:g}" for step in fit.left_out)
        lines.append(f"left out, since a routed run ends above the dense loss there: N = {texts}")
    lines.append(
        f"s = {_with_interval(fit.penalty(last))} at N = {last:g}; s grows like N to the power "
        f"{_with_interval(fit.slope)}"
    )
    step = float(full_steps)
    if full_steps > fit.horizon:
        step = fit.horizon
        lines.append(
            f"a full run of {full_steps} steps is beyond the horizon, {HORIZON:g} times the last "
            f"fitted step: it needs a pilot with "
            f"steps={math.ceil(full_steps / HORIZON)}; up to the horizon:"
        )
    cost = fit.relative_cost(step)
    lines.append(f"N = {step:g}: s*m = {_with_interval(cost)}: {verdict(cost, step > last)}")
    dense = macs_per_step * step
    routed_steps = fit.penalty(step).mean * step
    lines.append(
        f"about {routed_steps:.0f} routed steps and {cost.mean * dense:.3g} multiply-adds instead "
        f"of {step:g} dense ones and {dense:.3g}"
    )
    return lines


def _with_interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:.3f} (one seed: no interval)"
    return f"{estimate.mean:.3f} (95 % {estimate.low:.3f} to {estimate.high:.3f})"


def verdict(cost: Estimate, extrapolated: bool) -> str:
    """Return what a predicted relative cost s * m means: a saving, a loss, or undecided.

    The interval of s * m reflects only the spread of the seeds; where it is `extrapolated` beyond
    the fitted steps, it is widened by `MODEL_ERROR`.
    """
    change = f"{abs(1 - cost.mean):.0%} {'fewer' if cost.mean < 1 else 'more'} multiply-adds"
    if cost.low is None or cost.high is None:
        return f"{change}, undecided (one seed)"
    margin = 1 + MODEL_ERROR if extrapolated else 1
    if cost.high * margin < 1:
        return f"{change}, a saving"
    if cost.low / margin > 1:
        return f"{change}, a loss"
    reason = f"the interval, widened by {MODEL_ERROR:.0%}" if extrapolated else "the interval"
    return f"{change}, undecided ({reason}, contains 1)"


def describe_check(results: list[HeldOutStep]) -> list[str]:
    """Return a line per held-out step: predicted and measured s * m, and the error."""
    lines = []
    for result in results:
        remark = "" if result.supported else ", beyond the horizon"
        lines.append(
            f"check, fitted on the first half of the steps: s*m at N = {result.step:g} predicted "
            f"{result.predicted.mean:.3f}, measured {result.measured.mean:.3f} "
            f"({result.error:+.1%}{remark})"
        )
    return lines
