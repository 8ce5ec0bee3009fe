"""All architectures: the main table, the state of the art, every score, resolutions.

TREAD's main table, Table 1 and Table 4 (high resolution, text to image, 256 against 1024 tokens).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.run_files import model_arguments
from analysis.runs.statistics import Estimate, paired
from analysis.tables import paper
from analysis.tables.score_entries import (
    PAIRED,
    Memory,
    after,
    difference,
    gap,
    heading,
    metric_decimals,
    paper_main,
    paper_notes,
    score,
    steps,
)
from analysis.tables.table import (
    NOT_RUN,
    Column,
    Entry,
    Table,
    build,
    exact,
    head,
    missing,
    not_run,
    ours,
    published,
    words,
)
from backbones.sizes import parse_size

_MEMORY = ("Memorisation, dense", "Memorisation, + TREAD")
# What a score never stands without, in this order: the kinds of scores, see `eval_options.METRICS`.
_SET = (
    "fd", "precision", "recall", "accuracy", "adherence", "memorisation", "heldout_loss",
    "heldout_loss_routed", "w_eff", "w_eff_plain",
)  # fmt: skip


def score_set(study: Study, base: Base) -> dict[str, dict[str, Any]]:
    """Return the metrics that a base's scores are read together with, its own first.

    Those of the feature space of its own metric stand before those of others; memorisation, which
    says the same in each, in one alone.
    """
    known, memory = study.runs.attrs.get("metrics", {}), Memory.of(study).names.get(base.key)
    own = known[base.metric]
    ranks: dict[str, tuple[bool, int, bool]] = {}
    for name, about in known.items():
        kind = "memorisation" if name == memory else str(about.get("key"))
        here = any(cell.by_seed(f"score.{name}") for cell in base.cells)
        same_n = about.get("features") is None or about.get("n") == own.get("n")
        if name == base.metric:
            ranks[name] = (False, 0, False)
        elif here and same_n and kind in _SET and (kind != "memorisation" or name == memory):
            foreign = about.get("features") != own.get("features")
            ranks[name] = (True, _SET.index(kind), foreign)
    return {name: known[name] for name in sorted(ranks, key=ranks.__getitem__)}


def main(study: Study) -> Table:
    """Dense, routed, and their difference per backbone, a row per metric (main table)."""
    # Where no run is ours, the paper's numbers have the columns to themselves.
    columns = (
        Column("Metric", numeric=False),
        *Column.each("Dense", "+ TREAD", "\u0394", published=not study.bases),
    )
    rows: list[tuple[str, list[Entry]]] = []
    for base in study.bases:
        dense, routed = base.pair()
        params = base.any.first("params")
        size = f"{params / 1e6:.2f}M parameters, " if params else ""
        what = f"{size}{f'route {routed.treatment}' if routed else 'no route was run'}"
        group = heading(base, dense, routed, what=what)
        for name, about in score_set(study, base).items():
            column, digits = f"score.{name}", metric_decimals(name)
            pair = [
                ours(cell.estimate(column) if cell else None, digits) for cell in (dense, routed)
            ]
            change = ours(gap(routed, dense, column), digits, signed=True)
            rows.append(
                (group, [words(head(Column(name, better=about.get("better")))), *pair, change])
            )
        if row := paper_main(base):
            rows.append((group, _paper_entries(row)))
    rows = rows or [(NOT_RUN, _paper_entries(row)) for row in paper.rows("main")]
    title = "Main table: dense against routed, by backbone"
    notes = paper_notes("main", PAIRED, *Memory.of(study).notes)
    return build("main", title, columns, rows, notes)


def _by_kind(study: Study, base: Base) -> dict[Any, str]:
    """Return the metric of each kind, in the data's own feature space, which stands first."""
    return {about.get("key"): name for name, about in reversed(score_set(study, base).items())}


_SUMMARY = ("fd", "precision", "recall", "accuracy", "heldout_loss", "w_eff")


def summary(study: Study) -> Table:
    """The main table in a row per backbone: `dense -> routed (paired difference)` of each score."""
    ends = {
        about.get("key"): about.get("better")
        for about in study.runs.attrs.get("metrics", {}).values()
    }
    columns = [Column("Backbone", numeric=False), Column("Seeds"), Column("MACs per step")]
    columns += [Column("FD" if kind == "fd" else kind, better=ends.get(kind)) for kind in _SUMMARY]
    rows: list[tuple[str, list[Entry]]] = []
    for base in study.bases:
        dense, routed = base.pair()
        if dense and routed:
            # What backbones share heads their rows.
            names = _by_kind(study, base)
            whole, part = routed.first("macs_dense"), routed.first("macs_routed")
            cost = exact(part / whole if whole and part else None, unit="x")
            group = f"{base.label.partition(', ')[2]}: route {routed.treatment}, {base.metric}"
            n = getattr(gap(routed, dense, base.score), "n", 0)
            changes = [_change(dense, routed, str(names.get(kind)), n) for kind in _SUMMARY]
            rows.append((group + after([routed]), [words(base.model), exact(n, 0), cost, *changes]))
    rows = sorted(rows, key=lambda row: row[0]) or [not_run(columns)]
    note = (
        "Dense \u2192 routed (difference, paired by seed, \u00b1 half of Student's 95 % interval)."
    )
    return build("summary", "Dense against routed, a row per backbone", columns, rows, (note,))


def _change(dense: Cell, routed: Cell, metric: str, usual: int) -> Entry:
    """Return `dense -> routed (difference +- half its interval)`, with n where it is unusual."""
    digits, column = metric_decimals(metric), f"score.{metric}"
    first, second = (cell.by_seed(column, routed.steps) for cell in (dense, routed))
    known, both = paired(first, second), first.keys() & second.keys()
    if known is None:
        return missing()
    means = (sum(scores[seed] for seed in both) / known.n for scores in (first, second))
    text = " \u2192 ".join(f"{mean:.{digits}f}" for mean in means)
    if known.low is not None:
        text += f" ({known.mean:+.{digits}f} \u00b1 {known.mean - known.low:.{digits}f})"
    return words(text + ("" if known.n == usual else f", n={known.n}"))


def _pair(base: Base) -> list[Entry]:
    """Return the scores of the dense runs and of the guideline's, and their difference."""
    dense, routed = base.pair()
    return [score(base, dense), score(base, routed), difference(base, routed, dense)]


def _paper_entries(row: dict[str, Any]) -> list[Entry]:
    """Return the paper's row: its model, its scores and their difference."""
    mark = row.get("mark")
    name = f"Paper, FID-50K: {row['model']}, {int(row['iterations']) // 1000}K steps"
    if isinstance(mark, str):
        name += f" ({mark})"
    numbers = [published(row[key]) for key in ("dense", "tread")]
    return [words(name), *numbers, published(-float(row["delta"]), signed=True)]


# Columns of Table 1: the paper's key, the better end, our kind of score and its digits.
_SOTA = {
    "FID": ("fid", "lower", "fd", 2),
    "sFID": ("sfid", "lower", "sfid", 2),
    "IS": ("is", "higher", "is", 2),
    "Precision": ("precision", "higher", "precision", 3),
    "Recall": ("recall", "higher", "recall", 3),
}


def sota(study: Study) -> Table:
    """The state-of-the-art table, with our runs below in their own groups (Table 1)."""
    rows = []
    for row in paper.rows("sota"):
        group = "Paper, guided" if row["guided"] else "Paper, unguided"
        numbers = [published(row[key]) for key, *_ in _SOTA.values()]
        rows.append((group, [words(row["method"]), words(f"{row['epochs']} epochs"), *numbers]))
    for base in study.bases:
        names = _by_kind(study, base)
        names["fd"] = base.metric
        shown = [cell for cell in base.pair() if cell is not None]
        for cell in shown:
            entries = [words(f"{base.model}, {cell.treatment}"), words(f"{cell.steps:.0f} steps")]
            for _, _, kind, digits in _SOTA.values():
                estimate = cell.estimate(f"score.{names[kind]}") if kind in names else None
                entries.append(ours(estimate, digits))
            rows.append((f"Ours: {heading(base, *shown)}", entries))
    # The numbers of other people's rows share the columns: only ours make the table ours.
    theirs = not any(group.startswith("Ours") for group, _ in rows)
    columns = [
        *Column.each("Method", "Epochs or steps", numeric=False, published=theirs),
        *(Column(name, better=end, published=theirs) for name, (_, end, _, _) in _SOTA.items()),
    ]
    return build("sota", "State of the art and our runs", columns, rows, paper_notes("sota"))


def _metrics(study: Study) -> dict[str, str | None]:
    known = study.runs.attrs.get("metrics", {})
    return {
        name: about.get("better")
        for name, about in known.items()
        # What held-out images get themselves is no score of a run: it stands in a note.
        if f"score.{name}" in study.runs and not str(about.get("key")).endswith("_heldout")
    }


def all_scores(study: Study) -> Table:
    """Every treatment's every score, mean and standard deviation over seeds."""
    columns = [Column(name, better=better) for name, better in _metrics(study).items()]
    cells = [(base, cell, cell.estimate) for base in study.bases for cell in base.cells]
    return _every_metric(study, "all_scores", "Every score", columns, cells, Memory.of(study).notes)


def _every_metric(
    study: Study,
    name: str,
    title: str,
    columns: Sequence[Column],
    cells: Sequence[tuple[Base, Cell, Callable[[str], Estimate | None]]],
    notes: Sequence[str],
    signed: bool = False,
) -> Table:
    """Build a table of a row per cell and a column per metric, an estimate of its scores."""
    rows = []
    for base, cell, estimate in cells:
        about = base.any
        head = f"{base.label}; guidance {about.first('guidance')}, sampler {about.first('sampler')}"
        entries = [words(cell.treatment), words(steps(cell))]
        for metric in _metrics(study):
            found = estimate(f"score.{metric}")
            entries.append(ours(found, metric_decimals(metric), signed=signed))
        rows.append((head, entries))
    both = [Column("Tokens", numeric=False), Column("Steps", numeric=False), *columns]
    return build(name, title, both, rows or [not_run(both)], notes)


def differences(study: Study) -> Table:
    """Every treatment's difference to the dense runs, paired by seed, with 95 % intervals."""
    columns = [Column(f"\u0394 {name}") for name in _metrics(study)]
    cells = [
        (base, cell, functools.partial(gap, cell, base.dense))
        for base in study.bases
        for cell in base.routed
    ]
    title = "Differences to dense, paired by seed and step"
    return _every_metric(study, "differences", title, columns, cells, (PAIRED,), signed=True)


def followups(study: Study) -> Table:
    """What others measured with token routing."""
    ends = {"FID": "lower", "Precision": "higher", "Recall": "higher", "Batches/s": "higher"}
    numbers = (Column(name, better=end, published=True) for name, end in ends.items())
    columns, rows = (Column("Method", numeric=False), *numbers), []
    for row in paper.rows("followups"):
        shares = [published(row[name], 3) for name in ("precision", "recall")]
        entries = [words(row["method"]), published(row["fid"]), *shares]
        entries.append(published(row["batches_per_s"]))
        rows.append((f"{row['setup']} ({row['source']})", entries))
    note = "Each project's own protocol: compare within a group only."
    return build("followups", "What others measured", columns, rows, (note,))


_OURS = (
    Column("Model", numeric=False),
    *Column.each("Tokens", "Dense", "+ TREAD", "\u0394", "Dense GMACs", "Routed GMACs"),
)
_PAPER = (
    Column("Paper", numeric=False, published=True),
    *Column.each("Paper dense", "Paper + TREAD", published=True),
    Column("Paper GMACs", numeric=False, published=True),
)
_MACS = "GMACs per image and forward pass, without attention matmuls as in the paper."


def _is_text(base: Base) -> bool:
    return str(base.any.first("config.task")) == "text"


def high_res(study: Study) -> Table:
    """High resolution: dense against routed with their MACs (Table 4, first row)."""

    def chosen(base: Base) -> bool:
        fine = str(base.any.first("data")) == "latents" and (token_count(base) or 0) >= 1024
        return fine and not _is_text(base)

    return _against(study, "high_res", "High resolution (Table 4)", "ImageNet-512", chosen)


def text(study: Study) -> Table:
    """Text to image: dense against routed with their MACs (Table 4, second row)."""
    return _against(study, "text", "Text to image (Table 4)", "MS-COCO", _is_text)


def tokens(study: Study) -> Table:
    """The same pictures cut into more tokens: does routing gain more?"""
    memory = Memory.of(study)
    families: dict[tuple[str, ...], list[Base]] = {}
    for base in study.bases:
        about = [str(base.any.first(name)) for name in ("data", "objective", "scale")]
        families.setdefault((base.model.partition("/")[0], *about), []).append(base)
    rows = []
    for (model, data, *_), found in families.items():
        patches = {base.key: parse_size(str(base.any.first("size"))).patch for base in found}
        if len({base.model for base in found}) > 1:
            for base in sorted(found, key=lambda base: -patches[base.key]):
                shown = after([cell for cell in base.pair() if cell] or base.cells)
                rows.append((f"{model}, {data}: {base.metric}{shown}", _costs_row(base, memory)))
    note = "Patch sizes share features, so their distances compare. The paper publishes none."
    columns = (*_OURS, *memory.columns(*_MEMORY))
    notes = (PAIRED, _MACS, *memory.notes, note)
    rows = rows or [not_run(columns)]
    return build("tokens", "256 against 1024 tokens", columns, rows, notes)


def token_count(base: Base) -> int | None:
    """Return a base's image tokens from its weights' metadata; None without weights."""
    for cell in base.cells:
        for path in cell.runs["path"]:
            model = model_arguments(path)
            if model and isinstance(model.get("input_size"), list):
                patch = parse_size(str(model["size"])).patch
                height, width = model["input_size"]
                return (int(height) // patch) * (int(width) // patch)
    return None


def _against(
    study: Study, name: str, title: str, task: str, chosen: Callable[[Base], bool]
) -> Table:
    memory = Memory.of(study)
    row = next(r for r in paper.rows("resolution") if r["task"] == task)
    rows: list[tuple[str, list[Entry]]] = [
        (heading(base, *base.pair()), [*_costs_row(base, memory), *_paper_costs(row)])
        for base in study.bases
        if chosen(base)
    ]
    columns = (*_OURS, *memory.columns(*_MEMORY), *_PAPER)
    rows = rows or [not_run(columns, _paper_costs(row), group=NOT_RUN)]
    notes = paper_notes("resolution", PAIRED, _MACS, *memory.notes)
    return build(name, title, columns, rows, notes)


def _costs_row(base: Base, memory: Memory) -> list[Entry]:
    dense, routed = base.pair()
    full = base.any.estimate("macs_dense_no_attention")
    sparse = routed.estimate("macs_routed_no_attention") if routed else None
    return [
        words(f"{base.model} on {base.any.first('data')}"),
        exact(token_count(base), 0),
        *_pair(base),
        *(exact(macs.mean / 1e9 if macs else None, 3) for macs in (full, sparse)),
        *memory.entries(base, dense, routed),
    ]


def _paper_costs(row: dict[str, Any]) -> list[Entry]:
    scores = [published(row["dense"]), published(row["tread"])]
    costs = words(f"{row['dense_gmacs']} \u2192 {row['tread_gmacs']}")
    return [words(f"{row['task']}, DiT-B/2, FID-10K"), *scores, costs]
