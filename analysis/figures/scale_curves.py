"""The effective guidance scale against the noise level: dense and routed, with their bands."""

from collections.abc import Sequence
from typing import Any, cast

import pandas as pd

from analysis.figures.style import Plot, colour, line, panels, styled
from analysis.runs.cells import Study
from analysis.tables.scale_table import FORMS, label, stored

_PASSES = {"dense": "dense pass", "routed": "routed pass"}


@styled
def draw(files: Sequence[dict[str, Any]]) -> Plot | None:
    """Draw a panel per backbone, data and form; None where no scale is defined.

    Args:
        files: What `analysis.guidance_scale` stored.
    """
    about = ("run", "backbone", "data", "route", "seed", "step")
    frame = pd.DataFrame(
        {"setting": label(found), **{key: found[key] for key in about}, **row}
        for found in files
        for row in found["rows"]
    ).reindex(columns=["setting", *about, "pair", "level", *_NUMBERS])
    curves = frame[frame["pair"].isin(_PASSES) & frame["level"].notna()]
    groups = [
        (key, form, part)
        for key, part in curves.groupby(["backbone", "data"], sort=False)
        for form in FORMS
        if part[form].notna().any()
    ]
    if not groups:
        return None
    figure, axes = panels(len(groups), 2, 2.4)
    for ax, (key, form, part) in zip(axes.flat, groups, strict=False):
        backbone, data = map(str, key)
        ax.axhline(1, color="#999999", linewidth=0.8, zorder=1)
        for setting, same in part.groupby(["setting", "route", "pair"], sort=False):
            levels = same.astype({name: float for name in _NUMBERS}).groupby("level")
            _, route, pair = map(str, cast(tuple[str, ...], setting))
            dense = route == "none"
            name = "dense net" if dense else f"route {route}, {_PASSES[pair]}"
            shade = "#555555" if dense else colour(backbone)
            look = line("dense" if dense else "2-8" if pair == "dense" else pair)
            mean, low, high = (levels[f"{form}{end}"] for end in ("", "_low", "_high"))
            ax.plot(mean.mean(), color=shade, label=name, **look)
            band = (mean.mean().index, low.min(), high.max())
            ax.fill_between(*band, color=shade, alpha=0.15, linewidth=0)
        places = sorted(part["level"].unique())
        ax.set_xscale("log")
        ax.set_xticks(places, [f"{place:.3g}" for place in places])
        ax.minorticks_off()
        ax.set(xlabel="noise level: sigma over the data's std", ylabel=f"w_eff, {form}")
        ax.set_title(f"{backbone}, {data}", color=colour(backbone))
        ax.legend(frameon=False)
    return Plot.of("guidance_scale", figure, frame)


_NUMBERS = [
    *(f"{form}{end}" for form in FORMS for end in ("", "_low", "_high")),
    *("loss_strong", "loss_weak", "square"),
]


def guidance_scale(study: Study) -> Plot | None:
    """Draw what was measured on a study's runs; None where nothing was."""
    return draw(stored(study))
