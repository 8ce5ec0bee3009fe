"""Ablations of the route (TREAD, Fig. 8, Tables 5 and 6)."""

from collections.abc import Callable
from typing import NamedTuple

from analysis.runs.cells import Base, Cell, Study, is_usual
from analysis.tables import paper
from analysis.tables import table as tables
from analysis.tables.table import PAIRED, Column, Table, Value, build, published

Rows = list[tuple[object, str, Cell | None]]  # a value of the axis, its name, its cell


def plain_routes(base: Base) -> dict[str, dict[float, Cell]]:
    """Return the base's TREAD cells with one route and the usual options, by span and rate."""
    found: dict[str, dict[float, Cell]] = {}
    for cell in base.plain:
        if "+" not in (span := str(cell.first("span"))):
            found.setdefault(span, {})[float(cell.first("rate"))] = cell
    return found


def half(base: Base) -> dict[str, Cell]:
    """Return the plain routes at rate 0.5 by their span."""
    return {span: cells[0.5] for span, cells in plain_routes(base).items() if 0.5 in cells}


def span_order(span: str) -> tuple[int, int]:
    """Return the sort key of a route `start-end`."""
    start, end = map(int, span.split("-"))
    # Fig. 8's order: routes from block 0 by their end, then the others by their start, last first.
    return (0, end) if start == 0 else (1, -start)


def _placement(base: Base) -> Rows:
    cells = half(base)
    theirs = paper.table("placement")["route"] if base.any.depth == 12 else ()
    ordered = sorted(dict.fromkeys([*theirs, *cells]), key=span_order) if len(cells) > 1 else []
    rows: Rows = [("dense", "dense", base.dense)] if ordered else []
    return rows + [(span, span, cells.get(span)) for span in ordered]


def _rate(base: Base) -> Rows:
    rows: Rows = []
    for span, cells in plain_routes(base).items():
        if len(cells) > 1:
            rows += [] if rows else [(0.0, "0 (dense)", base.dense)]
            values = sorted({0.25, 0.5, 0.75, *cells})
            rows += [(value, f"{value:g} on {span}", cells.get(value)) for value in values]
    return rows


def _scaling(base: Base) -> Rows:
    cells, depth = half(base), base.any.depth
    relative, absolute = f"{round(depth / 6)}-{round(2 * depth / 3)}", f"2-{depth - 4}"
    if relative == absolute or relative not in cells:
        return []
    kinds = {"relative": relative, "absolute": absolute}
    rows = [(k, f"{k}: {span} of {depth} blocks", cells.get(span)) for k, span in kinds.items()]
    return [(None, "dense", base.dense), *rows]


def _routes(base: Base) -> Rows:
    several = [cell for cell in base.routed if "+" in str(cell.first("span"))]
    v1 = [cell for cell in base.routed if str(cell.first("variant")).endswith("v1")]
    chosen = {cell.treatment: cell for cell in [*half(base).values(), *v1, *several]}
    rows = [(str(c.first("span")), name, c) for name, c in chosen.items() if several or v1]
    return [("dense", "dense", base.dense), *rows] if rows else []


class Axis(NamedTuple):
    """A table of what varies along one axis, beside the paper's."""

    title: str
    label: str
    source: str  # the paper's table
    key: str  # its column with the values of the axis
    dense: float  # its dense run's FID
    rows: Callable[[Base], Rows]


AXES = {
    # Where the route starts and ends, at rate 0.5.
    "route_placement": Axis(
        "Route placement (Fig. 8)", "Route", "placement", "route", 49.89, _placement
    ),
    # How many tokens take it.
    "selection_rate": Axis(
        "Selection rate (Table 5)", "Share that skips", "rate", "rate", 43.47, _rate
    ),
    "relative_absolute": Axis(
        "Relative against absolute placement (Table 6)", "Placement", "scaling", "kind", 19.47,
        _scaling,
    ),
    "one_two_routes": Axis(
        "One and two routes (v1, Table 1, DiT-B)", "Routes", "routes_v1", "route", 43.47, _routes
    ),
}  # fmt: skip


def along(study: Study, name: str) -> Table:
    """Build a table of one axis: a row per value, ours, the difference, the paper's."""
    axis = AXES[name]
    known = {
        row[axis.key]: row
        for row in paper.rows(axis.source)
        if row.get("model", "DiT-B") == "DiT-B"
    }
    if axis.key == "route":
        known["dense"] = known.pop("none", {"fid": axis.dense})

    def theirs(value: object) -> list[Value]:
        row = known.get(value, {"delta": None})
        delta = row["delta"] if "delta" in row else round(row["fid"] - axis.dense, 2)
        text = f"({row['mark']})" if isinstance(row.get("mark"), str) else ""
        return [
            published(row.get("fid"), text),
            "" if delta == 0 else published(delta, signed=True),
        ]

    columns = (
        Column(axis.label, numeric=False),
        Column("Ours", better=tables.better_end(study)),
        Column("\u0394 to dense"),
        *tables.memory_columns(study, "NN-distance ratio"),
        *Column.each("Paper", "Paper \u0394", published=True),
    )
    rows = [
        (tables.heading(base), [text, *tables.scores(base, cell), *theirs(value)])
        for base in study.bases
        for value, text, cell in axis.rows(base)
    ]
    notes = tables.paper_notes(axis.source, PAIRED, *tables.memory_notes(study))
    unrun = [(str(value), theirs(value)) for value in known]
    return build(name, axis.title, columns, rows, notes, unrun)


def scan_order(study: Study) -> Table:
    """Which tokens stay, per backbone: scan order is kept by all but `unsorted`, the control."""
    columns = (
        Column("Selection", numeric=False),
        Column("Score", better=tables.better_end(study)),
        *Column.each("\u0394 to dense", "\u0394 to random"),
        *tables.memory_columns(study, "NN-distance ratio"),
        Column("Paper", numeric=False, published=True),
    )
    rows: list[tuple[str, list[Value]]] = []
    for base in study.bases:
        spans: dict[str, dict[str, Cell]] = {}
        for cell in base.routed:
            if cell.first("variant") == "TREAD" and is_usual(cell, "selection"):
                name = str(cell.first("config.routing.selection", "random"))
                spans.setdefault(str(cell.first("route")), {})[name] = cell
        for span, cells in spans.items():
            head = tables.heading(base, base.dense, *cells.values(), tail=f", route {span}")
            order = sorted(cells, key=lambda name: (name != "random", name == "unsorted", name))
            for name in order if len(cells) > 1 else ():
                score, change, *memory = tables.scores(base, cells[name])
                changes = [change, tables.difference(base.metric, cells[name], cells.get("random"))]
                text = f"{name} (control)" if name == "unsorted" else name
                rows.append((head, [text, score, *changes, *memory, None]))
    notes = (
        PAIRED,
        *tables.memory_notes(study),
        "The paper only says that backbones with a spatial bias need care; it publishes no "
        "comparison.",
    )
    return build("scan_order", "Which tokens stay, by architecture", columns, rows, notes)
