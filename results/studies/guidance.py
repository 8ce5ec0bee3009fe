"""Does a route act like guidance, late in training? `sweeps/grids/study_guidance.yaml`."""

from pathlib import Path

import pandas as pd

import analysis
from analysis.errors import pick
from results.studies.common import RESULTS, main, mean_changes, read, sample_scores


def table(name: str, records: Path = RESULTS / "study_guidance.tar.gz") -> pd.DataFrame:
    """Return a table.

    Args:
        name: `signature` (how dense and routed scores differ, how much guidance changes either).
        records: Archive or folder of runs.
    """
    return pick("table", name, {"signature": _signature})(analysis.scores(read(records)))


def _signature(scores: pd.DataFrame) -> pd.DataFrame:
    scores = scores.assign(guidance=scores["guidance"].str.split(" ").str[0])
    keys = ["step", "config.backbone.width", "guidance", "variant"]
    samples = sample_scores(scores, keys)
    rows = []
    for (step, width), part in samples.groupby(level=keys[:2]):
        part = part.loc[step, width]
        dense, routed = part.loc["none", "dense"], part.loc["none", "2-8"]
        guided_dense, guided_routed = part.loc["cfg", "dense"], part.loc["cfg", "2-8"]
        differences = {
            "2-8 - dense": routed - dense,
            "2-8 - dense under CFG 1.5": guided_routed - guided_dense,
            "2-8, change by CFG 1.5": guided_routed - routed,
            "dense, change by CFG 1.5": guided_dense - dense,
            "2-8 - dense, change by CFG 1.5": (guided_routed - routed) - (guided_dense - dense),
            "2-8, change by routed inference": part.loc["routed", "2-8"] - routed,
        }
        for label, values in differences.items():
            rows.append({
                "Model": f"dit-T/4, backbone.width={width}", "Steps": f"{step:,}",
                "Samples": "2,000", "Difference": label, "Pairs": str(len(values)),
                **mean_changes(values),
            })  # fmt: skip
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main(table)
