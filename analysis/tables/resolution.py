"""High resolution, text to image, 256 against 1024 tokens (TREAD, Table 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analysis.runs.cells import Base, Study
from analysis.runs.run_files import model_arguments
from analysis.tables import paper
from analysis.tables.score_entries import (
    PAIRED,
    Memory,
    after,
    difference,
    heading,
    paper_notes,
    score,
)
from analysis.tables.table import (
    NOT_RUN,
    Column,
    Entry,
    Table,
    build,
    missing,
    not_run,
    published,
    words,
)
from backbones.sizes import parse_size

_OURS = (
    Column("Model", numeric=False),
    Column("Tokens"),
    Column("Dense"),
    Column("+ TREAD"),
    Column("\u0394"),
    Column("Dense GMACs"),
    Column("Routed GMACs"),
)
_MEMORY = ("Memorisation, dense", "Memorisation, + TREAD")
_PAPER = (
    Column("Paper", numeric=False, published=True),
    Column("Paper dense", published=True),
    Column("Paper + TREAD", published=True),
    Column("Paper GMACs", numeric=False, published=True),
)
_MACS = "GMACs per image and forward pass, without attention matmuls as in the paper."


def high_res(study: Study) -> Table:
    """High resolution: dense against routed with their MACs (Table 4, first row)."""
    return _against(study, "high_res", "High resolution (Table 4)", "ImageNet-512", _is_high_res)


def text(study: Study) -> Table:
    """Text to image: dense against routed with their MACs (Table 4, second row)."""
    return _against(study, "text", "Text to image (Table 4)", "MS-COCO", _is_text)


def tokens(study: Study) -> Table:
    """The same pictures cut into more tokens: does routing gain more?"""
    memory = Memory.of(study)
    families: dict[tuple[str, ...], list[Base]] = {}
    for base in study.bases:
        cell = base.any
        letter = str(cell.first("size")).partition("/")[0]
        key = (
            *(str(cell.first(name)) for name in ("backbone", "data", "objective", "scale")),
            letter,
        )
        families.setdefault(key, []).append(base)
    rows = []
    for (backbone, data, *_, letter), found in families.items():
        if len({base.any.first("size") for base in found}) > 1:
            for base in sorted(
                found, key=lambda base: parse_size(str(base.any.first("size"))).patch, reverse=True
            ):
                steps = after([cell for cell in base.pair() if cell] or base.cells)
                head = f"{backbone}-{letter}, {data}: {base.metric}{steps}"
                rows.append((head, _ours(base, memory)))
    note = "Patch sizes share features, so their distances compare. The paper publishes none."
    columns = (*_OURS, *memory.columns(*_MEMORY))
    about = (PAIRED, _MACS, *memory.notes, note)
    rows = rows or [not_run(columns)]
    return build("tokens", "256 against 1024 tokens", columns, rows, about)


def _is_text(base: Base) -> bool:
    return str(base.any.first("config.task")) == "text"


def _is_high_res(base: Base) -> bool:
    count = token_count(base)
    return not _is_text(base) and (count or 0) >= 1024 and str(base.any.first("data")) == "latents"


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
        (heading(base, *base.pair()), [*_ours(base, memory), *_paper(row)])
        for base in study.bases
        if chosen(base)
    ]
    columns = (*_OURS, *memory.columns(*_MEMORY), *_PAPER)
    rows = rows or [not_run(columns, _paper(row), group=NOT_RUN)]
    notes = paper_notes("resolution", PAIRED, _MACS, *memory.notes)
    return build(name, title, columns, rows, notes)


def _ours(base: Base, memory: Memory) -> list[Entry]:
    dense, routed = base.pair()
    full = base.any.estimate("macs_dense_no_attention")
    sparse = routed.estimate("macs_routed_no_attention") if routed else None
    count = token_count(base)
    macs = [Entry(value=e.mean / 1e9, decimals=3) if e else missing() for e in (full, sparse)]
    return [
        words(f"{base.any.first('backbone')}-{base.any.first('size')} on {base.any.first('data')}"),
        missing() if count is None else Entry(value=count, decimals=0),
        score(base, dense),
        score(base, routed),
        difference(base, routed, dense),
        *macs,
        *memory.entries(base, dense, routed),
    ]


def _paper(row: dict[str, Any]) -> list[Entry]:
    costs = f"{row['dense_gmacs']} \u2192 {row['tread_gmacs']}"
    return [
        words(f"{row['task']}, DiT-B/2, FID-10K"),
        published(row["dense"]),
        published(row["tread"]),
        words(costs),
    ]
