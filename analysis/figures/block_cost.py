"""What each block costs, dense and inside the route (multiply-adds per image)."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.style import Options, Plot, colour, panels, styled
from analysis.runs.cells import Base, Study
from analysis.runs.run_files import model_arguments
from backbones.cost import cost as count_cost


def _panel_data(base: Base) -> pd.DataFrame | None:
    routed = base.auto()
    paths = () if routed is None else routed.runs["path"]
    arguments = next((m for path in paths if (m := model_arguments(path))), None)
    if routed is None or arguments is None:
        return None
    dense = count_cost(**arguments)
    sparse = count_cost(**arguments, route=str(routed.first("route")))
    return pd.DataFrame(
        {
            "panel": base.label,
            "backbone": base.any.first("backbone"),
            "route": routed.first("route"),
            "block": range(len(dense.per_block)),
            "dense_macs": dense.per_block,
            "routed_macs": sparse.per_block,
            "tokens": sparse.tokens,
            "total_dense": dense.macs_dense,
            "total_routed": sparse.macs_routed,
        }
    )


@styled
def cost(study: Study) -> Plot | None:
    """Draw every base with exported weights, whose metadata say what was built; else None."""
    found: dict[tuple[Any, ...], pd.DataFrame] = {}
    for base in study.bases:
        if (data := _panel_data(base)) is not None:
            # Objectives and optimisers cost nothing per block: one panel per architecture does.
            found.setdefault((*data.iloc[0][["backbone", "total_dense", "total_routed"]],), data)
    if not found:
        return None
    figure, axes = panels(len(found), 3, 1.9, sharey=True)
    for ax, data in zip(axes.flat, found.values(), strict=False):
        _draw(ax, data)
    # The panels share their axis: room for the legend above the tallest bar of all.
    tallest = max(data["dense_macs"].max() for data in found.values())
    axes[0][0].set_ylim(top=tallest / 1e6 * 1.3)
    axes[0][0].set_ylabel("MACs per image (M)")
    return Plot.of("cost", figure, pd.concat(found.values(), ignore_index=True))


def _draw(ax: Axes, data: pd.DataFrame) -> None:
    tint = colour(str(data["backbone"].iloc[0]))
    outline: Options = {"facecolor": "#f4f4f4", "edgecolor": "#888888", "linewidth": 0.8}
    label = f"route {data['route'].iloc[0]}"
    ax.bar(data["block"], data["dense_macs"] / 1e6, 0.8, label="dense", **outline)
    ax.bar(data["block"], data["routed_macs"] / 1e6, 0.8, label=label, color=tint)
    total, routed = data["total_dense"].iloc[0], data["total_routed"].iloc[0]
    head = str(data["panel"].iloc[0]).split(",")[0]
    saved = f"\u2212{1 - routed / total:.0%} MACs, {total / routed:.2f}x"
    ax.set_title(f"{head}: {saved}", color=tint)
    ax.set_xlabel("block")
    ax.set_xticks(range(0, len(data), 2 if len(data) <= 12 else 4))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper right", ncols=2, handlelength=1.2, columnspacing=1)
