"""Does a saving last? Relative cost s * m against the number N of dense steps (`study_length`).

    s * m    MACs that a routed (or a cheaper dense) model needs for the loss of the dense one after
             N steps, relative to dense (`analysis.comparison.step_penalty`)
    slope    of ln(s * m) on ln(N), fitted to each seed by least squares; above 0 the saving
             shrinks with training length

A target that a run does not reach by its end is censored: s * m lies above the bound that the end
of the run gives, and the point is left out of the slope. That makes the slope smaller where the
bound lies above the fitted line; otherwise the direction is unknown.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from analysis.comparison.aggregation import interval, p_text, two_sided_p
from analysis.comparison.arms import Arm, Curves, baseline_arm, gap_text, percent_change
from analysis.comparison.step_penalty import (
    Penalty,
    has_loss_at,
    log_ratio_at_equal_macs,
    paired_penalty,
)

DECLARED_STEPS = (1000, 2000, 3000, 4500, 6000, 9000, 12000)
REPEATED_STEPS = 3000  # dense steps of `study_equal_macs`, whose seeds `study_length` repeats


@dataclass(frozen=True)
class LengthTrend:
    """s * m of one arm by the number of dense steps, over the seeds that it shares with dense."""

    arm: Arm
    penalties: dict[int, Penalty]  # by N
    log_ratios: dict[int, dict[int, float]]  # of the losses at equal MACs, by N and seed
    last_steps: dict[int, float]  # of the arm's runs, by seed

    def bound(self, steps: int, seed: int) -> float:
        """Return what s * m of a censored seed at N = `steps` lies above."""
        return self.last_steps[seed] / steps * float(self.penalties[steps].seeds["m"][seed])

    def slopes(self, after: int = 0) -> dict[int, float]:
        """Return each seed's slope of ln(s * m) on ln(N), over two or more points N > `after`."""
        slopes = {}
        for seed in self.last_steps:
            points = []
            for steps, penalty in self.penalties.items():
                sm = float(penalty.seeds["sm"][seed])
                if steps > after and not math.isnan(sm):
                    points.append((math.log(steps), math.log(sm)))
            if len(points) > 1:
                x, y = np.array(points).T
                slopes[seed] = float(np.polyfit(x, y, 1)[0])
        return slopes


def length_trends(table: Mapping[Arm, Curves]) -> Iterator[LengthTrend]:
    """Yield the trend of every arm but dense, at the declared N that all its pairs have logged."""
    for arm, curves in table.items():
        baseline = baseline_arm(arm, table)
        if baseline is None or baseline == arm:
            continue
        dense = table[baseline]
        seeds = sorted(curves.keys() & dense.keys())
        penalties, log_ratios = {}, {}
        for steps in DECLARED_STEPS:
            if not seeds or not all(has_loss_at(dense[seed], "step", steps) for seed in seeds):
                continue
            penalties[steps] = paired_penalty(dense, curves, steps)
            macs = float(np.interp(steps, dense[seeds[0]]["step"], dense[seeds[0]]["macs"]))
            if all(has_loss_at(curves[seed], "macs", macs) for seed in seeds):
                log_ratios[steps] = log_ratio_at_equal_macs(dense, curves, macs)
        if penalties:
            last = {seed: float(curves[seed]["step"].max()) for seed in seeds}
            yield LengthTrend(arm, penalties, log_ratios, last)


def lengths_table(table: Mapping[Arm, Curves]) -> list[list[str]]:
    """Return s * m by N: of each seed, and the geometric mean while no seed is censored.

    Two more columns have the change of the loss at the MACs of N dense steps (late in training,
    where curves are flat, a small difference in loss means a large one in s * m) and the gap
    between the losses of both passes after N routed steps.
    """
    change = "Loss change at equal MACs (95 %)"
    rows = [["Backbone", "Arm", "Dense steps N", "s*m by seed", "s*m (95 %)", change, "Gap"]]
    for trend in length_trends(table):
        for steps, penalty in trend.penalties.items():
            texts = []
            for seed in trend.last_steps:
                sm = float(penalty.seeds["sm"][seed])
                bound = f"> {trend.bound(steps, seed):.2f}"
                texts.append(bound if math.isnan(sm) else f"{sm:.2f}")
            mean = penalty.censored_text if penalty.sm is None else penalty.sm.text(".2f")
            name = [trend.arm.backbone, trend.arm.label]
            log_ratio = interval(trend.log_ratios.get(steps, {}).values())
            loss = percent_change(log_ratio) if log_ratio else ""
            gap = gap_text(table[trend.arm], trend.last_steps, steps)
            rows.append([*name, f"{steps:,}", ", ".join(texts), mean, loss, gap])
    return rows


def slopes_table(table: Mapping[Arm, Curves]) -> list[list[str]]:
    """Return the slope of ln(s * m) on ln(N): of each seed, its mean, and the p of a t-test.

    The last column, left out where no run is long enough, has the mean slope of later points only.
    """
    head = ["Backbone", "Arm", "Seeds", "Slope by seed", "Slope (95 %)", "p (two-sided)"]
    rows = [[*head, f"N > {REPEATED_STEPS:,} only"]]
    has_late_points = False
    for trend in length_trends(table):
        slopes = trend.slopes()
        mean, late = interval(slopes.values()), interval(trend.slopes(REPEATED_STEPS).values())
        if mean is None:
            continue
        p = "" if mean.std is None else p_text(two_sided_p(mean))
        by_seed = ", ".join(f"{slope:+.3f}" for slope in slopes.values())
        seeds = ", ".join(map(str, slopes))
        name = [trend.arm.backbone, trend.arm.label]
        late_text = late.text("+.3f") if late else ""
        has_late_points = has_late_points or late is not None
        rows.append([*name, seeds, by_seed, mean.text("+.3f"), p, late_text])
    if not has_late_points:
        for row in rows:
            row.pop()
    return rows
