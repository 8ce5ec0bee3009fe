"""Objective or route? Scores of dense and routed models of several objectives (`study_objective`).

TREAD's headline compares models that differ in both. The declared differences change one at a time;
`CONTRASTS` lists them. Scores are those on samples after the same number of steps, in the features
of the data set's own classifier.
"""

import numpy as np
import pandas as pd

from analysis.comparison.aggregation import DENSE, interval
from analysis.comparison.arms import percent_change
from analysis.comparison.final_scores import METRICS, mean_text, scores_after
from analysis.runs.loading import Runs, runs_of, scores

# Declared before the runs: minuend and subtrahend, each an objective and whether it is routed.
CONTRASTS = (
    (("edm", False), ("ddpm", False)),
    (("edm", True), ("edm", False)),
    (("ddpm", True), ("ddpm", False)),
    (("flow", True), ("flow", False)),
)


def objective_scores(source: Runs, steps: int) -> pd.DataFrame:
    """Return the scores of every run on samples after `steps` steps, a row for each sampler.

    Args:
        source: What `analysis.load` returned, or a folder of run folders.
        steps: Training steps; a run that goes on counts with its scores at this step.

    Columns are `backbone`, `objective`, `routed`, `sampler` and those of
    `final_scores.scores_after`.

    Raises:
        AnalysisError: Several runs that differ in nothing else, such as in the learning rate.
    """
    keys = ["backbone", "objective", "routed", "sampler"]
    return scores_after(scores(runs_of(source)), steps, keys)


def objectives_table(frame: pd.DataFrame) -> list[list[str]]:
    """Return the mean scores of each objective and sampler, dense and routed.

    Args:
        frame: What `objective_scores` returned.
    """
    rows = [["Backbone", "Objective", "Arm", "Sampler", "Seeds", *METRICS]]
    for keys, part in frame.groupby(["backbone", "objective", "routed", "sampler"]):
        backbone, objective, routed, sampler = keys
        arm = "routed" if routed else DENSE
        means = [mean_text(part[metric], digits) for metric, digits in METRICS.items()]
        seeds = ", ".join(str(int(seed)) for seed in sorted(part["seed"]))
        rows.append([str(backbone), str(objective), arm, str(sampler), seeds, *means])
    return rows


def contrasts_table(frame: pd.DataFrame) -> list[list[str]]:
    """Return the declared differences: mean over pairs and half-width of the 95 % t-interval.

    Args:
        frame: What `objective_scores` returned.

    There is a row for each sampler. One objective is compared with another for each pair of their
    samplers. The held-out loss is compared within an objective only: losses of different
    objectives are different quantities.
    """
    rows = [["Backbone", "Difference", "Sampler", "Pairs", *METRICS, "held-out loss (95 %)"]]
    for minuend, subtrahend in CONTRASTS:
        first, second = _arm(frame, *minuend), _arm(frame, *subtrahend)
        pairs = first.merge(second, on=["backbone", "seed"], suffixes=("", "_baseline"))
        if minuend[0] == subtrahend[0]:
            pairs = pairs[pairs["sampler"] == pairs["sampler_baseline"]]
        for keys, part in pairs.groupby(["backbone", "sampler", "sampler_baseline"]):
            backbone, *samplers = map(str, keys)
            texts = []
            for metric, digits in METRICS.items():
                difference = interval(part[metric] - part[f"{metric}_baseline"])
                texts.append(difference.half_width_text(f"+.{digits}f") if difference else "")
            name = f"{_name(*minuend)} - {_name(*subtrahend)}"
            names = " against ".join(dict.fromkeys(samplers))
            is_same = minuend[0] == subtrahend[0]
            loss = interval(np.log(part["loss"] / part["loss_baseline"])) if is_same else None
            texts.append(percent_change(loss) if loss else "")
            rows.append([backbone, name, names, str(len(part)), *texts])
    return rows


def _arm(frame: pd.DataFrame, objective: str, routed: bool) -> pd.DataFrame:
    return frame[(frame["objective"] == objective) & (frame["routed"] == routed)]


def _name(objective: str, routed: bool) -> str:
    return f"{'routed' if routed else DENSE} {objective}"
