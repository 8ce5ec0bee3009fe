"""Any score against any cost, by any key: `analysis.plot(scores, x="macs", y="heldout_loss")`."""

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from analysis.comparison.aggregation import estimates, number_range
from analysis.errors import AnalysisError
from analysis.figures import style
from analysis.figures.style import Options, Plot, styled
from routing.errors import suggest

_PALETTE = (*style.COLOURS.values(), *style.FURTHER_COLOURS)
# Markers of the curves whose colour an earlier one has.
_REPEATED = "*hp<>"
# Inches of a character of a title and of a legend, of a line of text, and of a legend's key.
_TITLE_CHARACTER, _LEGEND_CHARACTER, _LINE, _KEY = 0.075, 0.06, 0.15, 0.6


@styled
def plot(
    frame: pd.DataFrame, x: str = "step", y: str = "fd", hue: str = "route",
    col: str | None = "backbone", baseline: str | None = None,
) -> Plot:  # fmt: skip
    """Draw means over seeds with 95 % bands, a curve per value of `hue` and a panel per `col`.

    Args:
        frame: What `analysis.scores` or `analysis.curves` returned; rows may be filtered.
        x: Column of the horizontal axis: `step`, `macs` (training multiply-adds) or any number.
        y: Kind or full name of a score (`heldout_loss`, `FD-2K (mnist-classifier)`), or a column.
        hue: Column whose values have a curve each.
        col: Column whose values have a panel each; None is one panel.
        baseline: Value of `hue`; draws differences to it, paired by seed and step, instead of `y`.

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
    data = _means(points, [col, hue] if col else [hue], x)
    panels = list(dict.fromkeys(data[col])) if col else [None]
    hues = list(dict.fromkeys(data[hue]))
    figure, axes = _canvas(list(map(str, panels)) if col else [""], list(map(str, hues)))
    label = y if baseline is None else f"\u0394 {y}, to {baseline}"
    for ax, panel in zip(axes.flat, panels, strict=False):
        part = data if panel is None else data[data[col] == panel]
        _draw(ax, part, x, hue, hues)
        if baseline is not None:
            ax.axhline(0, color=style.DENSE_COLOUR, linewidth=0.8)
        ax.set_xlabel({"step": "training steps", "macs": "training multiply-adds"}.get(x, x))
    for ax in axes[:, 0]:
        ax.set_ylabel(label)
    _add_legend(figure, hue)
    caption = (
        f"Mean over seeds with its 95 % band (Student's t-interval); n = {number_range(data['n'])}."
    )
    return Plot("plot", f"{label} against {x} by {hue}", caption, figure, data)


def _canvas(titles: Sequence[str], labels: Sequence[str]) -> tuple[Figure, Any]:
    """Return a figure with room for titles in several lines, and for a legend below the panels."""
    columns = min(len(titles), 3)
    width = style.SINGLE if columns == 1 else style.DOUBLE
    characters = int((width / columns - 0.3) / _TITLE_CHARACTER)
    texts = [fill(title, characters) for title in titles]
    title_lines = max(text.count("\n") for text in texts)
    legend_lines = 1 + -(-len(labels) // _legend_columns(width, labels))
    panel_lines = -(-len(titles) // columns)
    height = 2.2 + _LINE * (title_lines + legend_lines / panel_lines)
    figure, axes = style.panels(len(titles), 3, height, sharey=True)
    for ax, text in zip(axes.flat, texts, strict=False):
        ax.set_title(text)
    return figure, axes


def _legend_columns(width: float, labels: Sequence[str]) -> int:
    longest = max(map(len, labels))
    return max(1, min(len(labels), int(width / (_KEY + _LEGEND_CHARACTER * longest))))


def _add_legend(figure: Figure, title: str) -> None:
    """Explain the curves of all panels below them: a panel need not have every curve."""
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = _legend_columns(figure.get_figwidth(), list(handles))
    place: Options = {"loc": "outside lower center", "ncols": columns, "title": title}
    figure.legend(list(handles.values()), list(handles), **place)


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


def _means(points: pd.DataFrame, curve: list[str], x: str) -> pd.DataFrame:
    """Return x, mean, low, high and n of every curve at the steps that all its seeds have."""
    keys = [*curve, "step"]
    data = estimates(points, keys, "value").drop(columns="std")
    if x != "step":
        data = data.merge(points.groupby(keys)[x].mean().reset_index(), on=keys)
    return data[data["n"] == data.groupby(curve)["n"].transform("max")].reset_index(drop=True)


def _draw(ax: Axes, part: pd.DataFrame, x: str, hue: str, hues: Sequence[Any]) -> None:
    for value, curve in part.groupby(hue, sort=False):
        repeats, colour = divmod(hues.index(value), len(_PALETTE))
        tint = _PALETTE[colour]
        look = style.line("dense" if value == "none" else str(value)) | {"color": tint}
        if repeats:
            look["marker"] = _REPEATED[(repeats - 1) % len(_REPEATED)]
        curve = curve.sort_values(x)
        ax.plot(curve[x], curve["mean"], label=str(value), **look)
        ax.fill_between(curve[x], curve["low"], curve["high"], color=tint, alpha=0.15, linewidth=0)
    if x in ("step", "macs"):
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
