"""Draw the pictures of the documentation: python docs/pictures.py (`make docs` calls it)."""

from __future__ import annotations

import io
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import matplotlib  # noqa: E402
import torch  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyBboxPatch, PathPatch  # noqa: E402
from matplotlib.path import Path as Curve  # noqa: E402

from analysis.figures import scan_paths, selections  # noqa: E402
from analysis.figures.style import colour  # noqa: E402
from experiments.runtime.files import atomic_write  # noqa: E402
from routing.rng import Draws  # noqa: E402
from routing.route import Route, keep_count  # noqa: E402
from routing.routed_pass import Selection  # noqa: E402

IMAGES = Path(__file__).resolve().parent / "img"

DEPTH, TOKENS, ROUTE = 12, 8, "2-8"
KEPT, ROUTED, BLOCK, EDGE, INK = colour("dit"), colour("mamba"), "#e9edf2", "#7d8896", "#24292f"
LANE, GAP = 0.36, 1.15  # between two tokens; between two blocks where tokens leave or come back


def tread() -> dict[str, bytes]:
    """Draw what TREAD does to tokens, in training and at inference; return SVG and PNG.

    A line is a token, a box is a block as high as the tokens that it sees. The picture has its own
    background, so that it looks the same on a dark page.
    """
    route = Route.parse(ROUTE).resolve(DEPTH)
    inside = route.sparse_blocks
    keep = keep_count(TOKENS, route.segments[0].rate)
    ids = Selection().ids(Draws(2, 0, torch.tensor([0])), 0, (1, TOKENS), keep)[0].tolist()
    figure = Figure(figsize=(8, 5.2), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-0.75, 16.15), ylim=(-7.55, 3.5))
    ax.axis("off")
    skip = f"half of the tokens skip blocks {inside[0]} to {inside[-1]}, unchanged"
    dense = "every token sees every block"
    for y, head, text, tint in ((3.0, "Training", skip, ROUTED), (-3.1, "Inference", dense, KEPT)):
        ax.text(-0.4, y, head, fontsize=19, weight="bold", va="center", color=INK)
        ax.text(3.0, y, text, fontsize=15.5, va="center", color=tint)
    lanes(ax, 0.0, ids, inside)
    lanes(ax, -5.3, list(range(TOKENS)), ())
    files = {}
    for kind, dpi in (("svg", 100), ("png", 200)):
        stream = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "tread-suite"}):  # the same bytes each time
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(stream, format=kind, dpi=dpi, metadata=metadata)
        files[f"tread.{kind}"] = stream.getvalue()
    return files


def lanes(ax: Axes, middle: float, kept: list[int], inside: tuple[int, ...]) -> None:
    """Draw blocks and the path of every token through them, centred at height `middle`."""
    gone = [token for token in range(TOKENS) if token not in kept]
    place, x = [], 0.9
    for block in range(DEPTH):
        x += GAP if inside and block in (inside[0], inside[-1] + 1) else 0
        place.append(x)
        x += 1.0 if inside else (DEPTH - 1 + 2 * GAP) / (DEPTH - 1)
    end = place[-1] + 1.1
    home = {token: middle + LANE * ((TOKENS - 1) / 2 - token) for token in range(TOKENS)}
    # Inside the route the kept tokens move together, in their order; the others pass above.
    low = {token: home[len(gone) + i] for i, token in enumerate(kept)}
    high = {token: home[i] + 1.6 * LANE for i, token in enumerate(gone)}
    ax.text(
        0,
        min(home.values()) - LANE * 0.75 - 0.3,
        "block",
        fontsize=12.5,
        ha="center",
        va="center",
        color=INK,
    )
    for block, at in enumerate(place):
        heights = [low[token] for token in kept] if block in inside else list(home.values())
        bottom, top = min(heights) - LANE * 0.75, max(heights) + LANE * 0.75
        ax.add_patch(
            FancyBboxPatch(
                (at - 0.26, bottom), 0.52, top - bottom, boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=BLOCK, edgecolor=EDGE, linewidth=1.2, zorder=2,
            )
        )  # fmt: skip
        ax.text(at, bottom - 0.3, str(block), fontsize=12.5, ha="center", va="center", color=INK)
    for token, y in home.items():
        tint = ROUTED if token in gone else KEPT
        way = [(0.0, y)]
        if inside:
            there = high[token] if token in gone else low[token]
            first, last = place[inside[0]], place[inside[-1]]
            way += [(first - GAP - 0.7, y), (first - 0.4, there), (last + 0.4, there)]
            way += [(last + GAP + 0.7, y)]
        way.append((end, y))
        codes, points = [Curve.MOVETO], [way[0]]
        for (x0, y0), (x1, y1) in zip(way, way[1:], strict=False):
            half = (x0 + x1) / 2
            points += [(half, y0), (half, y1), (x1, y1)]
            codes += [Curve.CURVE4] * 3
        line = PathPatch(Curve(points, codes), facecolor="none", edgecolor=tint, linewidth=2.2)
        line.set(zorder=3, alpha=0.95, capstyle="round")
        ax.add_patch(line)
        ax.plot((0, end), (y, y), "s", markersize=9.5, color=tint, zorder=4)


def pictures() -> dict[str, tuple[bytes, str]]:
    """Return the content of every picture below `docs/img` by its name, and what it shows."""
    # The same bytes on every machine: ignore the user's matplotlibrc.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        drawn = {
            f"{name}.png": (plot.png(dpi=110), plot.caption)
            for name, plot in (("scans", scan_paths()), ("selections", selections()))
        }
        what = "what TREAD does in training and at inference"
        return drawn | {name: (content, what) for name, content in tread().items()}


def main() -> None:
    """Write every picture below `docs/img`."""
    IMAGES.mkdir(exist_ok=True)
    for name, (content, what) in pictures().items():
        atomic_write(IMAGES / name, content)
        print(f"docs/img/{name}  {what}")


if __name__ == "__main__":
    main()
