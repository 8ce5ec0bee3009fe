"""Dense depth and learning rates of study_frontier: `sweeps/grids/study_frontier_tuning.yaml`."""

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.errors import pick
from results.studies.common import RESULTS, loss_curves_by_arm, main, read

# Multiply-adds of a training step of 12 dense blocks, batch 16: the unit of N.
MACS_OF_12_BLOCKS = 44_494_848 * 16
WINDOW = np.arange(2400, 3001, 50)  # N


def table(name: str, records: Path = RESULTS / "study_frontier_tuning.tar.gz") -> pd.DataFrame:
    """Return a table.

    Args:
        name: `losses`, the declared endpoint: geometric mean of the held-out loss over the window.
        records: Archive or folder of runs.
    """
    return pick("table", name, {"losses": _losses})(read(records))


def _losses(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the endpoint of every arm by seed, and its geometric mean over seeds."""
    depth = runs["config.backbone.depth"].map("{:.0f} blocks".format)
    runs = runs.assign(arm=runs["variant"] + ", " + depth).sort_values(["arm", "seed"])
    rows = []
    for (_, arm, rate), curves in loss_curves_by_arm(runs).items():
        endpoints = {}
        for seed, curve in curves.items():
            per_step = curve["macs"].iloc[-1] / curve["step"].iloc[-1]
            steps = WINDOW * MACS_OF_12_BLOCKS / per_step
            endpoints[seed] = np.interp(steps, curve["step"], np.log(curve["loss"])).mean()
        by_seed = {f"seed {seed}": f"{np.exp(value):.4f}" for seed, value in endpoints.items()}
        mean = f"{np.exp(np.mean(list(endpoints.values()))):.4f}"
        rows.append({"Arm": arm, "Learning rate": f"{rate:g}", **by_seed, "mean": mean})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main(table)
