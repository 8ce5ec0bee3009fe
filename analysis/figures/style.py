"""One look for every figure: a colour per backbone, a line per route, and one way to save.

A figure has the width of one or two columns of a paper and no text below 7 points, so that it goes
into one as it is.

Colours are Okabe and Ito's (2008), distinct under all common colour blindness; a backbone has the
same one in every figure. Line styles and markers distinguish routes where colour says something
else.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis.tables.render import frame_csv
from experiments.runtime.files import atomic_write

STYLE = Path(__file__).with_name("paper.mplstyle")
# Title and caption of every figure.
_TEXTS = yaml.safe_load(Path(__file__).with_name("captions.yaml").read_text(encoding="utf-8"))
COLOURS = {
    "dit": "#0072B2",
    "mamba": "#D55E00",
    "rwkv": "#009E73",
    "lightningdit": "#CC79A7",
    "hybrid": "#56B4E9",
}
PAPER_COLOUR = "#6b6b6b"
DENSE_COLOUR = "#555555"
# Widths of one and of two columns of a paper, in inches: figures are drawn at the size of print.
SINGLE, DOUBLE = 3.3, 6.8
FURTHER_COLOURS = ("#882255", "#44AA99", "#332288", "#999933", "#AA4499", "#117733")
_LINE_STYLES = [(0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1))]
_MARKERS = ["^", "D", "v", "P", "X"]
# A signed quantity: blue is better than dense, red is worse (ColorBrewer's RdBu, safe for
# colour-blind readers).
SIGNED = "RdBu_r"
# Keyword arguments of matplotlib.
Options = dict[str, Any]
# Decorates a drawing function: it draws in the project's style, whatever style the caller or the
# user's matplotlibrc has.
styled = mpl_style.context(STYLE, after_reset=True)


def colour(backbone: str) -> str:
    """Return a backbone's colour; one that is not listed gets a fixed colour by its name."""
    number = sum(map(ord, backbone))
    return COLOURS.get(backbone, FURTHER_COLOURS[number % len(FURTHER_COLOURS)])


def line(variant: str) -> dict[str, Any]:
    """Return the line style of a variant: dense is dashed, the guideline's route is solid."""
    if variant == "dense":
        return {"linestyle": (0, (4, 2)), "marker": "o", "markerfacecolor": "white"}
    if variant.startswith("2-"):
        return {"linestyle": "-", "marker": "s"}
    number = sum(map(ord, variant))
    linestyle = _LINE_STYLES[number % len(_LINE_STYLES)]
    return {"linestyle": linestyle, "marker": _MARKERS[number % len(_MARKERS)]}


@dataclass(frozen=True, eq=False, repr=False)
class Plot:
    """A figure with the data behind it."""

    name: str  # of its files, without a suffix
    title: str  # what it shows
    caption: str  # how to read it
    figure: Figure
    data: pd.DataFrame  # the numbers that were drawn

    @classmethod
    def of(cls, name: str, figure: Figure, data: Any, **values: Any) -> Plot:
        """Return a figure with title and caption of `captions.yaml`, `values` filled in."""
        title, caption = _TEXTS[name]["title"], _TEXTS[name]["caption"].format(**values)
        return cls(name, title, caption, figure, pd.DataFrame(data))

    def save(self, folder: str | Path) -> list[Path]:
        """Write `<name>.pdf`, `<name>.png` (200 dpi) and `<name>.csv`; return the paths."""
        pdf = self._drawn(format="pdf", metadata={"CreationDate": None})
        contents: dict[str, bytes | str] = {
            "pdf": pdf,
            "png": self.png(dpi=200),
            "csv": frame_csv(self.data),
        }
        paths = []
        for suffix, content in contents.items():
            paths.append(Path(folder) / f"{self.name}.{suffix}")
            atomic_write(paths[-1], content)
        return paths

    def svg(self) -> str:
        """Return the figure as SVG text."""
        return self._drawn(format="svg", metadata={"Date": None}).decode()

    def png(self, dpi: int = 110) -> bytes:
        """Return the figure as PNG."""
        # Without matplotlib's version, which would change the file but no pixel.
        return self._drawn(format="png", dpi=dpi, metadata={"Software": None})

    @styled
    def _drawn(self, **options: Any) -> bytes:
        stream = io.BytesIO()
        self.figure.savefig(stream, **options)
        return stream.getvalue()

    def __repr__(self) -> str:
        return f"{self.title}: {self.caption}"

    def _repr_png_(self) -> bytes:
        return self.png()


def canvas(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Return a figure `height` inches tall and its axes (rows, columns), without pyplot's state.

    One axes in a line has the width of a page's column, more that of both.
    """
    figure = Figure(figsize=(SINGLE if columns == 1 else DOUBLE, height))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panels(count: int, most: int, height: float, **options: Any) -> tuple[Figure, Any]:
    """Return a figure of panels, at most `most` in a line of `height` inches, others hidden."""
    columns = min(count, most)
    lines = -(-count // columns)
    figure, axes = canvas(height * lines, lines, columns, **options)
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    return figure, axes


def fitting(items: Sequence[Any], most: int, rank: Callable[[Any], Any]) -> tuple[list[Any], str]:
    """Return the items that fit a page, the highest ranks in their order, and a note on the others.

    Args:
        items: What there is to draw.
        most: How many fit.
        rank: Sort key; the highest are drawn.
    """
    ranked = sorted(range(len(items)), key=lambda index: rank(items[index]), reverse=True)
    chosen = [items[index] for index in sorted(ranked[:most])]
    omitted = len(items) - len(chosen)
    note = f" {omitted} more with fewer scores do not fit the page." if omitted else ""
    return chosen, note


def quiet(axes: Axes) -> None:
    """Remove ticks, grid and frame."""
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(False)


def centred(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write a text whose centre is at a point."""
    axes.text(x, y, text, ha="center", va="center", **style)


def ink(rgba: Any) -> str:
    """Return black or white, whichever reads better on a colour."""
    red, green, blue = rgba[:3]
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "#1a1a1a"
