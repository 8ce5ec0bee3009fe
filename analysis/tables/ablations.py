"""Ablations of the route (TREAD, Fig. 8, Tables 5 and 6)."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from analysis.comparison.aggregation import DENSE
from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.tables import entries, paper
from analysis.tables.table import PAIRED, Column, Entry, RowValues, Table, Value, build, published

# A value of the axis, its name, its variant (None: not run).
AxisRows = list[tuple[object, str, Variant | None]]
_PAPER_RATES = (0.25, 0.5, 0.75)


def single_routes(group: Group) -> dict[str, dict[float, Variant]]:
    """Return the TREAD variants with one route and the usual options, by span and rate."""
    routes: dict[str, dict[float, Variant]] = {}
    for variant in group.tread:
        span = str(variant.first("span"))
        if "+" not in span:
            routes.setdefault(span, {})[float(variant.first("rate"))] = variant
    return routes


def half_rate_routes(group: Group) -> dict[str, Variant]:
    """Return the single routes at rate 0.5 by their span."""
    routes = single_routes(group)
    return {span: variants[0.5] for span, variants in routes.items() if 0.5 in variants}


def span_order(span: str) -> tuple[int, int]:
    """Return the sort key of a route `start-end`."""
    start, end = map(int, span.split("-"))
    # Order of Fig. 8: routes from block 0 by end, then the others by start, descending.
    return (0, end) if start == 0 else (1, -start)


def _placement(group: Group) -> AxisRows:
    variants = half_rate_routes(group)
    if len(variants) < 2:
        return []
    spans = dict.fromkeys(variants)
    if group.depth == 12 and paper.matches(group, "placement"):
        spans.update(dict.fromkeys(paper.table("placement")["route"]))
    rows: AxisRows = [(DENSE, DENSE, group.baseline)]
    for span in sorted(spans, key=span_order):
        rows.append((span, span, variants.get(span)))
    return rows


def _rate(group: Group) -> AxisRows:
    rows: AxisRows = []
    paper_rates = _PAPER_RATES if paper.matches(group, "rate") else ()
    for span, variants in single_routes(group).items():
        if len(variants) < 2:
            continue
        if not rows:
            rows.append((0.0, "0 (dense)", group.baseline))
        for value in sorted({*paper_rates, *variants}):
            rows.append((value, f"{value:g} on {span}", variants.get(value)))
    return rows


def _scaling(group: Group) -> AxisRows:
    variants, depth = half_rate_routes(group), group.depth
    relative, absolute = f"{round(depth / 6)}-{round(2 * depth / 3)}", f"2-{depth - 4}"
    if relative == absolute or relative not in variants:
        return []
    rows: AxisRows = [(None, DENSE, group.baseline)]
    for kind, span in (("relative", relative), ("absolute", absolute)):
        rows.append((kind, f"{kind}: {span} of {depth} blocks", variants.get(span)))
    return rows


def _several_routes(group: Group) -> AxisRows:
    first_version, several = [], []
    for variant in group.routed:
        if str(variant.first("method")).endswith("v1"):
            first_version.append(variant)
        if "+" in str(variant.first("span")):
            several.append(variant)
    if not (first_version or several):
        return []
    rows: AxisRows = [(DENSE, DENSE, group.baseline)]
    variants = [*half_rate_routes(group).values(), *first_version, *several]
    for name, variant in {variant.name: variant for variant in variants}.items():
        rows.append((str(variant.first("span")), name, variant))
    return rows


class Axis(NamedTuple):
    """A table of what varies along one axis, beside the paper's where they match."""

    title: str
    label: str
    source: str  # the paper's table
    key: str  # its column with the values of the axis
    dense_fid: float  # of the paper's dense run
    rows: Callable[[Group], AxisRows]


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
        "One and two routes (v1, Table 1, DiT-B)", "Routes", "routes_v1", "route", 43.47,
        _several_routes,
    ),
}  # fmt: skip


def _along_axis(results: Results, name: str) -> Table:
    """Build a table of one axis: a row per value, ours, the difference, the paper's."""
    axis = AXES[name]
    paper_rows = {}
    for row in paper.rows(axis.source):
        if row.get("model", "DiT-B") == "DiT-B":
            paper_rows[row[axis.key]] = row
    if axis.key == "route":
        paper_rows[DENSE] = paper_rows.pop("none", {"fid": axis.dense_fid})

    def paper_values(value: object) -> list[Value]:
        row = paper_rows.get(value, {"delta": None})
        delta = row["delta"] if "delta" in row else round(row["fid"] - axis.dense_fid, 2)
        mark = f"({row['mark']})" if isinstance(row.get("mark"), str) else ""
        change = "" if delta == 0 else published(delta, signed=True)
        return [published(row.get("fid"), mark), change]

    rows: list[RowValues] = []
    has_paper = False
    for group in results.groups:
        beside = paper.matches(group, axis.source)
        for value, text, variant in axis.rows(group):
            has_paper = has_paper or beside
            published_values = paper_values(value) if beside else [Entry(), Entry()]
            values = [text, *entries.scores(group, variant), *published_values]
            rows.append((entries.heading(group), values))
    has_paper = has_paper or not rows
    columns = (
        Column(axis.label, numeric=False),
        Column("Ours", better=entries.better_end(results)),
        Column("\u0394 to dense"),
        *entries.nn_ratio_columns(results, "NN-distance ratio"),
        *Column.each("Paper", "Paper \u0394", published=True, shown=has_paper),
    )
    notes = (PAIRED, *entries.nn_ratio_notes(results))
    notes = entries.paper_notes(axis.source, *notes, shown=has_paper)
    not_run = [(str(value), paper_values(value)) for value in paper_rows]
    return build(name, axis.title, columns, rows, notes, not_run)


route_placement = functools.partial(_along_axis, name="route_placement")
selection_rate = functools.partial(_along_axis, name="selection_rate")
relative_absolute = functools.partial(_along_axis, name="relative_absolute")
one_two_routes = functools.partial(_along_axis, name="one_two_routes")


def scan_order(results: Results) -> Table:
    """Which tokens stay, per backbone: scan order is kept by all but `unsorted`, the control."""
    columns = (
        Column("Selection", numeric=False),
        Column("Score", better=entries.better_end(results)),
        *Column.each("\u0394 to dense", "\u0394 to random"),
        *entries.nn_ratio_columns(results, "NN-distance ratio"),
        Column("Paper", numeric=False, published=True),
    )
    rows: list[RowValues] = []
    for group in results.groups:
        for route, variants in _selections(group).items():
            if len(variants) < 2:
                continue
            compared = (group.baseline, *variants.values())
            heading = entries.heading(group, *compared, tail=f", route {route}")
            for name in sorted(variants, key=_selection_order):
                variant = variants[name]
                score, change, *nn_ratio = entries.scores(group, variant)
                to_random = entries.difference(group.metric, variant, variants.get("random"))
                text = f"{name} (control)" if name == "unsorted" else name
                rows.append((heading, [text, score, change, to_random, *nn_ratio, None]))
    notes = (
        PAIRED,
        *entries.nn_ratio_notes(results),
        "The paper only says that backbones with a spatial bias need care; it publishes no "
        "comparison.",
    )
    return build("scan_order", "Which tokens stay, by architecture", columns, rows, notes)


def _selections(group: Group) -> dict[str, dict[str, Variant]]:
    """Return the TREAD variants that differ in their selection alone, by route and selection."""
    routes: dict[str, dict[str, Variant]] = {}
    for variant in group.routed:
        if variant.first("method") == "TREAD" and variant.is_usual("selection"):
            name = str(variant.first("config.routing.selection", "random"))
            routes.setdefault(str(variant.first("route")), {})[name] = variant
    return routes


def _selection_order(name: str) -> tuple[bool, bool, str]:
    return name != "random", name == "unsorted", name
