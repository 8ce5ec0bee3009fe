"""All architectures: the main table, the state of the art, every score, resolutions.

TREAD's main table, Table 1 and Table 4 (high resolution, text to image, 256 against 1024 tokens).
"""

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.grouping import FINE_TUNE, parent
from analysis.runs.run_files import model_arguments
from analysis.runs.seed_statistics import paired
from analysis.tables import paper
from analysis.tables import table as tables
from analysis.tables.table import PAIRED, Column, Entry, Table, Value, build, published
from backbones.sizes import parse_size

Rows = list[tuple[str, list[Value]]]
# What a score never stands without, in this order: the kinds of scores, see `eval_options.METRICS`.
_SET = (
    "fd", "precision", "recall", "accuracy", "adherence", "memorisation", "heldout_loss",
    "heldout_loss_routed", "w_eff", "w_eff_plain",
)  # fmt: skip
_SUMMARY = ("fd", "precision", "recall", "accuracy", "heldout_loss", "w_eff")
_ARROW = "Dense \u2192 routed (difference, paired by seed, \u00b1 half of Student's 95 % interval)."


def score_set(base: Base) -> dict[str, dict[str, Any]]:
    """Return the metrics that a base's scores are read together with, its own first.

    Those of the feature space of its own metric stand before those of others; the NN-distance ratio
    (`memorisation`), which says the same in each, in one alone.
    """
    ranks = {base.metric: -1}
    for name, about in base.metrics.items():
        kind = "memorisation" if name == base.memory else about.get("key")
        if kind in _SET and (kind != "memorisation" or name == base.memory):
            ranks.setdefault(name, _SET.index(kind))
    return {name: base.known[name] for name in sorted(ranks, key=ranks.__getitem__)}


def main(study: Study) -> Table:
    """Dense, routed, and their difference per backbone, a row per metric (main table)."""
    rows: Rows = []
    for base in study.bases:
        dense, routed = base.pair()
        params = base.any.first("params")
        size = f"{params / 1e6:.2f}M parameters, " if params else ""
        what = f"{size}{f'route {routed.treatment}' if routed else 'no route was run'}"
        group = tables.heading(base, dense, routed, what=what)
        for name in score_set(base):
            changes = [tables.difference(name, routed, dense)]
            rows.append((group, _metric_row(base, name, (dense, routed), changes)))
        family, kind, size = map(base.any.first, ("backbone", "objective", "size"))
        # Of a size that it has none of, DiT-B/2's, where the paper's ablations stand.
        if row := paper.main_row(family, kind, size) or paper.main_row(family, kind, "B/2"):
            rows.append((group, _paper_entries(row)))
    # Where no run is ours, the paper's numbers have the columns to themselves.
    shown = Column.each("Dense", "+ TREAD", "\u0394", published=not rows)
    rows = rows or [(tables.NOT_RUN, _paper_entries(row)) for row in paper.rows("main")]
    notes = tables.paper_notes("main", PAIRED, *tables.memory_notes(study))
    title = "Main table: dense against routed, by backbone"
    return build("main", title, (Column("Metric", numeric=False), *shown), rows, notes)


def _metric_row(
    base: Base, name: str, cells: Sequence[Cell | None], changes: Sequence[Entry]
) -> list[Value]:
    """Return a metric's row: the score of each cell, then differences."""
    about, row = base.known[name], [*(tables.score(name, cell) for cell in cells), *changes]
    if about.get("key") == "heldout_loss_routed":  # a dense run has no routed pass to score
        row = [Entry() if entry.is_missing else entry for entry in row]
    label = Column(tables.metric_label(name), better=tables.metric_better(about))
    return [tables.head(label), *row]


def _paper_entries(row: dict[str, Any]) -> list[Value]:
    """Return the paper's row: its model, its scores and their difference."""
    name = f"Paper, FID-50K: {row['model']}, {int(row['iterations']) // 1000}K steps"
    if isinstance(mark := row.get("mark"), str):
        name += f" ({mark})"
    numbers = [published(row[key]) for key in ("dense", "tread")]
    return [name, *numbers, published(-float(row["delta"]), signed=True)]


# --- a row of one score of each kind --------------------------------------------------------------


def _by_kind(
    study: Study, name: str, title: str, first: str, cost: str, rows: Rows, *notes: str
) -> Table:
    ends = {about.get("key"): about.get("better") for about in study.metrics.values()}
    scores = (Column("FD" if kind == "fd" else kind, better=ends.get(kind)) for kind in _SUMMARY)
    about = (Column(first, numeric=False), Column("Seeds", decimals=0), Column(cost, unit="x"))
    return build(name, title, (*about, *scores), rows, notes)


def _told(base: Base, dense: Cell, cell: Cell, usual: int, both: bool) -> list[Value]:
    """Return the mean of a score of each kind with its difference to dense, and n if not `usual`.

    With `both` it is that of the seeds that dense has too, behind dense's.
    """
    found: list[Value] = []
    for kind in _SUMMARY:
        metric = base.by_kind.get(kind, "")
        first, second = (one.by_seed(f"score.{metric}") for one in (dense, cell))
        known = None if cell is dense else paired(first, second)
        seeds = first.keys() & second.keys() if both else second.keys()
        if not seeds:
            found.append(None)
            continue
        digits = tables.metric_decimals(metric)
        sides, add = ((first, second), sum) if both else ((second,), math.fsum)
        means = [add(side[seed] for seed in seeds) / len(seeds) for side in sides]
        text = " \u2192 ".join(f"{mean:.{digits}f}" for mean in means)
        if known and known.low is not None:
            text += f" ({known.mean:+.{digits}f} \u00b1 {known.mean - known.low:.{digits}f})"
        if known and known.n != usual and (both or known.low is not None):
            text += f", n={known.n}"
        found.append(text)
    return found


def _changes(base: Base, dense: Cell, routed: Cell) -> tuple[int, list[Value]]:
    """Return the number of seeds that both were scored with, and `dense -> routed` per score."""
    n = len(dense.by_seed(dense.score).keys() & routed.by_seed(routed.score).keys())
    return n, _told(base, dense, routed, n, True)


def summary(study: Study) -> Table:
    """The main table in a row per backbone: `dense -> routed (paired difference)` of each score."""
    rows: Rows = []
    for base, dense, routed in study.pairs():
        # What backbones share heads their rows.
        metric = tables.metric_label(base.metric)
        group = f"{base.label.partition(', ')[2]}: route {routed.treatment}, {metric}"
        level = replace(dense, steps=routed.steps)  # where it was not scored there, nothing is told
        n, changes = _changes(base, level, routed)
        rows.append((group + tables.after([routed]), [base.model, n, routed.macs_share, *changes]))
    rows.sort(key=lambda row: row[0])
    title = "Dense against routed, a row per backbone"
    return _by_kind(study, "summary", title, "Backbone", "MACs per step", rows, _ARROW)


def steps_and_cost(study: Study) -> Table:
    """Dense against routed after equal steps, and after equal multiply-adds of training."""
    rows: Rows = []
    for base, dense, routed in study.pairs():
        first, second = map(_training_macs, (dense, routed))
        costs = {(s, t): second[t] / first[s] for s in first for t in second if first[s]}
        pairs = [(s, s) for s in first if s in second]
        # Two trainings cost the same if the routed one takes this share of the dense one's MACs.
        pairs += [(s, t) for (s, t), cost in costs.items() if s != t and 0.95 <= cost <= 1.0]
        found = []
        for pair in pairs:
            n, changes = _changes(base, dense.at(pair[0]), routed.at(pair[1]))
            name = " \u2192 ".join(dict.fromkeys(f"{step:.0f}" for step in pair))
            found.append((n, [name, n, costs.get(pair), *changes]))
        # What one seed says beside several is left out.
        most = min(2, max((n for n, _ in found), default=0))
        group = f"{base.label}: route {routed.treatment}, {tables.metric_label(base.metric)}"
        if len(found) > 1:
            rows += [(group, entries) for n, entries in found if n >= most]
    note = "Two numbers of steps: the routed runs' multiply-adds are those of the dense."
    title = "Dense against routed after equal steps and at equal cost"
    label = "Steps, dense \u2192 routed"
    return _by_kind(study, "steps", title, label, "MACs", rows, _ARROW, note)


def _training_macs(cell: Cell) -> dict[float, float]:
    """Return the multiply-adds of training by the number of steps that a cell was scored after."""
    paths = [path[["step", "macs"]] for path in cell.paths.values()]
    return dict(pd.concat(paths).groupby("step")["macs"].mean()) if paths else {}


def treatments(study: Study) -> Table:
    """Every treatment in a row: the mean of each score, with its paired difference to dense."""
    rows: Rows = []
    for base in study.bases:
        if base.dense is None or len(base.routed) < 2:
            continue
        group = f"{base.label}: {tables.metric_label(base.metric)}{tables.after(base.cells)}"
        for cell in base.cells:
            n = len(cell.by_seed(cell.score))
            level = cell if cell is base.dense else replace(base.dense, steps=cell.steps)
            scores = _told(base, level, cell, n, False)
            rows.append((group, [cell.treatment, n, cell.macs_share, *scores]))
    title, note = "Every treatment against dense", f"Mean {_ARROW.partition(' routed ')[2]}"
    return _by_kind(study, "treatments", title, "Tokens", "MACs per step", rows, note)


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
    rows: Rows = []
    for row in paper.rows("sota"):
        group = "Paper, guided" if row["guided"] else "Paper, unguided"
        numbers = [published(row[key]) for _, key, _ in _SOTA.values()]
        rows.append((group, [row["method"], f"{row['epochs']} epochs", *numbers]))
    # The numbers of other people's rows share the columns: only ours make the table ours.
    theirs = True
    for base in study.bases:
        shown = [cell for cell in base.pair() if cell is not None]
        for cell in shown:
            scores = (cell.estimate(f"score.{base.by_kind.get(kind)}") for kind in _SOTA)
            digits = map(tables.metric_decimals, _SOTA)
            about = [f"{base.model}, {cell.treatment}", f"{cell.steps:.0f} steps"]
            rows.append(
                (
                    f"Ours: {tables.heading(base, *shown)}",
                    [*about, *map(tables.ours, scores, digits)],
                )
            )
            theirs = False
    columns = [
        *Column.each("Method", "Epochs or steps", numeric=False, published=theirs),
        *(Column(name, better=end, published=theirs) for name, _, end in _SOTA.values()),
    ]
    notes = tables.paper_notes("sota")
    return build("sota", "State of the art and our runs", columns, rows, notes)


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
    rows: Rows = []
    for base, dense, routed, tail, same in found:
        # What tells the tails' own recipe apart is no news here.
        setting = f"{base.label.partition(' (')[0]}: route {routed.treatment}"
        group = f"{setting}, after {routed.steps:.0f} steps, and {tail.steps:.0f} of tail"
        if routed.macs_share and dense.steps > 0:
            spent = (routed.steps * routed.macs_share + tail.steps) / dense.steps
            group += f": {spent:.2f}x dense's MACs"
        held = same if controlled else [dense, routed]
        shown = [dense, routed, *(same if controlled else ()), tail]
        for name in score_set(base):
            own, digits = tail.by_seed(f"score.{name}"), tables.metric_decimals(name)
            gaps = [
                paired(cell.by_seed(f"score.{name}"), own) if cell else None for cell in held[::-1]
            ]
            if own:
                told = [tables.ours(change, digits, signed=True) for change in gaps]
                rows.append((group, _metric_row(base, name, shown, told)))
    notes = ["Differences are paired by seed, with Student's 95 % interval."]
    if controlled:
        notes.append("+ same: as many steps more at the tail's learning rate, routed as before.")
    columns = (Column("Metric", numeric=False), *Column.each(*cells, *changes))
    return build("tails", "A dense tail on routed runs (the paper's F)", columns, rows, notes)


def _grown(
    study: Study, base: Base, cell: Cell, like: str, tail: Cell | None = None
) -> Cell | None:
    """Return the cell of this treatment whose parents are the cell's runs, or None.

    Beside a tail it is one that went on in the tail's way, after as many steps.
    """
    name = parent(cell.first("run"))
    parents, wanted = (name, f"{name}@{cell.steps:.0f}"), cell.first("reference")
    # What the runs of a base share beside the runs that they grew from.
    recipes = {other.key: re.sub(r"config\.init=[^;]*", "", other.key) for other in study.bases}
    way = next((recipes[other.key] for other in study.bases if tail in other.cells), None)
    for other in study.bases:
        for grown in other.cells if other.metric == base.metric else ():
            from_it = grown.treatment == like and parent(grown.first("config.init")) in parents
            level = grown.at(tail.steps) if tail else grown
            alike = tail is None or (level.steps, recipes[other.key]) == (tail.steps, way)
            if from_it and alike and grown.first("reference") == wanted:
                return level
    return None


def all_scores(study: Study) -> Table:
    """Every treatment's every score, mean and standard deviation over seeds."""
    return _every_metric(study, "all_scores", "Every score", tables.memory_notes(study))


def differences(study: Study) -> Table:
    """Every treatment's difference to the dense runs, paired by seed, with 95 % intervals."""
    title = "Differences to dense, paired by seed and step"
    return _every_metric(study, "differences", title, (PAIRED,), to_dense=True)


def _every_metric(
    study: Study, name: str, title: str, notes: Sequence[str], to_dense: bool = False
) -> Table:
    """Build a table of a row per cell and a column per metric."""
    metrics = {
        metric: Column(f"\u0394 {tables.metric_label(metric)}")
        if to_dense
        else Column(tables.metric_label(metric), better=tables.metric_better(about))
        for metric, about in study.metrics.items()
        # What held-out images get themselves is no score of a run: it stands in a note.
        if f"score.{metric}" in study.runs and not str(about.get("key")).endswith("_heldout")
    }
    rows: Rows = []
    for base in study.bases:
        known = ((key, base.any.first(key)) for key in ("guidance", "sampler"))
        protocol = ", ".join(f"{key} {value}" for key, value in known if value)
        about = f"{base.label}; {protocol}" if protocol else base.label
        for cell in base.routed if to_dense else base.cells:
            entries = (
                tables.difference(m, cell, base.dense) if to_dense else tables.score(m, cell)
                for m in metrics
            )
            rows.append((about, [cell.treatment, tables.steps(cell), *entries]))
    columns = (*Column.each("Tokens", "Steps", numeric=False), *metrics.values())
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


# --- resolutions: dense against routed with their multiply-adds -----------------------------------

_OURS = (
    Column("Model", numeric=False),
    Column("Tokens", decimals=0),
    *Column.each("Dense", "+ TREAD", "\u0394"),
    *Column.each("Dense GMACs", "Routed GMACs", decimals=3),
)
_MEMORY = ("NN-distance ratio, dense", "NN-distance ratio, + TREAD")
_PAPER = (
    Column("Paper", numeric=False, published=True),
    *Column.each("Paper dense", "Paper + TREAD", published=True),
    Column("Paper GMACs", numeric=False, published=True),
)
_MACS = "GMACs per image and forward pass, without attention matmuls as in the paper."


def high_res(study: Study) -> Table:
    """High resolution: dense against routed with their MACs (Table 4, first row)."""
    latents = [base for base in study.bases if base.any.first("data") == "latents"]
    fine = [base for base in latents if (token_count(base) or 0) >= 1024]
    found = [base for base in fine if base.any.first("config.task") != "text"]
    return _against(study, "high_res", "High resolution (Table 4)", "ImageNet-512", found)


def text(study: Study) -> Table:
    """Text to image: dense against routed with their MACs (Table 4, second row)."""
    found = [base for base in study.bases if base.any.first("config.task") == "text"]
    return _against(study, "text", "Text to image (Table 4)", "MS-COCO", found)


def _against(study: Study, name: str, title: str, task: str, bases: Sequence[Base]) -> Table:
    row = next(r for r in paper.rows("resolution") if r["task"] == task)
    costs = f"{row['dense_gmacs']} \u2192 {row['tread_gmacs']}"
    theirs = [f"{row['task']}, DiT-B/2, FID-10K", row["dense"], row["tread"], costs]
    rows = [(tables.heading(base, *base.pair()), [*_costs_row(base), *theirs]) for base in bases]
    notes = tables.paper_notes("resolution", PAIRED, _MACS, *tables.memory_notes(study))
    columns = (*_OURS, *tables.memory_columns(study, *_MEMORY), *_PAPER)
    return build(name, title, columns, rows, notes, [("none run", theirs)])


def tokens(study: Study) -> Table:
    """The same pictures cut into more tokens: does routing gain more?"""
    families: dict[tuple[str, ...], list[Base]] = {}
    for base in study.bases:
        about = [str(base.any.first(name)) for name in ("data", "objective", "scale")]
        families.setdefault((base.model.partition("/")[0], *about), []).append(base)
    rows: Rows = []
    for (model, data, *_), found in families.items():
        patches = {base.key: parse_size(str(base.any.first("size"))).patch for base in found}
        if len({base.model for base in found}) > 1:
            for base in sorted(found, key=lambda base: -patches[base.key]):
                shown = tables.after([cell for cell in base.pair() if cell] or base.cells)
                rows.append(
                    (
                        f"{model}, {data}: {tables.metric_label(base.metric)}{shown}",
                        _costs_row(base),
                    )
                )
    note = "Patch sizes share features, so their distances compare. The paper publishes none."
    notes = (PAIRED, _MACS, *tables.memory_notes(study), note)
    columns = (*_OURS, *tables.memory_columns(study, *_MEMORY))
    return build("tokens", "256 against 1024 tokens", columns, rows, notes)


def token_count(base: Base) -> int | None:
    """Return a base's image tokens from its weights' metadata; None without weights."""
    for path in (path for cell in base.cells for path in cell.runs["path"]):
        model = model_arguments(path) or {}
        # Somebody else may have written them.
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            patch = parse_size(str(model["size"])).patch
            height, width = model["input_size"]
            return (int(height) // patch) * (int(width) // patch)
    return None


def _costs_row(base: Base) -> list[Value]:
    dense, routed = base.pair()
    full = base.any.estimate("macs_dense_no_attention")
    sparse = routed.estimate("macs_routed_no_attention") if routed else None
    scores = [*(tables.score(base.metric, cell) for cell in (dense, routed))]
    scores.append(tables.difference(base.metric, routed, dense))
    costs = (macs.mean / 1e9 if macs else None for macs in (full, sparse))
    return [base.label, token_count(base), *scores, *costs, *tables.memory(base, dense, routed)]
