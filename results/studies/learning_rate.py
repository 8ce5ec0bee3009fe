"""Learning rate of the dense and of the routed arm: `sweeps/grids/study_learning_rate.yaml`."""

from pathlib import Path

import pandas as pd

from analysis.errors import pick
from results.studies.common import (
    RESULTS,
    arms_table,
    loss_curves_by_arm,
    main,
    penalty_table,
    read,
)


def table(name: str, records: Path = RESULTS / "study_learning_rate.tar.gz") -> pd.DataFrame:
    """Return a table.

    Args:
        name: `arms` (held-out loss of every arm at its end) or `penalty` (step penalty after 3,000
            dense steps, at equal rates).
        records: Archive or folder of runs.
    """
    runs = read(records)
    keys = ["backbone", "variant", "config.train.lr", "config.train.schedule"]
    arm = runs["variant"].replace("2-8", "route 2-8")
    has_two_schedules = runs.groupby(keys[:3])[keys[3]].transform("nunique") > 1
    arm = arm.mask(has_two_schedules, arm + ", train.schedule=" + runs[keys[3]])
    arms = loss_curves_by_arm(runs.assign(arm=arm).sort_values([*keys, "seed"]))
    return pick("table", name, {"arms": arms_table, "penalty": penalty_table})(arms)


if __name__ == "__main__":
    main(table)
