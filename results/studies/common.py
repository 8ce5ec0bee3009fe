"""What several studies share: reading records, held-out losses of arms, scores, how tables print.

An arm is what was trained, apart from the seed. A study names the arm of each run in a column `arm`
and sorts its runs in the order of its tables; an arm is then (backbone, arm, learning rate).
"""

import functools
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

import pandas as pd

import analysis
from analysis.comparison.aggregation import Estimate, interval
from analysis.comparison.equal_macs import macs_per_step
from analysis.comparison.step_penalty import log_ratio_at_equal_macs, loss_curves, paired_penalty
from analysis.runs.archives import PUBLISHED, unpacked
from analysis.tables.table import markdown_rows
from experiments.runtime.command import ROOT, run_command

RESULTS = ROOT / "results"
STEPS = 3000  # dense steps whose held-out loss or multiply-adds arms are compared at
METRICS = {"FD": 1, "precision": 3, "recall": 3, "accuracy": 3}  # with their decimals
Arm = tuple[str, str, float]
Curves = dict[int, pd.DataFrame]  # by seed


@functools.lru_cache(maxsize=2)  # a page has several tables of one archive
def read(records: Path) -> pd.DataFrame:
    """Return the runs of an archive of records or of a folder."""
    return analysis.load(unpacked(records, ROOT / PUBLISHED))


def main(table: Callable[..., pd.DataFrame]) -> NoReturn:
    """Print a table of a study, `python -m results.studies.NAME TABLE [RUNS]`, and exit."""

    def command(words: list[str]) -> int:
        name, *records = (words or [""])[:2]
        frame = table(name, *map(Path, records))
        print(markdown_rows(list(frame), frame.to_numpy()), end="")
        return 0

    sys.exit(run_command(command, None))


# --- held-out losses ------------------------------------------------------------------------------


def loss_curves_by_arm(runs: pd.DataFrame) -> dict[Arm, Curves]:
    """Return the held-out losses of every arm by seed (columns: `step_penalty.loss_curves`).

    Records of one run at several lengths, of a run that was continued, are joined.
    """
    losses = loss_curves(runs)
    arms: dict[Arm, Curves] = {}
    keys = ["backbone", "arm", "config.train.lr", "seed"]
    for (backbone, arm, rate, seed), part in runs.groupby(keys, sort=False):
        curve = pd.concat([losses[run] for run in part["run"]])
        curve = curve.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)
        arms.setdefault((backbone, arm, rate), {})[int(seed)] = curve
    return arms


def dense_arms(arms: Collection[Arm]) -> dict[Arm, Arm]:
    """Return the dense arm of each routed one that has one: the same label and learning rate."""
    pairs = {}
    for backbone, label, rate in arms:
        dense = backbone, label.replace("route 2-8", "dense"), rate
        if label.startswith("route") and dense in arms:
            pairs[backbone, label, rate] = dense
    return pairs


def arms_table(arms: Mapping[Arm, Curves]) -> pd.DataFrame:
    """Return every arm's held-out loss at its end, with its multiply-adds and its gap."""
    rows = []
    for (backbone, arm, rate), curves in arms.items():
        ends = pd.DataFrame([curve.iloc[-1] for curve in curves.values()])
        rows.append({
            "Backbone": backbone, "Arm": arm, "Learning rate": f"{rate:g}",
            "Steps": f"{ends['step'].min():.0f}", "MACs": f"{ends['macs'].min() / 1e12:.2f}T",
            "Seeds": ", ".join(map(str, curves)),
            "Held-out loss": interval(ends["loss"]).half_width_text(".4f"), "Gap": gap_text(ends),
        })  # fmt: skip
    return pd.DataFrame(rows)


def gap_text(points: pd.DataFrame) -> str:
    """Return the mean of routed loss over dense loss, minus 1; nothing for a dense arm."""
    gap = (points["routed_loss"] / points["loss"] - 1).mean()
    return "" if math.isnan(gap) else f"{100 * gap:.2f} %"


def penalty_table(arms: Mapping[Arm, Curves]) -> pd.DataFrame:
    """Return step penalty s and relative cost s * m of routed arms at `STEPS` dense steps."""
    rows = []
    for routed, dense in dense_arms(arms).items():
        penalty = paired_penalty(arms[dense], arms[routed], STEPS)
        texts = penalty.seeds[["s", "sm"]].map("{:.2f}".format).replace("nan", "not reached")
        mean = penalty.censored_text
        if penalty.sm is not None:
            mean = f"{penalty.sm.text('.2f')} (n = {len(penalty.seeds)})"
        rows.append({
            "Backbone": routed[0], "Route": routed[1].removeprefix("route "),
            "Learning rate": f"{routed[2]:g}", "m": f"{penalty.seeds['m'].mean():.2f}",
            "s by seed": ", ".join(texts["s"]), "s*m by seed": ", ".join(texts["sm"]),
            "s*m (95 % interval)": mean,
        })  # fmt: skip
    return pd.DataFrame(rows)


def log_ratios(
    arms: Mapping[Arm, Curves], arm: Arm, baseline: Arm, dense: Arm, steps: int = STEPS
) -> dict[int, float]:
    """Return ln(arm's loss / baseline's loss) by seed at the MACs of `steps` steps of `dense`."""
    macs = macs_per_step(arms[dense]) * steps
    return log_ratio_at_equal_macs(arms[baseline], arms[arm], macs)


def seeds_table(changes: Iterable[tuple[Arm, str, dict[int, float]]]) -> pd.DataFrame:
    """Return changes of loss in per cent by seed, with their median.

    Args:
        changes: Arm, what it is compared with, and log ratios by seed.
    """
    rows = []
    for (backbone, arm, _), compared_with, ratios in changes:
        by_seed = {f"seed {seed}": _percent(ratio) for seed, ratio in ratios.items()}
        rows.append({
            "Backbone": backbone, "Arm": arm, "Compared with": compared_with, **by_seed,
            "median": _percent(statistics.median(ratios.values())),
        })  # fmt: skip
    return pd.DataFrame(rows)


def percent_change(log_ratio: Estimate) -> str:
    """Return a mean of log ratios as a change in per cent, with its interval."""
    mean, low, high = map(_percent, (log_ratio.mean, log_ratio.low, log_ratio.high))
    return f"{mean} % [{low}, {high}]"


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.2f}"


# --- scores on samples ----------------------------------------------------------------------------


def sample_scores(scores: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return scores in the features of the data set's classifier, a column for each metric.

    Args:
        scores: Rows of `analysis.scores`.
        keys: Columns that, with the seed, identify a row of the result; they are its index.
    """
    scores = scores[scores["metric"].str.endswith("-classifier)")]
    scores = scores.assign(metric=scores["metric"].str.split("-").str[0])
    scores = scores[scores["metric"].isin(list(METRICS))]
    return scores.pivot(index=[*keys, "seed"], columns="metric", values="value")[list(METRICS)]


def mean_changes(differences: pd.DataFrame) -> dict[str, str]:
    """Return the mean difference of each metric, with the half-width of its 95 % t-interval."""
    texts = {}
    for metric, decimals in METRICS.items():
        texts[metric] = interval(differences[metric]).half_width_text(f"+.{decimals}f")
    return texts


def scores_table(runs: pd.DataFrame, dense: str = "dense") -> pd.DataFrame:
    """Return each arm's mean scores after its last step; in brackets, the change from dense."""
    scores = analysis.scores(runs)
    samples = sample_scores(scores[scores["step"] == scores["last_step"]], ["backbone", "arm"])
    rows = []
    for backbone, arm in dict.fromkeys(zip(runs["backbone"], runs["arm"], strict=True)):
        values = samples.loc[backbone, arm]
        changes = mean_changes(values - samples.loc[backbone, dense])
        row = {"Backbone": backbone, "Arm": arm, "Seeds": ", ".join(map(str, values.index))}
        for metric, decimals in METRICS.items():
            row[metric] = f"{values[metric].mean():.{decimals}f}"
            if arm != dense:
                row[metric] += f" ({changes[metric]})"
        rows.append(row)
    return pd.DataFrame(rows)
