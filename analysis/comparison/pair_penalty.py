"""The step penalty of a group's guideline route, from the scores that its runs logged on the way.

s and s * m are those of `step_penalty`. N, the step of the dense runs whose loss is the
target, is the latest that every routed seed reaches within its training. Beyond it seeds are
censored: they count, and there is no mean.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.comparison.step_penalty import Penalty, curves_by_run, macs_ratio, penalties_by_step

LOSS, ROUTED_LOSS = "heldout_loss", "heldout_loss_routed"


@dataclass(frozen=True, eq=False)
class PairPenalty:
    """Step penalties of one group's pair by the dense runs' step."""

    group: Group
    routed: Variant
    by_step: dict[float, Penalty]
    last_steps: dict[int, float]  # of the routed runs, by seed
    m: float  # multiply-adds per step, routed over dense

    @property
    def step(self) -> float:
        """N: the latest step whose loss every seed reaches, else the first of all."""
        complete = [step for step, penalty in self.by_step.items() if not penalty.censored]
        return max(complete) if complete else min(self.by_step)

    @property
    def penalty(self) -> Penalty:
        """The penalty after N steps."""
        return self.by_step[self.step]

    def rows(self) -> pd.DataFrame:
        """Return a row per N and seed: step, seed, s, m, sm, censored, and `bound`.

        `bound` is what a censored s exceeds: the routed run's last step over N.
        """
        frames = []
        for step, penalty in self.by_step.items():
            frame = penalty.seeds.rename_axis("seed").reset_index()
            frame["bound"] = frame["seed"].map(self.last_steps) / step
            frames.append(frame.assign(step=step))
        return pd.concat(frames, ignore_index=True)


def pair_penalties(results: Results) -> list[PairPenalty]:
    """Return the step penalties of every pair whose losses were logged on the way."""
    penalties = []
    for group, dense, routed in results.pairs():
        pair = pair_penalty(results, group, dense, routed)
        if pair is not None:
            penalties.append(pair)
    return penalties


def pair_penalty(
    results: Results, group: Group, dense: Variant, routed: Variant
) -> PairPenalty | None:
    """Return the step penalties of a routed variant; None where no losses were logged."""
    dense_curves, routed_curves = _curves(results, dense), _curves(results, routed)
    by_step = penalties_by_step(dense_curves, routed_curves)
    if not by_step:
        return None
    seeds = sorted(dense_curves.keys() & routed_curves.keys())
    ratios = [macs_ratio(dense_curves[seed], routed_curves[seed]) for seed in seeds]
    last_steps = {seed: float(routed_curves[seed]["step"].iloc[-1]) for seed in seeds}
    return PairPenalty(group, routed, by_step, last_steps, math.exp(np.log(ratios).mean()))


@functools.lru_cache(maxsize=2)
def _curves_by_path(results: Results) -> dict[str, pd.DataFrame]:
    """Return the held-out losses of all runs by folder; the table and the figure both read them."""
    scores = results.own_scores
    scores = scores[scores["key"].isin([LOSS, ROUTED_LOSS])].dropna(subset=["step", "macs"])
    return curves_by_run(scores, "path")


def _curves(results: Results, variant: Variant) -> dict[int, pd.DataFrame]:
    """Return the held-out losses of a variant's runs by seed; of one seed the longest run counts.

    A run with one scored step shows no way there and has no curve.
    """
    curves: dict[int, pd.DataFrame] = {}
    by_run = _curves_by_path(results)
    for seed, path in variant.runs[["seed", "path"]].dropna().itertuples(index=False):
        curve = by_run.get(str(path))
        if curve is None or len(curve) < 2:
            continue
        if seed not in curves or curve["step"].iloc[-1] > curves[seed]["step"].iloc[-1]:
            curves[int(seed)] = curve
    return curves
