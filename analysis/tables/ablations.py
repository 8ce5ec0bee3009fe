"""Ablations of the route (TREAD, Fig. 8, Tables 5 and 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from analysis.runs.cells import Base, Cell, Study, is_usual
from analysis.tables import paper
from analysis.tables.headings import PAIRED, better_end, difference, heading, score
from analysis.tables.memorisation import Memory
from analysis.tables.table import NOT_RUN, Column, Entry, Table, build, missing, published, words

Published = dict[object, dict[str, Any]]


def _table(
    study: Study,
    name: str,
    title: str,
    label: str,
    rows_of: Callable[[Base], list[tuple[object, str, Cell | None]]],
    known: Published,
    source: str,
) -> Table:
    """Build a table of one axis: a row per value, ours, the difference, the paper's."""
    memory = Memory.of(study)
    columns = (
        Column(label, numeric=False),
        Column("Ours", better=better_end(study)),
        Column("\u0394 to dense"),
        *memory.columns("Memorisation"),
        Column("Paper", published=True),
        Column("Paper \u0394", published=True),
    )
    rows: list[tuple[str, list[Entry]]] = []
    for base in study.bases:
        head = heading(base)
        for key, text, cell in rows_of(base):
            entries = [words(text), score(base, cell), _delta(base, cell)]
            entries += [*memory.entries(base, cell), *_published(known, key)]
            rows.append((head, entries))
    if not rows:
        for key in known:
            entries = [words(str(key)), missing(), missing(), *memory.blank()]
            entries += _published(known, key)
            rows.append((NOT_RUN, entries))
    attrs = paper.table(source).attrs
    notes = [
        PAIRED,
        *memory.notes,
        f"Paper: {paper.citation(source)}.",
        *([attrs["note"]] if attrs.get("note") else []),
    ]
    return build(name, title, columns, rows, notes)


def _delta(base: Base, cell: Cell | None) -> Entry:
    if cell is not None and cell is base.dense:
        return words("")
    return difference(base, cell, base.dense)


def _published(known: Published, key: object) -> list[Entry]:
    row = known.get(key)
    if row is None:
        return [published(None), published(None)]
    fid, delta = row.get("fid"), row.get("delta")
    mark = row.get("mark")
    text = f"({mark})" if isinstance(mark, str) else ""
    delta_entry = words("") if delta == 0 else published(delta, signed=True)  # type: ignore[arg-type]
    return [published(fid, text=text), delta_entry]  # type: ignore[arg-type]


def _index(frame: pd.DataFrame, key: str, baseline: float | None = None) -> Published:
    known: Published = {}
    for record in frame.to_dict("records"):
        row = {str(name): value for name, value in record.items()}
        if "delta" not in row and baseline is not None:
            row["delta"] = round(row["fid"] - baseline, 2)
        known[row[key]] = row
    return known


def plain_routes(base: Base, segments: int | None = 1) -> list[Cell]:
    """Return the base's TREAD cells with the usual options and the given number of routes."""
    cells = [cell for cell in base.routed if cell.first("variant") == "TREAD" and is_usual(cell)]
    if segments is None:
        return cells
    return [cell for cell in cells if str(cell.first("span")).count("+") == segments - 1]


def placement(study: Study) -> Table:
    """Where the route starts and ends, at rate 0.5 (TREAD, Fig. 8)."""
    frame = paper.table("placement")
    known = _index(frame, "route")
    known["dense"] = {"fid": frame.attrs["baseline"], "delta": 0.0}
    published_routes = list(frame["route"])

    def rows_of(base: Base) -> list[tuple[object, str, Cell | None]]:
        cells = {
            str(cell.first("span")): cell
            for cell in plain_routes(base)
            if cell.first("rate") == 0.5
        }
        if len(cells) < 2:
            return []
        spans = published_routes if base.any.depth == 12 else []
        spans = sorted(dict.fromkeys([*spans, *cells]), key=span_order)
        rows: list[tuple[object, str, Cell | None]] = [("dense", "dense", base.dense)]
        return [*rows, *((span, span, cells.get(span)) for span in spans)]

    return _table(
        study, "route_placement", "Route placement (Fig. 8)", "Route", rows_of, known, "placement"
    )


def span_order(span: str) -> tuple[int, int]:
    """Return the sort key of a route `start-end`."""
    start, end = map(int, span.split("-"))
    # Fig. 8's order: routes from block 0 by their end, then the others by their start, last first.
    return (0, end) if start == 0 else (1, -start)


def rate(study: Study) -> Table:
    """How many tokens take the route (TREAD, Table 5)."""
    known = _index(paper.table("rate"), "rate", baseline=43.47)

    def rows_of(base: Base) -> list[tuple[object, str, Cell | None]]:
        rows: list[tuple[object, str, Cell | None]] = []
        spans = dict.fromkeys(str(cell.first("span")) for cell in plain_routes(base))
        for span in spans:
            cells = {
                float(c.first("rate")): c for c in plain_routes(base) if c.first("span") == span
            }
            if len(cells) < 2:
                continue
            rows += [] if rows else [(0.0, "0 (dense)", base.dense)]
            values = sorted({0.25, 0.5, 0.75, *cells})
            rows += [(value, f"{value:g} on {span}", cells.get(value)) for value in values]
        return rows

    return _table(
        study,
        "selection_rate",
        "Selection rate (Table 5)",
        "Share that skips",
        rows_of,
        known,
        "rate",
    )


def scaling(study: Study) -> Table:
    """Relative against absolute placement in deep stacks (TREAD, Table 6)."""
    known = _index(paper.table("scaling"), "kind", baseline=19.47)

    def rows_of(base: Base) -> list[tuple[object, str, Cell | None]]:
        depth = base.any.depth
        spans = {
            "relative": f"{round(depth / 6)}-{round(2 * depth / 3)}",
            "absolute": f"2-{depth - 4}",
        }
        cells = {str(c.first("span")): c for c in plain_routes(base) if c.first("rate") == 0.5}
        if spans["relative"] == spans["absolute"] or not any(
            span in cells for span in spans.values()
        ):
            return []
        if spans["relative"] not in cells:
            return []
        return [(None, "dense", base.dense)] + [
            (kind, f"{kind}: {span} of {depth} blocks", cells.get(span))
            for kind, span in spans.items()
        ]

    title = "Relative against absolute placement (Table 6)"
    return _table(study, "relative_absolute", title, "Placement", rows_of, known, "scaling")


def routes(study: Study) -> Table:
    """One route against several in sequence (TREAD v1, Table 1)."""
    frame = paper.table("routes_v1")
    dit_b = frame[frame["model"] == "DiT-B"]
    known = _index(dit_b, "route", baseline=43.47)
    known["dense"] = known.pop("none")

    def rows_of(base: Base) -> list[tuple[object, str, Cell | None]]:
        several = [cell for cell in base.routed if "+" in str(cell.first("span"))]
        v1 = [cell for cell in base.routed if str(cell.first("variant")).endswith("v1")]
        if not several and not v1:
            return []
        single = [c for c in plain_routes(base) if c.first("rate") == 0.5]
        chosen = _unique([*single, *v1, *several])
        rows: list[tuple[object, str, Cell | None]] = [("dense", "dense", base.dense)]
        return rows + [(str(c.first("span")), c.treatment, c) for c in chosen]

    return _table(
        study,
        "one_two_routes",
        "One and two routes (v1, Table 1, DiT-B)",
        "Routes",
        rows_of,
        known,
        "routes_v1",
    )


def _unique(cells: Iterable[Cell]) -> list[Cell]:
    return list({cell.treatment: cell for cell in cells}.values())


def scan_order(study: Study) -> Table:
    """Which tokens stay, per backbone: scan order is kept by all but `unsorted`, the control."""
    memory = Memory.of(study)
    columns = (
        Column("Selection", numeric=False),
        Column("Score", better=better_end(study)),
        Column("\u0394 to dense"),
        Column("\u0394 to random"),
        *memory.columns("Memorisation"),
        Column("Paper", numeric=False, published=True),
    )
    rows: list[tuple[str, list[Entry]]] = []
    for base in study.bases:
        for span, cells in _by_selection(base).items():
            head = heading(base, base.dense, *cells.values(), tail=f", route {span}")
            random = cells.get("random")
            for name in sorted(
                cells, key=lambda name: (name != "random", name == "unsorted", name)
            ):
                cell = cells[name]
                against = words("") if name == "random" else difference(base, cell, random)
                entries = [score(base, cell), difference(base, cell, base.dense), against]
                entries += memory.entries(base, cell)
                text = f"{name} (control)" if name == "unsorted" else name
                rows.append((head, [words(text), *entries, words("not published")]))
    if not rows:
        blank = [missing(), missing(), missing(), *memory.blank()]
        rows = [("", [words("none run"), *blank, words("not published")])]
    notes = (
        PAIRED,
        *memory.notes,
        "The paper only says that backbones with a spatial bias need care; it publishes no "
        "comparison.",
    )
    return build("scan_order", "Which tokens stay, by architecture", columns, rows, notes)


def _by_selection(base: Base) -> dict[str, dict[str, Cell]]:
    found: dict[str, dict[str, Cell]] = {}
    for cell in base.routed:
        if cell.first("variant") == "TREAD" and is_usual(cell, "selection"):
            name = str(cell.first("config.routing.selection", "random"))
            found.setdefault(str(cell.first("route")), {})[name] = cell
    return {span: cells for span, cells in found.items() if len(cells) > 1}
