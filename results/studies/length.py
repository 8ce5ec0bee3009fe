"""Does the saving from routing last? `sweeps/grids/study_length.yaml`.

s * m at N: multiply-adds that an arm needs for the loss of N dense steps, relative to dense. Its
slope, of ln(s * m) on ln(N), is fitted to each seed. A target that a run does not reach is
censored: s * m lies above the bound that the run's end gives, and the slope leaves the point out.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.comparison.aggregation import interval, p_text, two_sided_p
from analysis.comparison.equal_macs import macs_per_step
from analysis.comparison.step_penalty import Penalty, has_loss_at, paired_penalty
from analysis.errors import pick
from results.studies.common import (
    RESULTS,
    STEPS,
    Arm,
    Curves,
    dense_arms,
    gap_text,
    log_ratios,
    loss_curves_by_arm,
    main,
    percent_change,
    read,
)

DECLARED_STEPS = (1000, 2000, 3000, 4500, 6000, 9000, 12000)


def table(name: str, records: Path = RESULTS / "study_length.tar.gz") -> pd.DataFrame:
    """Return a table.

    Args:
        name: `lengths` (s * m by the number of dense steps) or `slopes` (how it grows).
        records: Archive or folder of runs.
    """
    runs = read(records).sort_values(["config.backbone.width", "seed"])
    width = ", width " + runs["config.backbone.width"].astype(str)
    arms = loss_curves_by_arm(runs.assign(arm=runs["variant"].replace("2-8", "route 2-8") + width))
    return pick("table", name, {"lengths": lengths, "slopes": slopes})(arms, dense_arms(arms))


def lengths(arms: Mapping[Arm, Curves], pairs: Mapping[Arm, Arm]) -> pd.DataFrame:
    """Return s * m, the change of loss at the MACs of N dense steps, and the gap at N, by N."""
    rows = []
    for arm, dense in pairs.items():
        curves = arms[arm]
        for steps, penalty in _penalties(arms[dense], curves).items():
            by_seed = []
            for seed, m, sm in penalty.seeds[["m", "sm"]].itertuples():
                bound = curves[seed]["step"].max() / steps * m
                by_seed.append(f"> {bound:.2f}" if math.isnan(sm) else f"{sm:.2f}")
            change, macs = "", macs_per_step(arms[dense]) * steps
            if all(has_loss_at(curve, "macs", macs) for curve in curves.values()):
                ratios = log_ratios(arms, arm, dense, dense, steps)
                change = percent_change(interval(ratios.values()))
            points = [curve[curve["step"] <= steps].iloc[-1] for curve in curves.values()]
            rows.append({
                "Backbone": arm[0], "Arm": arm[1], "Dense steps N": f"{steps:,}",
                "s*m by seed": ", ".join(by_seed),
                "s*m (95 %)": penalty.sm.text(".2f") if penalty.sm else penalty.censored_text,
                "Loss change at equal MACs (95 %)": change,
                "Gap": gap_text(pd.DataFrame(points)),
            })  # fmt: skip
    return pd.DataFrame(rows)


def slopes(arms: Mapping[Arm, Curves], pairs: Mapping[Arm, Arm]) -> pd.DataFrame:
    """Return the slope of ln(s * m) on ln(N), with the p of a t-test, and for late N only."""
    rows = []
    for arm, dense in pairs.items():
        penalties = _penalties(arms[dense], arms[arm])
        by_seed = _slopes(penalties)
        mean, late = interval(by_seed.values()), interval(_slopes(penalties, STEPS).values())
        row = {
            "Backbone": arm[0], "Arm": arm[1], "Seeds": ", ".join(map(str, by_seed)),
            "Slope by seed": ", ".join(map("{:+.3f}".format, by_seed.values())),
            "Slope (95 %)": mean.text("+.3f"), "p (two-sided)": p_text(two_sided_p(mean)),
        }  # fmt: skip
        if late:  # the runs of study_equal_macs end before
            row[f"N > {STEPS:,} only"] = late.text("+.3f")
        rows.append(row)
    return pd.DataFrame(rows)


def _penalties(dense: Curves, curves: Curves) -> dict[int, Penalty]:
    """Return step penalties at the declared numbers of dense steps."""
    last = min(curve["step"].max() for curve in dense.values())
    declared = [steps for steps in DECLARED_STEPS if steps <= last]
    return {steps: paired_penalty(dense, curves, steps) for steps in declared}


def _slopes(penalties: Mapping[int, Penalty], after: int = 0) -> dict[int, float]:
    """Return the slope of ln(s * m) on ln(N) by seed, over two or more points N > `after`."""
    columns = {steps: penalty.seeds["sm"] for steps, penalty in penalties.items() if steps > after}
    slopes = {}
    for seed, sm in pd.DataFrame(columns).iterrows():
        sm = sm.dropna()
        if len(sm) > 1:
            slopes[seed] = float(np.polyfit(np.log(sm.index.astype(float)), np.log(sm), 1)[0])
    return slopes


if __name__ == "__main__":
    main(table)
