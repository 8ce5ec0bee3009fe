"""Scores of a study's arms on samples after their last step, and their differences from dense."""

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis.comparison.aggregation import DENSE, interval
from analysis.comparison.arms import Arm, baseline_arm, rows_with_arms
from analysis.comparison.pair_penalty import LOSS
from analysis.errors import AnalysisError
from analysis.runs.loading import Runs, runs_of, scores

# Printed columns and their decimals; all in the features of the data set's own classifier.
METRICS = {"FD": 1, "precision": 3, "recall": 3, "accuracy": 3}
NETWORK = "-classifier)"
# How samples were made, and how many; scores of different samples are not compared.
PROTOCOL = ["guidance", "sampler", "weights", "sample_seed", "n"]


def final_scores(source: Runs) -> dict[Arm, pd.DataFrame]:
    """Return a frame for each arm: a row for each seed that is scored, a column for each metric.

    Args:
        source: What `analysis.load` returned, or a folder of run folders.

    A run's scores use one protocol: its own or, if it scored no samples itself, that of the
    evaluations that most runs share (ties: the same one for all runs). Of two
    runs of one arm and seed the one that was trained longer counts, as in `arms`.
    """
    runs = runs_of(source).sort_values("step", kind="stable")
    table = scores(runs)
    table = table[table["metric"].str.endswith(NETWORK) & (table["step"] == table["last_step"])]
    protocols = table.groupby(PROTOCOL, sort=False, dropna=False)
    table = table.assign(runs=protocols["path"].transform("nunique"), protocol=protocols.ngroup())
    order = ["own", "runs", "protocol"]
    preferred = table.sort_values(order, ascending=[False, False, True]).drop_duplicates("path")
    table = table.merge(preferred[["path", "protocol"]])
    table = table.assign(short=table["metric"].str.split("-").str[0])
    table = table[["run", "short", "value"]]
    values: dict[Arm, dict[int, dict[str, float]]] = {}
    for row, arm in rows_with_arms(runs, set(table["run"])):
        own = table[table["run"] == row["run"]].set_index("short")["value"].to_dict()
        values.setdefault(arm, {})[int(row["seed"])] = own
    frames = {}
    for arm in sorted(values):
        frame = pd.DataFrame.from_dict(values[arm], orient="index").sort_index()
        frames[arm] = frame.reindex(columns=list(METRICS))
    return frames


def scores_after(table: pd.DataFrame, steps: int, keys: Sequence[str]) -> pd.DataFrame:
    """Return the scores of every run on samples after `steps` steps, a column for each metric.

    Args:
        table: What `analysis.scores` returned.
        steps: Training steps; a run that goes on counts with its scores at this step.
        keys: Columns of the table, or `routed`, that distinguish the rows of one seed.

    Columns are the keys, `seed`, the metrics, `macs`, the training multiply-adds, and `loss`, the
    held-out loss of the dense pass (NaN for a run without one).

    Raises:
        AnalysisError: Several runs of the same keys and seed, or scores of one group with several
            versions of the classifier or against several references.
    """
    frame = table[table["step"] == steps].copy()
    frame["routed"] = ~frame["variant"].str.startswith(DENSE)  # a fine-tune is dense
    frame["short"] = frame["metric"].str.split("-").str[0]
    losses = frame[frame["key"] == LOSS].drop_duplicates("path").set_index("path")["value"]
    frame = frame[frame["metric"].str.endswith(NETWORK) & frame["short"].isin(list(METRICS))]
    frame = frame.assign(loss=frame["path"].map(losses).astype(float))
    for column in ("features", "reference"):
        versions = frame.groupby("group")[column].unique().map(lambda found: found.dropna())
        for group, found in versions.items():
            if len(found) > 1:
                text = f"{group}: scores with {column} {' and '.join(found)}; expected one version"
                raise AnalysisError(text)
    keys = [*keys, "seed"]
    repeated = frame[frame.duplicated([*keys, "short"])]
    if len(repeated):
        first = ", ".join(f"{key} {value}" for key, value in repeated[keys].iloc[0].items())
        raise AnalysisError(f"several scores of {first}; expected one run of each, scored once")
    metrics = frame.pivot(index=keys, columns="short", values="value")
    metrics = metrics.reindex(columns=list(METRICS))
    costs = frame.groupby(keys, dropna=False)[["macs", "loss"]].first()
    return metrics.join(costs).reset_index()


def scores_table(frames: Mapping[Arm, pd.DataFrame]) -> list[list[str]]:
    """Return mean scores of each arm, and in brackets the paired difference from dense.

    The difference is the mean over seeds that both arms have, with the half-width of its 95 %
    t-interval.
    """
    rows = [["Backbone", "Arm", "Seeds", *METRICS]]
    for arm, frame in frames.items():
        baseline = baseline_arm(arm, frames)
        texts = []
        for metric, decimals in METRICS.items():
            text = mean_text(frame[metric], decimals)
            if baseline is not None and baseline != arm:
                difference = interval(frame[metric] - frames[baseline][metric])
                if difference is not None and difference.low is not None:
                    text += f" ({difference.half_width_text(f'+.{decimals}f')})"
            texts.append(text)
        seeds = ", ".join(map(str, frame.index))
        rows.append([arm.backbone, arm.label, seeds, *texts])
    return rows


def mean_text(values: pd.Series, decimals: int) -> str:
    """Return the mean of a metric, or nothing where no run has it."""
    return f"{values.mean():.{decimals}f}" if values.notna().any() else ""
