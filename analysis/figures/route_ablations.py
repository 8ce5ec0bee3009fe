"""A route: its place (TREAD, Fig. 8), its rate (TREAD, Table 5), what it saves of each block."""

from collections import Counter
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.patches import FancyBboxPatch

from analysis.figures import style
from analysis.figures.style import Options, Plot, styled
from analysis.runs.cells import Base, Cell, Study
from analysis.runs.grouping import shared, short
from analysis.runs.run_files import model_arguments
from analysis.runs.seed_statistics import ENOUGH_SEEDS, extent, paired
from analysis.tables import paper
from analysis.tables.ablations import half, plain_routes, span_order
from analysis.tables.table import gap, metric_decimals, metric_label
from backbones.cost import cost as count_cost


def _placements(base: Base) -> list[dict[str, Any]]:
    about: dict[str, Any] = {"panel": base.label, "backbone": base.backbone}
    protocol = {"metric": base.metric, "depth": base.any.depth}
    protocol["sign"] = 1 if base.better == "lower" else -1
    cells, rows = half(base), []
    best = _best_route(base, cells)
    for route, cell in cells.items():
        found, own = gap(cell, base.dense, base.score), cell.estimate(base.score)
        if found is not None and own is not None:
            delta = {"delta": found.mean, "low": found.low, "high": found.high, "n": found.n}
            score = {"score": own.mean, "step": int(cell.steps), "best": route == best}
            rows.append({**about, "route": route, **delta, **score, **protocol})
    return sorted(rows, key=lambda row: span_order(row["route"]))


def _best_route(base: Base, cells: dict[str, Cell]) -> str | None:
    """Return the route that is significantly better than every other one; None if none is.

    Its paired 95 % interval to each other route, over three seeds or more, leaves out zero. The
    mean of one seed or of overlapping routes makes none of them the best.
    """
    sign = 1 if base.better == "lower" else -1
    for route, cell in cells.items():
        differences = [
            gap(cell, other, base.score) for name, other in cells.items() if name != route
        ]
        if differences and all(
            difference is not None
            and difference.n >= ENOUGH_SEEDS
            and difference.low is not None
            and difference.high is not None
            and max(sign * difference.low, sign * difference.high) < 0
            for difference in differences
        ):
            return route
    return None


@styled
def placement(study: Study) -> Plot | None:
    """Draw every base with two or more routes beside the paper's figure; else None."""
    found = [rows for base in study.bases if len(rows := _placements(base)) > 1]
    if not found:
        return None
    theirs: dict[str, Any] = {"panel": "Paper: DiT-B/2, ImageNet-256", "backbone": "paper"}
    theirs |= {"step": 400_000, "metric": "FID-5K", "depth": 12, "sign": 1}
    # The paper publishes neither seeds nor a spread, so that no route of it is marked.
    theirs |= dict.fromkeys(("n", "low", "high")) | {"best": False}
    known = paper.table("placement").rename(columns={"fid": "score"})
    every = known[["route", "delta", "score"]].itertuples(index=False)
    found.append([{**theirs, "route": r, "delta": d, "score": score} for r, d, score in every])
    columns, rows = 2, [row for panel in found for row in panel]
    # The line of every route, by depth, so that panels are read across.
    places: dict[int, dict[str, int]] = {}
    for row in sorted(rows, key=lambda row: span_order(row["route"])):
        line = places.setdefault(row["depth"], {})
        line.setdefault(row["route"], len(line))
    # Bars are equally thick in all panels: each line of panels is as tall as its longest list.
    counts = [len(places[panel[0]["depth"]]) for panel in found]
    tallest = [max(counts[i : i + columns]) for i in range(0, len(counts), columns)]
    heights = [0.185 * count + 0.75 for count in tallest]
    mean = sum(heights) / len(heights)
    figure, axes = style.panels(len(found), columns, mean, height_ratios=heights)
    names = short(panel[0]["panel"] for panel in found[:-1])
    for index, (panel, ax) in enumerate(zip(found, axes.flat, strict=False)):
        about = panel[0]
        # One scale of colours for all panels of a metric.
        largest = max(abs(row["delta"]) for row in rows if row["metric"] == about["metric"])
        _panel(ax, panel, places[about["depth"]], max(largest, 1e-9))
        tint = "#333333" if about["backbone"] == "paper" else style.colour(about["backbone"])
        # Above the metric's name, which stands over the numbers.
        ax.set_title(names.get(about["panel"], about["panel"]), color=tint, pad=10)
        ax.set_ylim(tallest[index // columns] - 0.4, -0.6)
    return Plot.of("route_placement", figure, rows, names=shared(names))


def _panel(ax: Axes, rows: list[dict[str, Any]], places: dict[str, int], largest: float) -> None:
    depth, metric = rows[0]["depth"], rows[0]["metric"]
    usual = Counter(row["step"] for row in rows).most_common(1)[0][0]
    norm, cmap = TwoSlopeNorm(0, -largest, largest), colormaps[style.SIGNED]
    by_route = {row["route"]: row for row in rows}
    for route, y in places.items():
        if (row := by_route.get(route)) is None:
            _bar(ax, route, y, facecolor="none", edgecolor="#BBBBBB", linestyle=":")
            continue
        _bar(ax, route, y, facecolor=cmap(norm(row["delta"] * row["sign"])), edgecolor="#555555")
        ends = None if row["high"] is None else (row["high"] - row["low"]) / 2
        text = f"{row['delta']:+.{metric_decimals(metric)}f}"
        text += "" if ends is None else f" \u00b1 {ends:.{metric_decimals(metric)}f}"
        text += "\u2020" if row["n"] is not None and row["n"] < ENOUGH_SEEDS else ""
        text += "" if row["step"] == usual else f" (step {row['step']})"
        ax.text(depth - 0.2, y, text, ha="left", va="center", fontsize=7, color="#333333")
    for row in rows:
        if row["best"]:
            style.centred(ax, -0.9, places[row["route"]], "\u2605", fontsize=9, color="#E69F00")
    known = [row["n"] for row in rows if row["n"] is not None]
    n = f", n={extent(known)}" if known else ""
    ax.set(xlim=(-1.4, depth * 1.4), yticks=[], xlabel=f"block (scores after {usual} steps{n})")
    ax.set_xticks(range(0, depth, 1 if depth <= 12 else 4))
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_bounds(-0.5, depth - 0.5)
    name = f"\u0394 {metric_label(metric).partition(' (')[0]}"
    ax.text(depth - 0.2, -0.75, name, fontsize=7, color="#666666", va="bottom")


def _bar(ax: Axes, route: str, y: int, **look: Any) -> None:
    start, end = map(int, route.split("-"))
    shade = "#BBBBBB" if look["facecolor"] == "none" else style.ink(look["facecolor"])
    look |= {"boxstyle": "round,pad=0,rounding_size=0.18", "linewidth": 0.6, "zorder": 2}
    ax.add_patch(FancyBboxPatch((start - 0.4, y - 0.36), end - start + 0.8, 0.72, **look))
    style.centred(ax, (start + end) / 2, y, route, fontsize=7, color=shade, zorder=3)


@styled
def rate(study: Study) -> Plot | None:
    """Draw the paired difference to dense by rate beside the paper's, of two or more rates.

    None where no base has two rates on one span and dense runs of the same seeds and steps.
    """
    rows = []
    for base in study.bases:
        for span, cells in plain_routes(base).items():
            # A curve over rates is of one number of steps.
            steps, _ = Counter(cell.steps for cell in cells.values()).most_common(1)[0]
            dense = base.dense.by_seed(base.score, steps) if base.dense else {}
            differences = {
                rate: paired(dense, cells[rate].by_seed(base.score, steps))
                for rate in (sorted(cells) if len(cells) > 1 else ())
            }
            about: dict[str, Any] = {"panel": base.label, "backbone": base.backbone, "span": span}
            for rate, difference in differences.items():
                if difference is not None:
                    about |= {"metric": base.metric, "rate": rate, "mean": difference.mean}
                    ends = {"low": difference.low, "high": difference.high}
                    rows.append({**about, **ends, "n": difference.n, "step": int(steps)})
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    names = short(frame["panel"])
    metrics = list(dict.fromkeys(frame["metric"]))
    # The longest legend stands below the panels.
    entries = frame.drop_duplicates(["metric", "panel", "span"])["metric"].value_counts().max()
    figure, axes = style.canvas(2.3 + 0.13 * entries, 1, len(metrics) + 1)
    for ax, metric in zip(axes[0], metrics, strict=False):
        mine = frame[frame["metric"] == metric]
        for (panel, span), part in mine.groupby(["panel", "span"], sort=False):
            steps = part["step"].iloc[0]
            label = f"{fill(names[str(panel)], 40)}, {span}, step {steps} (n={extent(part['n'])})"
            look = style.line(str(span)) | {"color": style.colour(str(part["backbone"].iloc[0]))}
            look |= {"capsize": 2, "label": label, "elinewidth": 0.8}
            # Of two seeds an interval would say nothing.
            half = ((part["high"] - part["low"]) / 2).astype(float)
            ax.errorbar(
                part["rate"], part["mean"], yerr=half.where(part["n"] >= ENOUGH_SEEDS, 0.0), **look
            )
        ax.set(title="Ours", ylabel=f"\u0394 {metric_label(metric)}")
    theirs, look = paper.table("rate"), {"color": style.PAPER_COLOUR, "marker": "s"}
    reference = float(theirs.set_index("rate")["fid"][0.0])
    routed = theirs[theirs["rate"] > 0]
    change = routed["fid"] - reference
    axes[0][-1].plot(routed["rate"], change, label="DiT-B/2, 2-8, step 400000", **look)
    axes[0][-1].set(title="Paper, Table 5", ylabel="\u0394 FID-50K")
    for ax in axes[0]:
        ax.axhline(0, color=style.DENSE_COLOUR, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
        ax.set(xlabel="share of tokens that skip")
        ax.set(xticks=[0, 0.25, 0.5, 0.75], xlim=(-0.06, max(0.75, frame["rate"].max()) + 0.06))
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return Plot.of("selection_rate", figure, frame, names=shared(names))


@styled
def cost(study: Study) -> Plot | None:
    """Draw every base with exported weights, whose metadata say what was built; else None."""
    found: dict[tuple[Any, ...], pd.DataFrame] = {}
    for base in study.bases:
        routed = base.auto()
        paths = () if routed is None else routed.runs["path"]
        arguments = next((m for path in paths if (m := model_arguments(path))), None)
        if routed is None or arguments is None:
            continue
        try:
            dense = count_cost(**arguments)
            sparse = count_cost(**arguments, route=str(routed.first("route")))
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
            continue  # somebody else's metadata: no model of ours
        about = {
            "panel": base.label,
            **{name: routed.first(name) for name in ("backbone", "route")},
        }
        blocks = {"block": range(len(dense.per_block)), "dense_macs": dense.per_block}
        blocks |= {"routed_macs": sparse.per_block, "tokens": sparse.tokens}
        totals = {"total_dense": dense.macs_dense, "total_routed": sparse.macs_routed}
        # Objectives and optimisers cost nothing per block: one panel per architecture does.
        panel = pd.DataFrame({**about, **blocks, **totals})
        found.setdefault((about["backbone"], *totals.values()), panel)
    if not found:
        return None
    figure, axes = style.panels(len(found), 3, 1.9, sharey=True)
    outline: Options = {"facecolor": "#f4f4f4", "edgecolor": "#888888", "linewidth": 0.8}
    for ax, data in zip(axes.flat, found.values(), strict=False):
        panel, backbone, route = data.iloc[0][["panel", "backbone", "route"]]
        total, routed_total = data.iloc[0][["total_dense", "total_routed"]]
        tint = style.colour(str(backbone))
        ax.bar(data["block"], data["dense_macs"] / 1e6, 0.8, label="dense", **outline)
        ax.bar(data["block"], data["routed_macs"] / 1e6, 0.8, label=f"route {route}", color=tint)
        saved = f"\u2212{1 - routed_total / total:.0%} MACs, {total / routed_total:.2f}x"
        ax.set_title(f"{panel.split(',')[0]}: {saved}", color=tint)
        ax.set_xlabel("block")
        ax.set_xticks(range(0, len(data), 2 if len(data) <= 12 else 4))
        ax.grid(axis="x", visible=False)
        ax.legend(loc="upper right", ncols=2, handlelength=1.2, columnspacing=1)
    # The panels share their axis: room for the legend above the tallest bar of all.
    tallest = max(data["dense_macs"].max() for data in found.values())
    axes[0][0].set_ylim(top=tallest / 1e6 * 1.3)
    axes[0][0].set_ylabel("MACs per image (M)")
    return Plot.of("cost", figure, pd.concat(found.values(), ignore_index=True))
