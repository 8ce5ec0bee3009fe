"""The exploratory comparison before `study_equal_macs`: runs of `sweeps/grids/evidence.yaml`.

Routed runs of three seeds went on to 4,200 steps, which cost .97 to 1.00 of the multiply-adds of
3,000 dense ones. `python -m results.studies.exploratory figure` draws results/figures/compute.png.
"""

import sys
from pathlib import Path
from typing import Any

import pandas as pd

import analysis
from analysis.comparison.aggregation import interval
from analysis.errors import pick
from analysis.figures.style import Plot, canvas, colour, line, styled
from results.studies.common import RESULTS, STEPS, loss_curves_by_arm, main, penalty_table, read

ARCHIVE = RESULTS / "runs.tar.gz"
LONGER = 4200
CAPTION = (
    f"Above: scores against training multiply-adds. Hollow: dense runs after {STEPS:,} steps; "
    f"solid: the routed runs of the same seeds after as many steps and after {LONGER:,}, which "
    "cost .97 to 1.00 of the dense runs' multiply-adds. Below: routed minus dense of every seed "
    "(small) and their mean with its 95 % t-interval, at equal steps and at about equal "
    "multiply-adds."
)


def table(name: str, records: Path = ARCHIVE) -> pd.DataFrame:
    """Return a table.

    Args:
        name: `penalty` (step penalty of the routed runs that went on, at 3,000 dense steps).
        records: Archive or folder of runs.
    """
    return pick("table", name, {"penalty": _penalty})(read(records))


def _penalty(runs: pd.DataFrame) -> pd.DataFrame:
    went_on = runs.groupby(["backbone", "variant", "seed"])["step"].transform("max") > STEPS
    is_arm = (runs["variant"] == "dense") | ((runs["variant"] == "2-8") & went_on)
    runs = runs[(runs["data"] == "fashion") & is_arm].sort_values(["backbone", "seed"])
    arms = loss_curves_by_arm(runs.assign(arm=runs["variant"].replace("2-8", "route 2-8")))
    return penalty_table(arms).drop(columns="Learning rate")


# --- the figure -----------------------------------------------------------------------------------


def score_points(runs: pd.DataFrame) -> pd.DataFrame:
    """Return FD and held-out loss at both lengths, with the multiply-adds spent.

    Of each backbone the seeds whose routed run went on.
    """
    scores = analysis.scores(runs[runs["data"] == "fashion"])
    scores = scores[scores["own"].astype(bool) & scores["step"].isin([STEPS, LONGER])]
    names = {"FD-2K (fashion-classifier)": "fd", "heldout-loss-2K": "loss"}
    scores = scores[scores["metric"].isin(list(names))].replace({"metric": names})
    keys = ["backbone", "variant", "seed", "step"]
    scores = scores.drop_duplicates([*keys, "metric"], keep="last").astype({"macs": float})
    points = scores.pivot_table("value", [*keys, "macs"], "metric").reset_index()
    went_on = points.groupby(["backbone", "seed"])["step"].transform("max") == LONGER
    return points[went_on]


@styled
def figure(runs: pd.DataFrame) -> Plot:
    """Draw scores against multiply-adds, and paired differences to the dense runs."""
    points = score_points(runs)
    drawing, axes = canvas(5.2, 2, 2)
    rows: list[dict[str, Any]] = []
    labels = {"fd": "FD, 2,000 samples", "loss": "held-out loss"}
    for (score, label), (above, below) in zip(labels.items(), axes.T, strict=True):
        above.set(xlabel="training multiply-adds (1e12)", ylabel=label)
        below.set_ylabel(f"{label}: routed \u2212 dense")
        ticks, position = {}, 0.0
        for backbone, part in points.groupby("backbone"):
            dense = part[part["variant"] == "dense"].set_index("seed")
            routed = part[part["variant"] != "dense"]
            tint = colour(str(backbone))
            above.plot(
                dense["macs"] / 1e12, dense[score], color=tint, ls="", ms=5, marker="o",
                markerfacecolor="white", label=f"{backbone}, dense",
            )  # fmt: skip
            style = line("2-8") | {"color": tint, "linewidth": 0.9, "markersize": 3.5}
            for seed, run in routed.groupby("seed"):
                name = f"{backbone}, routed" if seed == 0 else None
                above.plot(run["macs"] / 1e12, run[score], label=name, **style)
            for steps, tick in ((STEPS, "equal\nsteps"), (LONGER, "equal\nMACs")):
                after = routed[routed["step"] == steps].set_index("seed")
                differences = after[score] - dense[score]
                mean = interval(differences)
                below.plot(
                    [position - 0.18] * mean.n, differences, ".", ms=4, alpha=0.6, color=tint
                )
                half = mean.mean - mean.low
                below.errorbar(position, mean.mean, half, fmt="s", ms=4, capsize=2.5, color=tint)
                rows.append({
                    "score": score, "backbone": backbone, "routed_steps": steps, "n": mean.n,
                    "difference": mean.mean, "low": mean.low, "high": mean.high,
                })  # fmt: skip
                ticks[position] = tick
                position += 1
            position += 0.5
        below.axhline(0, color="black", linewidth=0.7)
        below.set_xticks(list(ticks), list(ticks.values()))
    drawing.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncol=3)
    title = "FD and held-out loss against multiply-adds"
    return Plot("compute", title, CAPTION, drawing, pd.DataFrame(rows))


if __name__ == "__main__":
    if sys.argv[1:] == ["figure"]:
        print(*figure(read(ARCHIVE)).save(RESULTS / "figures"), sep="\n")
    else:
        main(table)
