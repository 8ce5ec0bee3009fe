"""Objective or route? DDPM, EDM and flow matching: `sweeps/grids/study_objective.yaml`."""

from pathlib import Path

import numpy as np
import pandas as pd

import analysis
from analysis.comparison.aggregation import interval
from analysis.errors import pick
from results.studies.common import (
    METRICS,
    RESULTS,
    STEPS,
    main,
    mean_changes,
    percent_change,
    read,
    sample_scores,
)

# Declared before the runs: minuend and subtrahend.
CONTRASTS = (
    (("edm", "dense"), ("ddpm", "dense")),
    (("edm", "routed"), ("edm", "dense")),
    (("ddpm", "routed"), ("ddpm", "dense")),
    (("flow", "routed"), ("flow", "dense")),
)


def table(name: str, records: Path = RESULTS / "study_objective.tar.gz") -> pd.DataFrame:
    """Return a table.

    Args:
        name: `contrasts` (the declared differences, for each sampler or pair of samplers) or
            `objectives` (mean scores of each objective and sampler, dense and routed).
        records: Archive or folder of runs.
    """
    runs = read(records)
    scores = analysis.scores(runs.assign(arm=runs["variant"].replace("2-8", "routed")))
    return pick("table", name, {"contrasts": _contrasts, "objectives": _objectives})(
        scores[scores["step"] == STEPS]
    )


def _contrasts(scores: pd.DataFrame) -> pd.DataFrame:
    samples = sample_scores(scores, ["objective", "arm", "sampler"])
    losses = scores[scores["key"] == "heldout_loss"].pivot(
        index="seed", columns=["objective", "arm"], values="value"
    )
    rows = []
    for first, second in CONTRASTS:
        one, other = (samples.loc[arm].reset_index("sampler") for arm in (first, second))
        pairs = one.merge(other, on="seed", suffixes=("", " of the other"))
        loss = ""
        if first[0] == second[0]:  # losses of different objectives are different quantities
            pairs = pairs[pairs["sampler"] == pairs["sampler of the other"]]
            loss = percent_change(interval(np.log(losses[first] / losses[second])))
        for samplers, part in pairs.groupby(["sampler", "sampler of the other"]):
            others = part[[f"{metric} of the other" for metric in METRICS]]
            differences = part[list(METRICS)] - others.set_axis(list(METRICS), axis=1)
            rows.append({
                "Backbone": "dit", "Difference": f"{first[1]} {first[0]} - {second[1]} {second[0]}",
                "Sampler": " against ".join(dict.fromkeys(samplers)), "Pairs": str(len(part)),
                **mean_changes(differences), "held-out loss (95 %)": loss,
            })  # fmt: skip
    return pd.DataFrame(rows)


def _objectives(scores: pd.DataFrame) -> pd.DataFrame:
    keys = ["objective", "arm", "sampler"]
    rows = []
    for (objective, arm, sampler), part in sample_scores(scores, keys).groupby(level=keys):
        means = {name: f"{part[name].mean():.{digits}f}" for name, digits in METRICS.items()}
        rows.append({
            "Backbone": "dit", "Objective": objective, "Arm": arm, "Sampler": sampler,
            "Seeds": ", ".join(map(str, part.index.get_level_values("seed"))), **means,
        })  # fmt: skip
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main(table)
