"""Any score against any cost, by any key: `analysis.plot(scores, x="macs", y="heldout_loss")`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from analysis.comparison.aggregation import estimates
from analysis.errors import AnalysisError
from analysis.figures import style
from analysis.figures.style import Plot, styled
from routing.errors import suggest

_PALETTE = tuple(style.COLOURS.values())


@styled
def plot(
    frame: pd.DataFrame, x: str = "step", y: str = "fd", hue: str = "route",
    col: str | None = "backbone", baseline: str | None = None, bootstrap: int = 0,
) -> Plot:  # fmt: skip
    """Draw means over seeds with 95 % bands, a curve per value of `hue` and a panel per `col`.

    Args:
        frame: What `analysis.scores` or `analysis.curves` returned; rows may be filtered.
        x: Column of the horizontal axis: `step`, `macs` (training multiply-adds) or any number.
        y: Kind or full name of a score (`heldout_loss`, `FD-2K (mnist-classifier)`), or a column.
        hue: Column whose values have a curve each.
        col: Column whose values have a panel each; None is one panel.
        baseline: Value of `hue`; draws differences to it, paired by seed and step, instead of `y`.
        bootstrap: Resamples of the seeds for percentile bands; 0 takes Student's t-intervals.

    Returns:
        The figure, with the numbers drawn in `data`: columns `col`, `hue`, step, `x`, mean, low,
        high and n. Only steps that all seeds of a curve have are drawn.

    Raises:
        AnalysisError: For a column, score or baseline that the frame lacks, or a curve that would
            average runs of several groups.
    """
    points = _points(frame, x, y, hue, col)
    if baseline is not None:
        points = _differences(points, hue, col, baseline)
    data = _means(points, [col, hue] if col else [hue], x, bootstrap)
    panels = list(dict.fromkeys(data[col])) if col else [None]
    hues = list(dict.fromkeys(data[hue]))
    figure, axes = style.panels(len(panels), 3, 2.3, sharey=True)
    label = y if baseline is None else f"\u0394 {y}, to {baseline}"
    for ax, panel in zip(axes.flat, panels, strict=False):
        part = data if panel is None else data[data[col] == panel]
        _draw(ax, part, x, hue, hues)
        if panel is not None:
            ax.set_title(str(panel))
        if baseline is not None:
            ax.axhline(0, color=style.DENSE_COLOUR, linewidth=0.8)
        ax.set_xlabel({"step": "training steps", "macs": "training multiply-adds"}.get(x, x))
    for ax in axes[:, 0]:
        ax.set_ylabel(label)
    axes.flat[0].legend(frameon=False, title=hue)
    band = f"{bootstrap} bootstrap resamples of the seeds" if bootstrap else "Student's t-interval"
    caption = (
        f"Mean over seeds with its 95 % band ({band}); n = {data['n'].min()}-{data['n'].max()}."
    )
    return Plot("plot", f"{label} against {x} by {hue}", caption, figure, data)


def _points(frame: pd.DataFrame, x: str, y: str, hue: str, col: str | None) -> pd.DataFrame:
    """Return a row per curve, seed and step with the columns x and `value`."""
    if y in frame.columns:
        points = frame.assign(value=frame[y])
    else:
        points = _scores_of(frame, y)
    needed = ["seed", "step", x, hue, *([col] if col else [])]
    for column in needed:
        if column not in points:
            raise AnalysisError(
                f"the frame has no column {column!r}{suggest(column, map(str, points.columns))}"
            )
    points = points.dropna(subset=["value", *needed])
    if points.empty:
        raise AnalysisError(f"no row of the frame has {y}, {', '.join(needed)}")
    curve = [hue, *([col] if col else [])]
    if "group" in points:
        groups = points.groupby(curve)["group"].nunique()
        if groups.max() > 1:
            raise AnalysisError(
                f"the curve {groups.idxmax()} would average runs of {groups.max()} groups; choose "
                "runs first (analysis.load(..., data=...)), or give col='group'"
            )
    if "last_step" in points:
        points = points.sort_values("last_step", kind="stable")
    return points.drop_duplicates([*curve, "seed", "step"], keep="last")


def _scores_of(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the runs' own scores of one kind or full name."""
    if "metric" not in frame:
        raise AnalysisError(f"the frame has no column {name!r}; give what analysis.scores returned")
    own = frame[frame["own"].astype(bool)]
    scores = own[(own["metric"] == name) | (own["key"] == name)]
    metrics = list(scores["metric"].unique())
    if not metrics:
        known = [*own["key"].dropna().unique(), *own["metric"].dropna().unique()]
        raise AnalysisError(f"no run has the score {name!r}{suggest(name, known)}")
    if len(metrics) > 1:
        raise AnalysisError(f"{name} is several scores here; give one of {', '.join(metrics)}")
    return scores


def _differences(points: pd.DataFrame, hue: str, col: str | None, baseline: str) -> pd.DataFrame:
    """Return every curve minus the baseline's value of the same panel, seed and step."""
    is_baseline = points[hue].astype(str) == baseline
    if not is_baseline.any():
        names = list(map(str, points[hue].unique()))
        raise AnalysisError(
            f"no {hue} is {baseline!r}; there are {', '.join(names)}{suggest(baseline, names)}"
        )
    pair = ["seed", "step", *([col] if col else [])]
    reference = points.loc[is_baseline, [*pair, "value"]].rename(
        columns={"value": "baseline_value"}
    )
    pairs = points[~is_baseline].merge(reference, on=pair)
    if pairs.empty:
        raise AnalysisError(f"no run shares seed and step with one of {hue} {baseline!r}")
    return pairs.assign(value=pairs["value"] - pairs["baseline_value"])


def _means(points: pd.DataFrame, curve: list[str], x: str, bootstrap: int) -> pd.DataFrame:
    """Return x, mean, low, high and n of every curve at the steps that all its seeds have."""
    keys = [*curve, "step"]
    data = estimates(points, keys, "value").drop(columns="std")
    if x != "step":
        data = data.merge(points.groupby(keys)[x].mean().reset_index(), on=keys)
    if bootstrap:
        # The same resamples in every call: a figure that is drawn again is the same.
        rng = np.random.default_rng(0)
        groups = points.groupby(keys)["value"]
        for index, key in enumerate(data[keys].itertuples(index=False, name=None)):
            values = groups.get_group(key).to_numpy(float)
            if len(values) > 1:
                means = rng.choice(values, (bootstrap, len(values))).mean(axis=1)
                data.loc[index, ["low", "high"]] = np.quantile(means, [0.025, 0.975])
    return data[data["n"] == data.groupby(curve)["n"].transform("max")].reset_index(drop=True)


def _draw(ax: Axes, part: pd.DataFrame, x: str, hue: str, hues: Sequence[Any]) -> None:
    for value, curve in part.groupby(hue, sort=False):
        tint = _PALETTE[hues.index(value) % len(_PALETTE)]
        look = style.line("dense" if value == "none" else str(value)) | {"color": tint}
        curve = curve.sort_values(x)
        ax.plot(curve[x], curve["mean"], label=str(value), **look)
        ax.fill_between(curve[x], curve["low"], curve["high"], color=tint, alpha=0.15, linewidth=0)
    if x in ("step", "macs"):
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
