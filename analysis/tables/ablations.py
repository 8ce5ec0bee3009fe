"""Ablations of the route (TREAD, Fig. 8, Tables 5 and 6)."""

from collections.abc import Callable, Iterable
from typing import Any

from analysis.runs.cells import Base, Cell, Study, is_usual
from analysis.tables import paper
from analysis.tables import table as tables
from analysis.tables.table import MEMORY, PAIRED, Column, Table, Value, build, published

Axis = list[tuple[object, str, Cell | None]]
Published = dict[object, dict[str, Any]]


def _table(
    study: Study, name: str, title: str, label: str, rows_of: Callable[[Base], Axis],
    known: Published, source: str,
) -> Table:  # fmt: skip
    """Build a table of one axis: a row per value, ours, the difference, the paper's."""
    columns = (
        Column(label, numeric=False),
        Column("Ours", better=tables.better_end(study)),
        Column("\u0394 to dense"),
        MEMORY,
        *Column.each("Paper", "Paper \u0394", published=True),
    )
    rows = [
        (tables.heading(base), [text, *tables.scores(base, cell), *_published(known, key)])
        for base in study.bases
        for key, text, cell in rows_of(base)
    ]
    notes = tables.paper_notes(source, PAIRED, *tables.memory_notes(study))
    unrun = [(str(key), _published(known, key)) for key in known]
    return build(name, title, columns, rows, notes, unrun)


def _published(known: Published, key: object) -> list[Value]:
    row = known.get(key, {})
    mark, delta = row.get("mark"), row.get("delta")
    text = f"({mark})" if isinstance(mark, str) else ""
    change = "" if delta == 0 else published(delta, signed=True)
    return [published(row.get("fid"), text=text), change]


def _index(rows: Iterable[dict[str, Any]], key: str, baseline: float) -> Published:
    """Return a table of the paper by the values of its axis, with differences to its dense run."""
    return {row[key]: {"delta": round(row["fid"] - baseline, 2), **row} for row in rows}


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


def placement(study: Study) -> Table:
    """Where the route starts and ends, at rate 0.5 (TREAD, Fig. 8)."""
    frame = paper.table("placement")
    baseline = frame.attrs["baseline"]
    known = _index(paper.rows("placement"), "route", baseline)
    known["dense"] = {"fid": baseline, "delta": 0.0}

    def rows_of(base: Base) -> Axis:
        cells = half(base)
        if len(cells) < 2:
            return []
        spans = [*(frame["route"] if base.any.depth == 12 else ()), *cells]
        ordered = sorted(dict.fromkeys(spans), key=span_order)
        found = [(span, span, cells.get(span)) for span in ordered]
        return [("dense", "dense", base.dense), *found]

    title = "Route placement (Fig. 8)"
    return _table(study, "route_placement", title, "Route", rows_of, known, "placement")


def span_order(span: str) -> tuple[int, int]:
    """Return the sort key of a route `start-end`."""
    start, end = map(int, span.split("-"))
    # Fig. 8's order: routes from block 0 by their end, then the others by their start, last first.
    return (0, end) if start == 0 else (1, -start)


def rate(study: Study) -> Table:
    """How many tokens take the route (TREAD, Table 5)."""
    known = _index(paper.rows("rate"), "rate", 43.47)

    def rows_of(base: Base) -> Axis:
        rows: Axis = []
        for span, cells in plain_routes(base).items():
            if len(cells) > 1:
                rows += [] if rows else [(0.0, "0 (dense)", base.dense)]
                values = sorted({0.25, 0.5, 0.75, *cells})
                rows += [(value, f"{value:g} on {span}", cells.get(value)) for value in values]
        return rows

    title = "Selection rate (Table 5)"
    return _table(study, "selection_rate", title, "Share that skips", rows_of, known, "rate")


def scaling(study: Study) -> Table:
    """Relative against absolute placement in deep stacks (TREAD, Table 6)."""
    known = _index(paper.rows("scaling"), "kind", 19.47)

    def rows_of(base: Base) -> Axis:
        depth = base.any.depth
        relative, absolute = f"{round(depth / 6)}-{round(2 * depth / 3)}", f"2-{depth - 4}"
        cells = half(base)
        if relative == absolute or relative not in cells:
            return []
        return [(None, "dense", base.dense)] + [
            (kind, f"{kind}: {span} of {depth} blocks", cells.get(span))
            for kind, span in (("relative", relative), ("absolute", absolute))
        ]

    title = "Relative against absolute placement (Table 6)"
    return _table(study, "relative_absolute", title, "Placement", rows_of, known, "scaling")


def routes(study: Study) -> Table:
    """One route against several in sequence (TREAD v1, Table 1)."""
    rows = [row for row in paper.rows("routes_v1") if row["model"] == "DiT-B"]
    known = _index(rows, "route", 43.47)
    known["dense"] = known.pop("none")

    def rows_of(base: Base) -> Axis:
        several = [cell for cell in base.routed if "+" in str(cell.first("span"))]
        v1 = [cell for cell in base.routed if str(cell.first("variant")).endswith("v1")]
        if not several and not v1:
            return []
        chosen = {cell.treatment: cell for cell in [*half(base).values(), *v1, *several]}
        found = [(str(c.first("span")), name, c) for name, c in chosen.items()]
        return [("dense", "dense", base.dense), *found]

    title = "One and two routes (v1, Table 1, DiT-B)"
    return _table(study, "one_two_routes", title, "Routes", rows_of, known, "routes_v1")


def scan_order(study: Study) -> Table:
    """Which tokens stay, per backbone: scan order is kept by all but `unsorted`, the control."""
    columns = (
        Column("Selection", numeric=False),
        Column("Score", better=tables.better_end(study)),
        *Column.each("\u0394 to dense", "\u0394 to random"),
        MEMORY,
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
                change = [change, tables.difference(base.metric, cells[name], cells.get("random"))]
                text = f"{name} (control)" if name == "unsorted" else name
                rows.append((head, [text, score, *change, *memory, None]))
    notes = (
        PAIRED,
        *tables.memory_notes(study),
        "The paper only says that backbones with a spatial bias need care; it publishes no "
        "comparison.",
    )
    return build("scan_order", "Which tokens stay, by architecture", columns, rows, notes)
