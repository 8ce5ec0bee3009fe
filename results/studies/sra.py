"""Alignment to the run's own EMA (SRA), dense and routed: `sweeps/grids/study_sra.yaml`."""

from pathlib import Path

import numpy as np
import pandas as pd

import analysis
from analysis.comparison.aggregation import interval
from analysis.errors import pick
from results.studies.common import (
    RESULTS,
    STEPS,
    main,
    mean_changes,
    percent_change,
    read,
    sample_scores,
    scores_table,
)


def table(name: str, records: Path = RESULTS / "study_sra.tar.gz") -> pd.DataFrame:
    """Return a table.

    Args:
        name: `alignment` (what it changes after 3,000 steps, within dense and within routed runs;
            the MACs count the pass of SRA's teacher) or `scores` (on samples, of every arm).
        records: Archive or folder of runs.
    """
    runs = read(records).sort_values(["variant", "seed"])
    return pick("table", name, {"alignment": _alignment, "scores": _scores})(runs)


def _alignment(runs: pd.DataFrame) -> pd.DataFrame:
    scores = analysis.scores(runs)
    scores = scores[scores["step"] == STEPS]
    samples = sample_scores(scores, ["variant"])
    losses = scores[scores["key"] == "heldout_loss"].set_index(["variant", "seed"])
    rows = []
    for arm in sorted(set(runs["variant"]) - {"dense", "2-8"}):
        baseline = "2-8" if "2-8" in arm else "dense"
        ratios = losses.loc[arm, ["macs", "value"]] / losses.loc[baseline, ["macs", "value"]]
        rows.append({
            "Model": "dit-T/4", "Arm": arm, "Compared with": baseline,
            "MACs ratio": f"{ratios['macs'].mean():.2f}x", "Pairs": str(len(ratios)),
            **mean_changes(samples.loc[arm] - samples.loc[baseline]),
            "held-out loss (95 %)": percent_change(interval(np.log(ratios["value"]))),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _scores(runs: pd.DataFrame) -> pd.DataFrame:
    arm = runs["variant"].replace("2-8", "route 2-8") + ", flow"
    return scores_table(runs.assign(arm=arm), dense="dense, flow")


if __name__ == "__main__":
    main(table)
