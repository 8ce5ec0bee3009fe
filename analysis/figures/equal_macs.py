"""Loss of every model at equal multiply-adds, relative to the dense model that costs most."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.comparison.aggregation import ENOUGH_SEEDS, interval
from analysis.comparison.equal_macs import loss_curves, macs_per_step
from analysis.comparison.results import Results
from analysis.comparison.step_penalty import loss_at
from analysis.figures import style
from analysis.figures.style import Plot, styled

_MOST_PANELS = 4
_POINTS = 24  # MACs at which curves are read
_COLUMNS = ["model", "dense", "n", "macs", "reference_steps", "change", "low", "high"]


@styled
def equal_macs(results: Results) -> Plot | None:
    """Draw a panel per setting; None without routed and dense runs of common seeds."""
    curves = loss_curves(results)
    parts = []
    for setting, part in curves.groupby("setting", sort=False):
        rows = _relative_losses(part)
        if len(rows) and not rows["dense"].all():
            parts.append((str(setting), rows))
    if not parts:
        return None
    shown, more = style.fitting(parts, _MOST_PANELS, lambda part: len(part[1]))
    figure, axes = style.panels(len(shown), 2, 2.9, sharey=False)
    for ax, (setting, rows) in zip(axes.flat, shown, strict=False):
        _draw(ax, setting, rows)
    data = pd.concat([rows.assign(setting=setting) for setting, rows in shown], ignore_index=True)
    return Plot.of("equal_macs", figure, data, more=more)


def _relative_losses(part: pd.DataFrame) -> pd.DataFrame:
    """Return the change of loss to the reference in per cent, by model and MACs."""
    models: dict[str, dict[int, pd.DataFrame]] = {}
    dense_models = set()
    for (model, dense, seed), curve in part.groupby(["model", "dense", "seed"], sort=False):
        if len(curve) > 1:
            models.setdefault(str(model), {})[int(str(seed))] = curve
            if dense:
                dense_models.add(str(model))
    rows = []
    reference = max(dense_models, key=lambda model: macs_per_step(models[model]), default=None)
    if reference is None:
        return pd.DataFrame(columns=_COLUMNS)
    # The reference first, then other dense models, the costliest first.
    order = sorted(
        models, key=lambda model: (model not in dense_models, -macs_per_step(models[model]))
    )
    base = models[reference]
    for model in order:
        by_seed = models[model]
        seeds = sorted(by_seed.keys() & base.keys())
        if not seeds:
            continue
        pairs = [(by_seed[seed], base[seed]) for seed in seeds]
        first = max(max(a["macs"].iloc[0], b["macs"].iloc[0]) for a, b in pairs)
        last = min(min(a["macs"].iloc[-1], b["macs"].iloc[-1]) for a, b in pairs)
        if last <= first:
            continue
        for macs in np.geomspace(first, last, _POINTS):
            ratios = [
                math.log(loss_at(a, "macs", macs) / loss_at(b, "macs", macs)) for a, b in pairs
            ]
            estimate = interval(ratios)
            assert estimate is not None
            ends = {"change": estimate.mean, "low": estimate.low, "high": estimate.high}
            change = {k: None if v is None else 100 * math.expm1(v) for k, v in ends.items()}
            steps = macs / macs_per_step(base)
            dense = model in dense_models
            rows.append({"model": model, "dense": dense, "n": len(seeds), "macs": macs,
                         "reference_steps": steps, **change})  # fmt: skip
    return pd.DataFrame(rows, columns=_COLUMNS)


def _draw(ax: Axes, setting: str, rows: pd.DataFrame) -> None:
    greys = ["#222222", "#777777", "#aaaaaa", "#cccccc"]
    colours = list(style.COLOURS.values())
    dense_count = routed_count = 0
    for model, part in rows.groupby("model", sort=False):
        if part["dense"].iloc[0]:
            tint, dash = greys[dense_count % len(greys)], "--"
            dense_count += 1
        else:
            tint, dash = colours[routed_count % len(colours)], "-"
            routed_count += 1
        n = int(part["n"].iloc[0])
        ax.plot(
            part["reference_steps"],
            part["change"],
            color=tint,
            linestyle=dash,
            label=f"{model} (n={n})",
        )
        if n >= ENOUGH_SEEDS:
            low, high = part["low"].astype(float), part["high"].astype(float)
            ax.fill_between(part["reference_steps"], low, high, color=tint, alpha=0.15, linewidth=0)
    ax.set_title(setting, fontsize=8)
    ax.set_xlabel("multiply-adds, in steps of the reference")
    ax.set_ylabel("loss change from the reference, %")
    ax.legend(frameon=False, fontsize=6.5)
