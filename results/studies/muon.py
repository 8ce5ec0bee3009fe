"""Muon's learning rate for the dense and the routed arm: `sweeps/grids/study_muon.yaml`."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from analysis.errors import pick
from results.studies.common import (
    RESULTS,
    Arm,
    Curves,
    arms_table,
    dense_arms,
    log_ratios,
    loss_curves_by_arm,
    main,
    penalty_table,
    read,
    seeds_table,
)


def table(name: str, records: Path = RESULTS / "study_muon.tar.gz") -> pd.DataFrame:
    """Return a table.

    Args:
        name: `arms` (held-out loss of every arm at its end), `penalty` (step penalty after 3,000
            dense steps) or `seeds` (change of loss at their multiply-adds, at equal rates).
        records: Archive or folder of runs.
    """
    runs = read(records).sort_values(["variant", "config.train.muon_lr", "seed"])
    rate = ", train.muon_lr=" + runs["config.train.muon_lr"].map("{:g}".format)
    arms = loss_curves_by_arm(runs.assign(arm=runs["variant"].replace("2-8", "route 2-8") + rate))
    return pick("table", name, {"arms": arms_table, "penalty": _penalty, "seeds": _seeds})(arms)


def _penalty(arms: Mapping[Arm, Curves]) -> pd.DataFrame:
    return penalty_table(arms).drop(columns="Learning rate")  # AdamW's, the same for all


def _seeds(arms: Mapping[Arm, Curves]) -> pd.DataFrame:
    changes = []
    for arm, dense in dense_arms(arms).items():
        changes.append((arm, "dense", log_ratios(arms, arm, dense, dense)))
    return seeds_table(changes)


if __name__ == "__main__":
    main(table)
