"""x-prediction in pixels (JiT), dense and routed: `sweeps/grids/study_jit.yaml`."""

from pathlib import Path

import pandas as pd

import analysis
from analysis.comparison.aggregation import interval
from analysis.errors import pick
from results.studies.common import RESULTS, STEPS, main, read, sample_scores


def table(name: str, records: Path = RESULTS / "study_jit.tar.gz") -> pd.DataFrame:
    """Return a table.

    Args:
        name: `changes` (of FD by the route, under x- and v-prediction, and their difference).
        records: Archive or folder of runs.
    """
    return pick("table", name, {"changes": _changes})(analysis.scores(read(records)))


def _changes(scores: pd.DataFrame) -> pd.DataFrame:
    keys = ["config.objective.prediction", "variant"]
    fd = sample_scores(scores[scores["step"] == STEPS], keys)["FD"]
    x, v = (fd.loc[prediction, "2-8"] - fd.loc[prediction, "dense"] for prediction in ("x", "v"))
    rows = []
    for label, changes in {"x-prediction": x, "v-prediction": v, "x - v": x - v}.items():
        by_seed = {f"seed {seed}": f"{change:+.2f}" for seed, change in changes.items()}
        mean = interval(changes).text("+.2f")
        rows.append({"Change of FD by the route": label, **by_seed, "mean (95 %)": mean})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main(table)
