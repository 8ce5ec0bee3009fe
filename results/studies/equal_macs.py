"""Routing against dense at equal multiply-adds: `sweeps/grids/study_equal_macs.yaml`."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from analysis.comparison.aggregation import holm, interval, p_text, two_sided_p
from analysis.comparison.step_penalty import paired_penalty
from analysis.errors import pick
from results.studies import length
from results.studies.common import (
    RESULTS,
    STEPS,
    Arm,
    Curves,
    arms_table,
    log_ratios,
    loss_curves_by_arm,
    main,
    percent_change,
    read,
    scores_table,
    seeds_table,
)

# The gate: a saving on dit counts only if the routed arm also beats the 8 blocks.
ROUTED, SHALLOW = ("dit", "route 2-8", 0.004), ("dit", "dense, 8 blocks", 0.004)


def table(name: str, records: Path = RESULTS / "study_equal_macs.tar.gz") -> pd.DataFrame:
    """Return a table.

    Args:
        name: `endpoints` (changes of loss at equal multiply-adds; those of routed against dense are
            the declared ones), `seeds` (the same by seed), `arms` (held-out loss of every arm at
            its end), `scores` (on samples, after the last step), `lengths` or `slopes` (as in
            `study_length`).
        records: Archive or folder of runs.
    """
    runs = read(records)
    arm = runs["variant"].replace("2-8", "route 2-8")
    arm = arm.mask(runs["config.backbone.depth"].eq(8).fillna(False), arm + ", 8 blocks")
    arm = arm.mask(runs["config.train.batch"] == 11, arm + ", batch 11")
    order = ["backbone", "config.backbone.depth", "config.train.batch", "variant", "seed"]
    runs = runs.assign(arm=arm).sort_values(order)
    arms = loss_curves_by_arm(runs)
    dense = {arm[0]: arm for arm in arms if arm[1] == "dense"}
    pairs = {arm: dense[arm[0]] for arm in arms if arm[1] != "dense"}
    tables = {
        "endpoints": lambda: _endpoints(arms, pairs),
        "seeds": lambda: seeds_table(_changes(arms, pairs)),
        "arms": lambda: arms_table(arms),
        "scores": lambda: scores_table(runs),
        "lengths": lambda: length.lengths(arms, pairs),
        "slopes": lambda: length.slopes(arms, pairs),
    }
    return pick("table", name, tables)()


def _changes(
    arms: Mapping[Arm, Curves], pairs: Mapping[Arm, Arm]
) -> Iterator[tuple[Arm, str, dict[int, float]]]:
    """Yield arm, what it is compared with, and log ratios of loss at equal MACs by seed."""
    for arm, dense in pairs.items():
        yield arm, "dense", log_ratios(arms, arm, dense, dense)
    yield ROUTED, SHALLOW[1], log_ratios(arms, ROUTED, SHALLOW, pairs[ROUTED])


def _endpoints(arms: Mapping[Arm, Curves], pairs: Mapping[Arm, Arm]) -> pd.DataFrame:
    rows, p_values = [], {}
    for arm, compared_with, ratios in _changes(arms, pairs):
        change, saving = interval(ratios.values()), ""
        if compared_with == "dense":
            penalty = paired_penalty(arms[pairs[arm]], arms[arm], STEPS)
            saving = f"loss not reached by {penalty.censored} of {len(penalty.seeds)}"
            if penalty.sm is not None:
                saving = penalty.sm.text(".2f")
            if arm[1] == "route 2-8":
                p_values[len(rows)] = two_sided_p(change)
        rows.append({
            "Backbone": arm[0], "Arm": arm[1], "Compared with": compared_with,
            "Pairs": str(len(ratios)), "Loss change at equal MACs (95 %)": percent_change(change),
            "p (Holm)": "", "s*m (95 %)": saving,
        })  # fmt: skip
    for index, p in holm(p_values).items():
        rows[index]["p (Holm)"] = p_text(p)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main(table)
