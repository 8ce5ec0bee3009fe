"""Tables over all treatments: every score, every paired difference, and what others measured."""

from __future__ import annotations

from analysis.runs.cells import Base, Study
from analysis.tables import paper
from analysis.tables.headings import PAIRED, gap, metric_decimals, steps
from analysis.tables.memorisation import Memory
from analysis.tables.table import Column, Table, build, missing, ours, published, words


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
    metrics = _metrics(study)
    columns = [Column("Tokens", numeric=False), Column("Steps", numeric=False)]
    columns += [Column(name, better=better) for name, better in metrics.items()]
    rows = []
    for base in study.bases:
        for cell in base.cells:
            scores = [
                ours(cell.estimate(f"score.{name}"), metric_decimals(name)) for name in metrics
            ]
            rows.append((_protocol(base), [words(cell.treatment), words(steps(cell)), *scores]))
    if not rows:
        rows = [("", [words("none run"), words(""), *[missing() for _ in metrics]])]
    return build("all_scores", "Every score", columns, rows, Memory.of(study).notes)


def _protocol(base: Base) -> str:
    cell = base.any
    return f"{base.label}; guidance {cell.first('guidance')}, sampler {cell.first('sampler')}"


def differences(study: Study) -> Table:
    """Every treatment's difference to the dense runs, paired by seed, with 95 % intervals."""
    metrics = _metrics(study)
    columns = [Column("Tokens", numeric=False), Column("Steps", numeric=False)]
    columns += [Column(f"\u0394 {name}") for name in metrics]
    rows = []
    for base in study.bases:
        for cell in base.routed:
            entries = [words(cell.treatment), words(steps(cell))]
            for name in metrics:
                estimate = gap(cell, base.dense, f"score.{name}")
                entries.append(ours(estimate, metric_decimals(name), signed=True))
            rows.append((_protocol(base), entries))
    if not rows:
        rows = [("", [words("none run"), words(""), *[missing() for _ in metrics]])]
    title = "Differences to dense, paired by seed and step"
    return build("differences", title, columns, rows, (PAIRED,))


def followups(study: Study) -> Table:
    """What others measured with token routing."""
    columns = (
        Column("Method", numeric=False),
        Column("FID", better="lower", published=True),
        Column("Batches/s", better="higher", published=True),
    )
    rows = []
    for row in paper.rows("followups"):
        speed = published(row["batches_per_s"], text="")
        rows.append(
            (
                f"{row['setup']} ({row['source']})",
                [words(row["method"]), published(row["fid"]), speed],
            )
        )
    note = "Each project's own protocol: compare within a group only."
    return build("followups", "What others measured", columns, rows, (note,))
