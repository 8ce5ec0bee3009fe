"""All architectures: the main table, the state of the art, every score, resolutions.

TREAD's main table, Table 1 and Table 4 (high resolution, text to image, 256 against 1024 tokens).
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.grouping import FINE_TUNE, parent
from analysis.runs.run_files import model_arguments
from analysis.runs.seed_statistics import Estimate, paired
from analysis.tables import paper
from analysis.tables.score_entries import (
    PAIRED,
    Memory,
    after,
    difference,
    gap,
    heading,
    metric_decimals,
    paper_notes,
    score,
    steps,
)
from analysis.tables.table import NOT_RUN, Column, Entry, Table, Value, build, head, ours, published
from backbones.sizes import parse_size

_MEMORY = ("Memorisation, dense", "Memorisation, + TREAD")
# What a score never stands without, in this order: the kinds of scores, see `eval_options.METRICS`.
_SET = (
    "fd", "precision", "recall", "accuracy", "adherence", "memorisation", "heldout_loss",
    "heldout_loss_routed", "w_eff", "w_eff_plain",
)  # fmt: skip


def score_set(study: Study, base: Base, kinds: Sequence[str] = _SET) -> dict[str, dict[str, Any]]:
    """Return the metrics of these kinds that a base's scores are read together with, its own first.

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
        elif here and same_n and kind in kinds and (kind != "memorisation" or name == memory):
            ranks[name] = (True, kinds.index(kind), about.get("features") != own.get("features"))
    return {name: known[name] for name in sorted(ranks, key=ranks.__getitem__)}


def main(study: Study) -> Table:
    """Dense, routed, and their difference per backbone, a row per metric (main table)."""
    # Where no run is ours, the paper's numbers have the columns to themselves.
    columns = (
        Column("Metric", numeric=False),
        *Column.each("Dense", "+ TREAD", "\u0394", published=not study.bases),
    )
    rows: list[tuple[str, list[Value]]] = []
    for base in study.bases:
        dense, routed = base.pair()
        params = base.any.first("params")
        size = f"{params / 1e6:.2f}M parameters, " if params else ""
        what = f"{size}{f'route {routed.treatment}' if routed else 'no route was run'}"
        group = heading(base, dense, routed, what=what)
        for name, metric in score_set(study, base).items():
            changes = [gap(routed, dense, f"score.{name}")]
            rows.append((group, _metric_row(name, metric, (dense, routed), changes)))
        family, kind, size = map(base.any.first, ("backbone", "objective", "size"))
        # Of a size that it has none of, DiT-B/2's, where the paper's ablations stand.
        if row := paper.main_row(family, kind, size) or paper.main_row(family, kind, "B/2"):
            rows.append((group, _paper_entries(row)))
    rows = rows or [(NOT_RUN, _paper_entries(row)) for row in paper.rows("main")]
    title = "Main table: dense against routed, by backbone"
    return build("main", title, columns, rows, paper_notes("main", PAIRED, *Memory.of(study).notes))


def _metric_row(
    name: str, about: Mapping[str, Any], cells: Sequence[Cell | None], changes: Sequence[Any]
) -> list[Value]:
    """Return a metric's row: the score of each cell, then differences."""
    column, digits = f"score.{name}", metric_decimals(name)
    scores = [ours(cell.estimate(column) if cell else None, digits) for cell in cells]
    row = [*scores, *(ours(change, digits, signed=True) for change in changes)]
    if about.get("key") == "heldout_loss_routed":  # a dense run has no routed pass to score
        row = [Entry() if entry.is_missing else entry for entry in row]
    return [head(Column(name, better=about.get("better"))), *row]


def _by_kind(study: Study, base: Base, kinds: Sequence[str]) -> dict[Any, str]:
    """Return the metric of each kind, in the data's own feature space, which stands first."""
    found = score_set(study, base, kinds)
    return {about.get("key"): name for name, about in reversed(found.items())}


_SUMMARY = ("fd", "precision", "recall", "accuracy", "heldout_loss", "w_eff")
_ARROW = "Dense \u2192 routed (difference, paired by seed, \u00b1 half of Student's 95 % interval)."


def _summary_columns(study: Study, first: str, cost: str) -> list[Column]:
    known = study.runs.attrs.get("metrics", {}).values()
    ends = {about.get("key"): about.get("better") for about in known}
    scores = [Column("FD" if kind == "fd" else kind, better=ends.get(kind)) for kind in _SUMMARY]
    seeds, macs = Column("Seeds", decimals=0), Column(cost, unit="x")
    return [Column(first, numeric=False), seeds, macs, *scores]


def summary(study: Study) -> Table:
    """The main table in a row per backbone: `dense -> routed (paired difference)` of each score."""
    rows: list[tuple[str, list[Value]]] = []
    for base, dense, routed in study.pairs():
        # What backbones share heads their rows.
        group = f"{base.label.partition(', ')[2]}: route {routed.treatment}, {base.metric}"
        level = replace(dense, steps=routed.steps)  # where it was not scored there, nothing is told
        n, changes = _changes(_by_kind(study, base, _SUMMARY), level, routed)
        rows.append((group + after([routed]), [base.model, n, routed.macs_share, *changes]))
    rows.sort(key=lambda row: row[0])
    columns = _summary_columns(study, "Backbone", "MACs per step")
    return build("summary", "Dense against routed, a row per backbone", columns, rows, (_ARROW,))


def steps_and_cost(study: Study) -> Table:
    """Dense against routed after equal steps, and after equal multiply-adds of training."""
    rows: list[tuple[str, list[Value]]] = []
    for base, dense, routed in study.pairs():
        names = _by_kind(study, base, _SUMMARY)
        first, second = map(_training_macs, (dense, routed))
        costs = {(s, t): second[t] / first[s] for s in first for t in second if first[s]}
        pairs = [(s, s) for s in first if s in second]
        # Two trainings cost the same if the routed one takes this share of the dense one's MACs.
        pairs += [(s, t) for (s, t), cost in costs.items() if s != t and 0.95 <= cost <= 1.0]
        found = []
        for pair in pairs:
            n, changes = _changes(names, dense.at(pair[0]), routed.at(pair[1]))
            name = " \u2192 ".join(dict.fromkeys(f"{step:.0f}" for step in pair))
            found.append((n, [name, n, costs.get(pair), *changes]))
        # What one seed says beside several is left out.
        most = min(2, max((n for n, _ in found), default=0))
        group = f"{base.label}: route {routed.treatment}, {base.metric}"
        if len(found) > 1:
            rows += [(group, entries) for n, entries in found if n >= most]
    notes = (_ARROW, "Two numbers of steps: the routed runs' multiply-adds are those of the dense.")
    title = "Dense against routed after equal steps and at equal cost"
    columns = _summary_columns(study, "Steps, dense \u2192 routed", "MACs")
    return build("steps", title, columns, rows, notes)


def treatments(study: Study) -> Table:
    """Every treatment in a row: the mean of each score, with its paired difference to dense."""
    rows: list[tuple[str, list[Value]]] = []
    for base in study.bases:
        if base.dense is None or len(base.routed) < 2:
            continue
        names = _by_kind(study, base, _SUMMARY)
        group = f"{base.label}: {base.metric}{after(base.cells)}"
        for cell in base.cells:
            n = len(cell.by_seed(cell.score))
            scores = [_beside(base.dense, cell, str(names.get(kind)), n) for kind in _SUMMARY]
            rows.append((group, [cell.treatment, n, cell.macs_share, *scores]))
    title, note = "Every treatment against dense", f"Mean {_ARROW.partition(' routed ')[2]}"
    columns = _summary_columns(study, "Tokens", "MACs per step")
    return build("treatments", title, columns, rows, (note,))


def _beside(dense: Cell, cell: Cell, metric: str, usual: int) -> str | None:
    """Return the mean of a cell's score, with its difference to dense if seeds tell its spread."""
    digits, column = metric_decimals(metric), f"score.{metric}"
    found = cell.estimate(column)
    if found is None:
        return None
    known = None if cell is dense else gap(cell, dense, column)
    text = f"{found.mean:.{digits}f}"
    if known is not None and known.low is not None:
        text += _spread(known, digits, usual)
    return text


def _spread(known: Estimate, digits: int, usual: int) -> str:
    """Return ` (difference +- half its interval)`, with n where it is not that of the row."""
    half = None if known.low is None else f"{known.mean - known.low:.{digits}f}"
    text = "" if half is None else f" ({known.mean:+.{digits}f} \u00b1 {half})"
    return text + ("" if known.n == usual else f", n={known.n}")


def _training_macs(cell: Cell) -> dict[float, float]:
    """Return the multiply-adds of training by the number of steps that a cell was scored after."""
    paths = [path[["step", "macs"]] for path in cell.paths.values()]
    return dict(pd.concat(paths).groupby("step")["macs"].mean()) if paths else {}


def _changes(names: Mapping[Any, str], dense: Cell, routed: Cell) -> tuple[int, list[Value]]:
    """Return the number of seeds that both were scored with, and an entry per kind of score."""
    n = len(dense.by_seed(dense.score).keys() & routed.by_seed(routed.score).keys())
    return n, [_change(dense, routed, str(names.get(kind)), n) for kind in _SUMMARY]


def _change(dense: Cell, routed: Cell, metric: str, usual: int) -> str | None:
    """Return `dense -> routed` with the difference."""
    digits, column = metric_decimals(metric), f"score.{metric}"
    first, second = dense.by_seed(column), routed.by_seed(column)
    known, both = paired(first, second), first.keys() & second.keys()
    if known is None:
        return None
    means = (sum(scores[seed] for seed in both) / known.n for scores in (first, second))
    return " \u2192 ".join(f"{mean:.{digits}f}" for mean in means) + _spread(known, digits, usual)


def _paper_entries(row: dict[str, Any]) -> list[Value]:
    """Return the paper's row: its model, its scores and their difference."""
    mark = row.get("mark")
    name = f"Paper, FID-50K: {row['model']}, {int(row['iterations']) // 1000}K steps"
    if isinstance(mark, str):
        name += f" ({mark})"
    numbers = [published(row[key]) for key in ("dense", "tread")]
    return [name, *numbers, published(-float(row["delta"]), signed=True)]


# Columns of Table 1 by our kind of score: heading, the paper's key and the better end.
_SOTA = {
    "fd": ("FID", "fid", "lower"),
    "sfid": ("sFID", "sfid", "lower"),
    "is": ("IS", "is", "higher"),
    "precision": ("Precision", "precision", "higher"),
    "recall": ("Recall", "recall", "higher"),
}


def sota(study: Study) -> Table:
    """The state-of-the-art table, with our runs below in their own groups (Table 1)."""
    rows: list[tuple[str, list[Value]]] = []
    for row in paper.rows("sota"):
        group = "Paper, guided" if row["guided"] else "Paper, unguided"
        numbers = [published(row[key]) for _, key, _ in _SOTA.values()]
        rows.append((group, [row["method"], f"{row['epochs']} epochs", *numbers]))
    for base in study.bases:
        names = _by_kind(study, base, tuple(_SOTA))
        shown = [cell for cell in base.pair() if cell is not None]
        for cell in shown:
            scores = [
                ours(cell.estimate(f"score.{names.get(kind)}"), metric_decimals(kind))
                for kind in _SOTA
            ]
            about = [f"{base.model}, {cell.treatment}", f"{cell.steps:.0f} steps"]
            rows.append((f"Ours: {heading(base, *shown)}", [*about, *scores]))
    # The numbers of other people's rows share the columns: only ours make the table ours.
    theirs = not any(group.startswith("Ours") for group, _ in rows)
    columns = [
        *Column.each("Method", "Epochs or steps", numeric=False, published=theirs),
        *(Column(name, better=end, published=theirs) for name, _, end in _SOTA.values()),
    ]
    return build("sota", "State of the art and our runs", columns, rows, paper_notes("sota"))


def tails(study: Study) -> Table:
    """Dense, routed, and routed with a dense tail, a row per metric, with the tail's differences.

    Where both went on as they were, by the tail's steps at its learning rate, the tail is held
    against these: what remains is what the route does.
    """
    found = []
    for base, dense, routed in study.pairs():
        tail = _grown(study, base, routed, FINE_TUNE)
        if tail is not None and parent(dense.first("config.init")) is None:
            same = [_grown(study, base, dense, FINE_TUNE, tail)]
            same.append(_grown(study, base, routed, routed.treatment, tail))
            found.append((base, dense, routed, tail, same))
    controlled = any(any(same) for *_, same in found)
    others = ("Dense + same", "Routed + same") if controlled else ("Dense", "Routed")
    cells = dict.fromkeys(["Dense", "Routed", *others, "+ tail"])
    changes = [f"\u0394 tail, {name.lower()}" for name in reversed(others)]
    columns = (Column("Metric", numeric=False), *Column.each(*cells, *changes))
    rows = []
    for base, dense, routed, tail, same in found:
        # What tells the tails' own recipe apart is no news here.
        setting = f"{base.label.partition(' (')[0]}: route {routed.treatment}"
        group = f"{setting}, after {routed.steps:.0f} steps, and {tail.steps:.0f} of tail"
        if routed.macs_share and dense.steps > 0:
            spent = (routed.steps * routed.macs_share + tail.steps) / dense.steps
            group += f": {spent:.2f}x dense's MACs"
        held = same if controlled else [dense, routed]
        shown = [dense, routed, *(same if controlled else ()), tail]
        for name, about in score_set(study, base).items():
            column = f"score.{name}"
            if own := tail.by_seed(column):
                gaps = [paired(cell.by_seed(column), own) if cell else None for cell in held[::-1]]
                rows.append((group, _metric_row(name, about, shown, gaps)))
    notes = ["Differences are paired by seed, with Student's 95 % interval."]
    if controlled:
        notes.append("+ same: as many steps more at the tail's learning rate, routed as before.")
    return build("tails", "A dense tail on routed runs (the paper's F)", columns, rows, notes)


def _grown(
    study: Study, base: Base, cell: Cell, like: str, tail: Cell | None = None
) -> Cell | None:
    """Return the cell of this treatment whose parents are the cell's runs, or None.

    Beside a tail it is one that went on in the tail's way, after as many steps.
    """
    name = parent(cell.first("run"))
    parents, wanted = (name, f"{name}@{cell.steps:.0f}"), cell.first("reference")
    way = next((_recipe(other) for other in study.bases if tail in other.cells), None)
    for other in study.bases:
        for grown in other.cells if other.metric == base.metric else ():
            from_it = grown.treatment == like and parent(grown.first("config.init")) in parents
            level = grown.at(tail.steps) if tail else grown
            alike = tail is None or (level.steps, _recipe(other)) == (tail.steps, way)
            if from_it and alike and grown.first("reference") == wanted:
                return level
    return None


def _recipe(base: Base) -> str:
    """Return what the runs of a base share beside the runs that they grew from."""
    return re.sub(r"config\.init=[^;]*", "", base.key)


def all_scores(study: Study) -> Table:
    """Every treatment's every score, mean and standard deviation over seeds."""
    return _every_metric(study, "all_scores", "Every score", Memory.of(study).notes)


def differences(study: Study) -> Table:
    """Every treatment's difference to the dense runs, paired by seed, with 95 % intervals."""
    title = "Differences to dense, paired by seed and step"
    return _every_metric(study, "differences", title, (PAIRED,), to_dense=True)


def _every_metric(
    study: Study, name: str, title: str, notes: Sequence[str], to_dense: bool = False
) -> Table:
    """Build a table of a row per cell and a column per metric."""
    metrics = {
        metric: about.get("better")
        for metric, about in study.runs.attrs.get("metrics", {}).items()
        # What held-out images get themselves is no score of a run: it stands in a note.
        if f"score.{metric}" in study.runs and not str(about.get("key")).endswith("_heldout")
    }
    columns = [*Column.each("Tokens", "Steps", numeric=False)]
    for metric, better in metrics.items():
        columns.append(Column(f"\u0394 {metric}") if to_dense else Column(metric, better=better))
    rows = []
    for base in study.bases:
        known = ((key, base.any.first(key)) for key in ("guidance", "sampler"))
        protocol = ", ".join(f"{key} {value}" for key, value in known if value)
        about = f"{base.label}; {protocol}" if protocol else base.label
        for cell in base.routed if to_dense else base.cells:
            entries: list[Value] = [cell.treatment, steps(cell)]
            for metric in metrics:
                column = f"score.{metric}"
                found = gap(cell, base.dense, column) if to_dense else cell.estimate(column)
                entries.append(ours(found, metric_decimals(metric), signed=to_dense))
            rows.append((about, entries))
    return build(name, title, columns, rows, notes)


def followups(study: Study) -> Table:
    """What others measured with token routing."""
    columns = (
        Column("Method", numeric=False),
        Column("FID", better="lower", published=True),
        *Column.each("Precision", "Recall", better="higher", published=True, decimals=3),
        Column("Batches/s", better="higher", published=True),
    )
    keys = ("method", "fid", "precision", "recall", "batches_per_s")
    rows = [
        (f"{row['setup']} ({row['source']})", [row[key] for key in keys])
        for row in paper.rows("followups")
    ]
    note = "Each project's own protocol: compare within a group only."
    return build("followups", "What others measured", columns, rows, (note,))


_OURS = (
    Column("Model", numeric=False),
    Column("Tokens", decimals=0),
    *Column.each("Dense", "+ TREAD", "\u0394"),
    *Column.each("Dense GMACs", "Routed GMACs", decimals=3),
)
_PAPER = (
    Column("Paper", numeric=False, published=True),
    *Column.each("Paper dense", "Paper + TREAD", published=True),
    Column("Paper GMACs", numeric=False, published=True),
)
_MACS = "GMACs per image and forward pass, without attention matmuls as in the paper."


def high_res(study: Study) -> Table:
    """High resolution: dense against routed with their MACs (Table 4, first row)."""
    found = [base for base in study.bases if base.any.first("config.task") != "text"]
    latents = [base for base in found if base.any.first("data") == "latents"]
    fine = [base for base in latents if (token_count(base) or 0) >= 1024]
    return _against(study, "high_res", "High resolution (Table 4)", "ImageNet-512", fine)


def text(study: Study) -> Table:
    """Text to image: dense against routed with their MACs (Table 4, second row)."""
    found = [base for base in study.bases if base.any.first("config.task") == "text"]
    return _against(study, "text", "Text to image (Table 4)", "MS-COCO", found)


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
    return build("tokens", "256 against 1024 tokens", columns, rows, notes)


def token_count(base: Base) -> int | None:
    """Return a base's image tokens from its weights' metadata; None without weights."""
    for cell in base.cells:
        for path in cell.runs["path"]:
            model = model_arguments(path) or {}
            # Somebody else may have written them.
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                patch = parse_size(str(model["size"])).patch
                height, width = model["input_size"]
                return (int(height) // patch) * (int(width) // patch)
    return None


def _against(study: Study, name: str, title: str, task: str, bases: Sequence[Base]) -> Table:
    memory = Memory.of(study)
    row = next(r for r in paper.rows("resolution") if r["task"] == task)
    rows = [
        (heading(base, *base.pair()), [*_costs_row(base, memory), *_paper_costs(row)])
        for base in bases
    ]
    columns = (*_OURS, *memory.columns(*_MEMORY), *_PAPER)
    notes = paper_notes("resolution", PAIRED, _MACS, *memory.notes)
    return build(name, title, columns, rows, notes, [("none run", _paper_costs(row))])


def _costs_row(base: Base, memory: Memory) -> list[Value]:
    dense, routed = base.pair()
    full = base.any.estimate("macs_dense_no_attention")
    sparse = routed.estimate("macs_routed_no_attention") if routed else None
    scores = (score(base, dense), score(base, routed), difference(base, routed, dense))
    costs = (macs.mean / 1e9 if macs else None for macs in (full, sparse))
    return [base.label, token_count(base), *scores, *costs, *memory.entries(base, dense, routed)]


def _paper_costs(row: dict[str, Any]) -> list[Value]:
    costs = f"{row['dense_gmacs']} \u2192 {row['tread_gmacs']}"
    return [f"{row['task']}, DiT-B/2, FID-10K", row["dense"], row["tread"], costs]
