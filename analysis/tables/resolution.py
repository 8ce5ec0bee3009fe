"""Resolutions: dense against routed with their multiply-adds (TREAD, Table 4)."""

import contextlib
from collections.abc import Sequence

from analysis.comparison.groups import Group
from analysis.comparison.results import Results
from analysis.runs.run_files import model_arguments
from analysis.tables import entries, paper
from analysis.tables.table import PAIRED, Column, Entry, RowValues, Table, Value, build
from backbones.sizes import parse_size

_COLUMNS = (
    Column("Model", numeric=False),
    Column("Tokens", decimals=0),
    *Column.each("Dense", "+ TREAD", "\u0394"),
    *Column.each("Dense GMACs", "Routed GMACs", decimals=3),
)
_NN_RATIOS = ("NN-distance ratio, dense", "NN-distance ratio, + TREAD")
_MACS = "GMACs per image and forward pass, without attention matmuls as in the paper."
_HIGH_RES_TOKENS = 1024


def high_res(results: Results) -> Table:
    """High resolution: dense against routed with their MACs (Table 4, first row)."""
    groups = []
    for group in results.groups:
        if group.first("data") != "latents" or group.first("config.task") == "text":
            continue
        if (token_count(group) or 0) >= _HIGH_RES_TOKENS:
            groups.append(group)
    title = "High resolution (Table 4)"
    return _beside_paper(results, "high_res", title, "ImageNet-512", groups)


def text(results: Results) -> Table:
    """Text to image: dense against routed with their MACs (Table 4, second row)."""
    groups = [group for group in results.groups if group.first("config.task") == "text"]
    return _beside_paper(results, "text", "Text to image (Table 4)", "MS-COCO", groups)


def _beside_paper(
    results: Results, name: str, title: str, task: str, groups: Sequence[Group]
) -> Table:
    row = next(row for row in paper.rows("resolution") if row["task"] == task)
    costs = f"{row['dense_gmacs']} \u2192 {row['tread_gmacs']}"
    paper_values = [f"{row['task']}, DiT-B/2, FID-10K", row["dense"], row["tread"], costs]
    rows: list[RowValues] = []
    has_paper = not groups
    for group in groups:
        beside = paper.matches(group, "resolution", task)
        has_paper = has_paper or beside
        heading = entries.heading(group, *group.pair())
        published_values = paper_values if beside else [Entry() for _ in paper_values]
        rows.append((heading, [*_row(group), *published_values]))
    notes = (PAIRED, _MACS, *entries.nn_ratio_notes(results))
    notes = entries.paper_notes("resolution", *notes, shown=has_paper)
    columns = (
        *_COLUMNS,
        *entries.nn_ratio_columns(results, *_NN_RATIOS),
        Column("Paper", numeric=False, published=True, shown=has_paper),
        *Column.each("Paper dense", "Paper + TREAD", published=True, shown=has_paper),
        Column("Paper GMACs", numeric=False, published=True, shown=has_paper),
    )
    return build(name, title, columns, rows, notes, [("none run", paper_values)])


def tokens(results: Results) -> Table:
    """The same pictures cut into more tokens: does routing gain more?"""
    families: dict[tuple[str, ...], list[Group]] = {}
    for group in results.groups:
        details = [str(group.first(name)) for name in ("data", "objective", "scale")]
        families.setdefault((group.model.partition("/")[0], *details), []).append(group)
    rows: list[RowValues] = []
    for (model, data, *_), groups in families.items():
        if len({group.model for group in groups}) < 2:
            continue
        for group in sorted(groups, key=lambda group: -_patch(group)):
            variants = list(filter(None, group.pair())) or group.variants
            metric = entries.metric_label(group.metric)
            rows.append((f"{model}, {data}: {metric}{entries.after(variants)}", _row(group)))
    note = "Patch sizes share features, so their distances compare. The paper publishes none."
    notes = (PAIRED, _MACS, *entries.nn_ratio_notes(results), note)
    columns = (*_COLUMNS, *entries.nn_ratio_columns(results, *_NN_RATIOS))
    return build("tokens", "256 against 1024 tokens", columns, rows, notes)


def _patch(group: Group) -> int:
    return parse_size(str(group.first("size"))).patch


def token_count(group: Group) -> int | None:
    """Return a group's image tokens from its weights' metadata; None without weights."""
    for variant in group.variants:
        for path in variant.runs["path"]:
            model = model_arguments(path) or {}
            # The metadata may be of another project.
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                patch = parse_size(str(model["size"])).patch
                height, width = model["input_size"]
                return (int(height) // patch) * (int(width) // patch)
    return None


def _row(group: Group) -> list[Value]:
    dense, routed = group.pair()
    row: list[Value] = [group.label, token_count(group)]
    row += [entries.score(group.metric, dense), entries.score(group.metric, routed)]
    row.append(entries.difference(group.metric, routed, dense))
    dense_macs = group.variants[0].cost("macs_dense_no_attention")
    routed_macs = routed.cost("macs_routed_no_attention") if routed else None
    for macs in (dense_macs, routed_macs):
        row.append(macs / 1e9 if macs else None)
    return [*row, *entries.nn_ratios(group, dense, routed)]
