"""A route: its placement (TREAD, Fig. 8), rate (TREAD, Table 5) and cost of each block."""

from collections import Counter
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.patches import FancyBboxPatch

from analysis.comparison.aggregation import ENOUGH_SEEDS, number_range, paired
from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.figures import style
from analysis.figures.style import Options, Plot, styled
from analysis.runs.grouping import shared_label, short_labels
from analysis.runs.run_files import model_arguments
from analysis.tables import paper
from analysis.tables.ablations import half_rate_routes, single_routes, span_order
from analysis.tables.entries import gap, metric_decimals, metric_label
from backbones.cost import cost as count_cost

# A route of one panel: panel, backbone, metric, depth, sign, route, delta, low, high, n, score,
# step.
RouteRow = dict[str, Any]
_COLUMNS = 2


# --- placement ------------------------------------------------------------------------------------


def _placements(group: Group) -> list[RouteRow]:
    variants = half_rate_routes(group)
    panel: RouteRow = {"panel": group.label, "backbone": group.backbone, "metric": group.metric}
    panel |= {"depth": group.depth, "sign": 1 if group.better == "lower" else -1}
    rows = []
    for route, variant in variants.items():
        difference, score = gap(variant, group.baseline, group.metric), variant.estimate()
        if difference is None or score is None:
            continue
        row = {**panel, "route": route, "delta": difference.mean, "low": difference.low}
        row |= {"high": difference.high, "n": difference.n, "score": score.mean}
        rows.append({**row, "step": int(variant.step)})
    return sorted(rows, key=lambda row: span_order(row["route"]))


def _paper_placements() -> list[RouteRow]:
    panel: RouteRow = {"panel": "Paper: DiT-B/2, ImageNet-256", "backbone": "paper"}
    panel |= {"metric": "FID-5K", "depth": 12, "sign": 1, "step": 400_000}
    # The paper publishes neither seeds nor a spread.
    panel |= {"n": None, "low": None, "high": None}
    rows = []
    for row in paper.rows("placement"):
        rows.append({**panel, "route": row["route"], "delta": row["delta"], "score": row["fid"]})
    return rows


@styled
def placement(results: Results) -> Plot | None:
    """Draw every group with two or more routes, beside the paper's figure where it matches."""
    panels = []
    has_paper = False
    for group in results.groups:
        rows = _placements(group)
        if len(rows) > 1:
            panels.append(rows)
            has_paper = has_paper or paper.matches(group, "placement")
    if not panels:
        return None
    names = short_labels(panel[0]["panel"] for panel in panels)
    if has_paper:
        panels.append(_paper_placements())
    all_rows = []
    for panel in panels:
        all_rows += panel
    lines = _lines_by_depth(all_rows)
    # Bars are equally thick in all panels: each line of panels is as tall as its longest list.
    counts = [len(lines[panel[0]["depth"]]) for panel in panels]
    tallest = [max(counts[i : i + _COLUMNS]) for i in range(0, len(counts), _COLUMNS)]
    heights = [0.185 * count + 0.75 for count in tallest]
    mean_height = sum(heights) / len(heights)
    figure, axes = style.panels(len(panels), _COLUMNS, mean_height, height_ratios=heights)
    for index, (panel, ax) in enumerate(zip(panels, axes.flat, strict=False)):
        first = panel[0]
        # One scale of colours for all panels of a metric.
        deltas = [abs(row["delta"]) for row in all_rows if row["metric"] == first["metric"]]
        _draw_placements(ax, panel, lines[first["depth"]], max(*deltas, 1e-9))
        tint = "#333333" if first["backbone"] == "paper" else style.colour(first["backbone"])
        # Above the metric's name, which stands over the numbers.
        ax.set_title(names.get(first["panel"], first["panel"]), color=tint, pad=10)
        ax.set_ylim(tallest[index // _COLUMNS] - 0.4, -0.6)
    return Plot.of("route_placement", figure, all_rows, names=shared_label(names))


def _lines_by_depth(rows: list[RouteRow]) -> dict[int, dict[str, int]]:
    """Return the line of every route, by depth, so that panels are read across."""
    lines: dict[int, dict[str, int]] = {}
    for row in sorted(rows, key=lambda row: span_order(row["route"])):
        routes = lines.setdefault(row["depth"], {})
        routes.setdefault(row["route"], len(routes))
    return lines


def _draw_placements(ax: Axes, rows: list[RouteRow], lines: dict[str, int], largest: float) -> None:
    depth, metric = rows[0]["depth"], rows[0]["metric"]
    usual_step = Counter(row["step"] for row in rows).most_common(1)[0][0]
    norm, cmap = TwoSlopeNorm(0, -largest, largest), colormaps[style.SIGNED]
    by_route = {row["route"]: row for row in rows}
    for route, y in lines.items():
        if route not in by_route:
            _draw_bar(ax, route, y, facecolor="none", edgecolor="#BBBBBB", linestyle=":")
            continue
        row = by_route[route]
        shade = cmap(norm(row["delta"] * row["sign"]))
        _draw_bar(ax, route, y, facecolor=shade, edgecolor="#555555")
        text = _placement_text(row, usual_step)
        ax.text(depth - 0.2, y, text, ha="left", va="center", fontsize=7, color="#333333")
    seeds = [row["n"] for row in rows if row["n"] is not None]
    seeds_text = f", n={number_range(seeds)}" if seeds else ""
    ax.set(xlim=(-1.4, depth * 1.4), yticks=[])
    ax.set_xlabel(f"block (scores after {usual_step} steps{seeds_text})")
    ax.set_xticks(range(0, depth, 1 if depth <= 12 else 4))
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_bounds(-0.5, depth - 0.5)
    name = f"\u0394 {metric_label(metric).partition(' (')[0]}"
    ax.text(depth - 0.2, -0.75, name, fontsize=7, color="#666666", va="bottom")


def _placement_text(row: RouteRow, usual_step: int) -> str:
    """Return a difference with half of its interval, a mark for few seeds and unusual steps."""
    digits = metric_decimals(row["metric"])
    text = f"{row['delta']:+.{digits}f}"
    if row["high"] is not None:
        text += f" \u00b1 {(row['high'] - row['low']) / 2:.{digits}f}"
    if row["n"] is not None and row["n"] < ENOUGH_SEEDS:
        text += "\u2020"
    return text if row["step"] == usual_step else f"{text} (step {row['step']})"


def _draw_bar(ax: Axes, route: str, y: int, **look: Any) -> None:
    start, end = map(int, route.split("-"))
    shade = "#BBBBBB" if look["facecolor"] == "none" else style.ink(look["facecolor"])
    look |= {"boxstyle": "round,pad=0,rounding_size=0.18", "linewidth": 0.6, "zorder": 2}
    ax.add_patch(FancyBboxPatch((start - 0.4, y - 0.36), end - start + 0.8, 0.72, **look))
    style.centred(ax, (start + end) / 2, y, route, fontsize=7, color=shade, zorder=3)


# --- selection rate -------------------------------------------------------------------------------


@styled
def rate(results: Results) -> Plot | None:
    """Draw the paired difference to dense by rate, beside the paper's where it matches.

    None where no group has two rates on one span and dense runs of the same seeds and steps.
    """
    rows = []
    has_paper = False
    for group in results.groups:
        for span, variants in single_routes(group).items():
            if len(variants) > 1:
                rows += _rate_rows(group, span, variants)
                has_paper = has_paper or paper.matches(group, "rate")
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    names = short_labels(frame["panel"])
    metrics = list(dict.fromkeys(frame["metric"]))
    # The longest legend stands below the panels.
    legend = frame.drop_duplicates(["metric", "panel", "span"])["metric"].value_counts().max()
    figure, axes = style.canvas(2.3 + 0.13 * legend, 1, len(metrics) + has_paper)
    for ax, metric in zip(axes[0], metrics, strict=False):
        _draw_rates(ax, frame[frame["metric"] == metric], names)
        ax.set(title="Ours" if has_paper else "", ylabel=f"\u0394 {metric_label(metric)}")
    if has_paper:
        _draw_paper_rates(axes[0][-1])
    for ax in axes[0]:
        ax.axhline(0, color=style.DENSE_COLOUR, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
        ax.set(xlabel="share of tokens that skip")
        ax.set(xticks=[0, 0.25, 0.5, 0.75], xlim=(-0.06, max(0.75, frame["rate"].max()) + 0.06))
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return Plot.of("selection_rate", figure, frame, names=shared_label(names))


def _rate_rows(group: Group, span: str, variants: dict[float, Variant]) -> list[dict[str, Any]]:
    # A curve over rates is of one number of steps.
    step = Counter(variant.step for variant in variants.values()).most_common(1)[0][0]
    dense = group.baseline.by_seed(step=step) if group.baseline else {}
    rows = []
    for value in sorted(variants):
        difference = paired(dense, variants[value].by_seed(step=step))
        if difference is not None:
            row: RouteRow = {"panel": group.label, "backbone": group.backbone, "span": span}
            row |= {"metric": group.metric, "rate": value, "mean": difference.mean}
            row |= {"low": difference.low, "high": difference.high, "n": difference.n}
            rows.append({**row, "step": int(step)})
    return rows


def _draw_rates(ax: Axes, frame: pd.DataFrame, names: dict[str, str]) -> None:
    for (panel, span), part in frame.groupby(["panel", "span"], sort=False):
        steps, seeds = part["step"].iloc[0], number_range(part["n"])
        label = f"{fill(names[str(panel)], 40)}, {span}, step {steps} (n={seeds})"
        look = style.line(str(span)) | {"color": style.colour(str(part["backbone"].iloc[0]))}
        look |= {"capsize": 2, "label": label, "elinewidth": 0.8}
        # The interval of two seeds is too wide to be useful.
        half = ((part["high"] - part["low"]) / 2).astype(float)
        error = half.where(part["n"] >= ENOUGH_SEEDS, 0.0)
        ax.errorbar(part["rate"], part["mean"], yerr=error, **look)


def _draw_paper_rates(ax: Axes) -> None:
    table = paper.table("rate")
    dense_fid = float(table.set_index("rate")["fid"][0.0])
    routed = table[table["rate"] > 0]
    look: Options = {"color": style.PAPER_COLOUR, "marker": "s"}
    change = routed["fid"] - dense_fid
    ax.plot(routed["rate"], change, label="DiT-B/2, 2-8, step 400000", **look)
    ax.set(title="Paper, Table 5", ylabel="\u0394 FID-50K")


# --- cost per block -------------------------------------------------------------------------------


@styled
def cost(results: Results) -> Plot | None:
    """Draw every group with exported weights, whose metadata say what was built; else None."""
    panels: dict[tuple[Any, ...], pd.DataFrame] = {}
    for group in results.groups:
        panel = _cost_panel(group)
        if panel is not None:
            # Objectives and optimisers cost nothing per block: one panel per architecture does.
            key = tuple(panel.iloc[0][["backbone", "total_dense", "total_routed"]])
            panels.setdefault(key, panel)
    if not panels:
        return None
    figure, axes = style.panels(len(panels), 3, 1.9, sharey=True)
    for ax, panel in zip(axes.flat, panels.values(), strict=False):
        _draw_cost(ax, panel)
    # The panels share their axis: room for the legend above the tallest bar of all.
    tallest = max(panel["dense_macs"].max() for panel in panels.values())
    axes[0][0].set_ylim(top=tallest / 1e6 * 1.3)
    axes[0][0].set_ylabel("MACs per image (M)")
    return Plot.of("cost", figure, pd.concat(panels.values(), ignore_index=True))


def _cost_panel(group: Group) -> pd.DataFrame | None:
    """Return the multiply-adds of each block, dense and routed; None without weights of ours."""
    routed = group.guideline()
    if routed is None:
        return None
    arguments = next(filter(None, map(model_arguments, routed.runs["path"])), None)
    if arguments is None:
        return None
    route = str(routed.first("route"))
    try:
        dense_cost = count_cost(**arguments)
        routed_cost = count_cost(**arguments, route=route)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
        return None  # metadata of another project
    return pd.DataFrame({
        "panel": group.label, "backbone": group.backbone, "route": route,
        "block": range(len(dense_cost.per_block)), "dense_macs": dense_cost.per_block,
        "routed_macs": routed_cost.per_block, "tokens": routed_cost.tokens,
        "total_dense": dense_cost.macs_dense, "total_routed": routed_cost.macs_routed,
    })  # fmt: skip


def _draw_cost(ax: Axes, panel: pd.DataFrame) -> None:
    outline: Options = {"facecolor": "#f4f4f4", "edgecolor": "#888888", "linewidth": 0.8}
    first = panel.iloc[0]
    dense, routed = first["total_dense"], first["total_routed"]
    tint = style.colour(str(first["backbone"]))
    label = f"route {first['route']}"
    ax.bar(panel["block"], panel["dense_macs"] / 1e6, 0.8, label="dense", **outline)
    ax.bar(panel["block"], panel["routed_macs"] / 1e6, 0.8, label=label, color=tint)
    saved = f"\u2212{1 - routed / dense:.0%} MACs, {dense / routed:.2f}x"
    ax.set_title(f"{first['panel'].split(',')[0]}: {saved}", color=tint)
    ax.set_xlabel("block")
    ax.set_xticks(range(0, len(panel), 2 if len(panel) <= 12 else 4))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper right", ncols=2, handlelength=1.2, columnspacing=1)
