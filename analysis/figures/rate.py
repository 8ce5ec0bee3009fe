"""Score against the share of tokens that take the route (TREAD, Table 5)."""

from __future__ import annotations

from collections import Counter
from textwrap import fill
from typing import Any

import pandas as pd

from analysis.figures.style import PAPER_COLOUR, Plot, canvas, colour, line, styled
from analysis.runs.cells import Base, Cell, Study
from analysis.runs.grouping import short
from analysis.runs.statistics import mean_std
from analysis.tables import paper
from analysis.tables.ablations import plain_routes


def _rows(base: Base) -> list[dict[str, Any]]:
    spans: dict[str, dict[float, Cell]] = {}
    for cell in plain_routes(base):
        spans.setdefault(str(cell.first("span")), {})[float(cell.first("rate"))] = cell
    rows: list[dict[str, Any]] = []
    for span, cells in spans.items():
        if len(cells) < 2:
            continue
        known = {0.0: base.dense, **cells} if base.dense else cells
        # A curve over rates is of one number of steps.
        steps, _ = Counter(cell.steps for cell in cells.values()).most_common(1)[0]
        for rate in sorted(known):
            estimate = mean_std(list(known[rate].by_seed(base.score, steps).values()))
            if estimate is not None:
                shared = {"panel": base.label, "backbone": base.any.first("backbone"), "span": span}
                std = float("nan") if estimate.std is None else estimate.std
                spread = {"mean": estimate.mean, "std": std, "n": estimate.n, "step": int(steps)}
                rows.append({**shared, "metric": base.metric, "rate": rate, **spread})
    return rows


@styled
def rate(study: Study) -> Plot | None:
    """Draw every base with two or more rates on one span beside the paper's; None without one."""
    frame = pd.DataFrame([row for base in study.bases for row in _rows(base)])
    if frame.empty:
        return None
    names = short(frame["panel"])
    metrics = list(dict.fromkeys(frame["metric"]))
    figure, axes = canvas(3.2 * (len(metrics) + 1), 2.7, 1, len(metrics) + 1)
    for ax, metric in zip(axes[0], metrics, strict=False):
        for (panel, span), part in frame[frame["metric"] == metric].groupby(
            ["panel", "span"], sort=False
        ):
            tint = colour(str(part["backbone"].iloc[0]))
            style = line(str(span))
            label = f"{fill(names[str(panel)], 40)}, {span}, step {part['step'].iloc[0]}"
            ax.errorbar(
                part["rate"],
                part["mean"],
                yerr=part["std"].fillna(0.0),
                color=tint,
                capsize=2.5,
                label=label,
                **style,
            )
        ax.set(title="Ours", ylabel=metric)
        ax.legend()
    known = paper.table("rate")
    axes[0][-1].plot(
        known["rate"], known["fid"], color=PAPER_COLOUR, marker="s", label="DiT-B/2, 2-8"
    )
    axes[0][-1].set(title="Paper, Table 5", ylabel="FID-50K")
    axes[0][-1].legend()
    for ax in axes[0]:
        ax.set(
            xlabel="share of tokens that skip (0: dense)",
            xticks=[0, 0.25, 0.5, 0.75],
            xlim=(-0.06, 0.84),
        )
    caption = "Mean and standard deviation over seeds. A rate of 0 is the dense run."
    return Plot("selection_rate", "Selection rate", caption, figure, frame)
