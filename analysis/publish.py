"""One folder that shows what runs gave: tables, figures, the runs as CSV, their records, a page.

`python -m analysis publish RUNS --out results` writes everything but the sentences. A page keeps
its own text; between `<!-- table NAME -->` or `<!-- facts -->` and the next `<!-- end -->` stands
what the runs say. `<!-- table NAME ours columns=0,2,3 -->` leaves out rows that only the paper has,
and columns; `group=START` keeps the groups whose heading starts so.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import re
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis import figures, tables
from analysis.runs.run_records import AnalysisError
from analysis.runs.study import Study
from analysis.tables.render import frame_csv, markdown, markdown_escape
from analysis.tables.table import FEW_NOTE, MISSING_NOTE, NOT_RUN, Row, Table
from experiments.runtime.files import atomic_write
from routing.plain import json_of

# What a run leaves but for its weights: enough for every table.
RECORDS = (
    "config.yaml",
    "env.json",
    "status.json",
    "summary.json",
    "scores.jsonl",
    "metrics.jsonl",
)
# Of the lowest seed alone: they are most of the bytes and say the same for each seed.
PICTURES = ("similarity.npz", "samples/final.png")
ARCHIVE = "runs.tar.gz"
_COLUMNS = re.compile(r"columns=(\d+(?:,\d+)*)")
_BLOCK = re.compile(r"(<!-- (table [^>]*?|facts) -->\n).*?(<!-- end -->)", re.DOTALL)


def publish(study: Study, folder: Path, pages: Sequence[Path] = ()) -> list[str]:
    """Write tables, figures, `runs.csv` and `runs.tar.gz`, and fill in the pages.

    Args:
        study: The runs.
        folder: Where to write.
        pages: Markdown files whose blocks are filled in, beside the folder's README.md.

    Returns:
        Names of the tables and figures that the runs give.

    Raises:
        AnalysisError: If there is no finished run, or a page asks for a table that does not exist.
    """
    if study.runs.empty:
        raise AnalysisError("no finished run to publish; python -m analysis list RUNS says why")
    filled = [
        (page, fill(page.read_text(encoding="utf-8"), study)) for page in _pages(folder, pages)
    ]
    given = [table for table in tables.make_all(study) if table.covered]
    tables.save(given, folder / "tables")
    plots = figures.make_all(study)
    figures.save(plots, folder / "figures")
    rows = study.runs.drop(columns=["path"], errors="ignore").dropna(axis="columns", how="all")
    atomic_write(folder / "runs.csv", neutral(frame_csv(rows).encode(), study))
    files = {
        # A picture or an array is kept byte by byte.
        name: content if name.endswith((".png", ".npz")) else neutral(content, study)
        for name, path in records(study).items()
        for content in [path.read_bytes()]
    }
    atomic_write(folder / ARCHIVE, archive(files))
    for page, text in filled:
        atomic_write(page, text)
    return [table.name for table in given] + [plot.name for plot in plots]


def _pages(folder: Path, more: Sequence[Path]) -> list[Path]:
    own = folder / "README.md"
    missing = [page for page in more if not page.is_file()]
    if missing:
        raise AnalysisError(f"no page {missing[0]}; name Markdown files that are there")
    return [*([own] if own.is_file() else []), *more]


def records(study: Study) -> dict[str, Path]:
    """Return what goes into the archive: name in it to file."""
    root = Path(str(study.runs.attrs.get("root", "")))
    found = {f"runs/{path.name}": path for path in root.glob("bench*.json")}
    first = study.runs["seed"].min()
    for path, seed in zip(study.runs["path"], study.runs["seed"], strict=True):
        run = Path(str(path))
        for name in RECORDS + (PICTURES if seed == first else ()):
            if (run / name).is_file():
                found[f"runs/{run.name}/{name}"] = run / name
        for later in sorted((run / "evaluations").glob("*.json")):
            found[f"runs/{run.name}/evaluations/{later.name}"] = later
    return found


def neutral(content: bytes, study: Study) -> bytes:
    """Return a file's content with the folder of the runs, which is one machine's, as `runs`."""
    root = Path(str(study.runs.attrs.get("root", "runs"))).absolute()
    return content.replace(str(root).encode(), b"runs")


def archive(files: Mapping[str, bytes]) -> bytes:
    """Pack contents under the names given; the same bytes for the same contents."""
    stream = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=stream, mode="wb", mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def fill(text: str, study: Study) -> str:
    """Return a page with its blocks filled in."""

    def block(match: re.Match[str]) -> str:
        what = match[2].split()
        body = facts(study) if what == ["facts"] else _table(what[1:], study)
        return f"{match[1]}\n{body}\n{match[3]}"

    return _BLOCK.sub(block, text)


def _table(words: list[str], study: Study) -> str:
    name, *options = words or [""]
    table = tables.make(name, study)
    for word in options:
        if word == "ours":
            rows = tuple(row for row in table.rows if row.group != NOT_RUN)
            table = dataclasses.replace(table, rows=rows)
        elif word.startswith("group="):
            rows = tuple(row for row in table.rows if row.group.startswith(word[len("group=") :]))
            table = dataclasses.replace(table, rows=rows)
        elif word.startswith("having="):
            rows = tuple(row for row in table.rows if word[len("having=") :] in row.group)
            table = dataclasses.replace(table, rows=rows)
        elif found := _COLUMNS.fullmatch(word):
            table = _cut(table, [int(number) for number in found[1].split(",")])
        else:
            raise AnalysisError(
                f"a page asks for table {name} {word}; options are `ours`, `group=START`, "
                "`having=WORD` (of a group's heading) and `columns=0,2,3`"
            )
    shown = [entry for row in table.rows for entry in row.entries]
    idle = {MISSING_NOTE} if not any(entry.is_missing for entry in shown) else set()
    if not any(entry.few for entry in shown):
        idle.add(FEW_NOTE)
    table = dataclasses.replace(table, notes=tuple(n for n in table.notes if n not in idle))
    # The page has headings of its own.
    return markdown(table).split("\n", 2)[2]


def _cut(table: Table, places: Sequence[int]) -> Table:
    if max(places) >= len(table.columns):
        raise AnalysisError(
            f"a page asks for column {max(places)} of table {table.name}, which has 0 to "
            f"{len(table.columns) - 1}"
        )
    columns = tuple(table.columns[place] for place in places)
    rows = tuple(Row(row.group, tuple(row.entries[p] for p in places)) for row in table.rows)
    return dataclasses.replace(table, columns=columns, rows=rows)


def facts(study: Study) -> str:
    """Say from which code, machine and versions the runs came, as a Markdown list."""
    about = [_read(Path(str(path)) / "env.json") for path in study.runs["path"]]
    hours = float(study.runs["wall_s"].fillna(0).sum()) / 3600
    lines = [f"- {len(about)} finished runs, {hours:.1f} hours of training in all"]
    for key, label in (("git", "commit"), ("device", "device"), ("python", "Python")):
        lines.append(f"- {label}: {_counted([entry.get(key) for entry in about])}")
    versions = [dict(entry.get("packages") or {}) for entry in about]
    lines.append(f"- torch: {_counted([entry.get('torch') for entry in versions])}")
    lines.append(f"- threads: {_counted([entry.get('threads') for entry in about])}")
    return markdown_list(lines)


def markdown_list(lines: Sequence[str]) -> str:
    """Return lines that may hold anything as Markdown that shows them as they are."""
    return "\n".join(f"- {markdown_escape(line[2:])}" for line in lines) + "\n"


def _counted(values: list[Any]) -> str:
    counts = Counter(str(value) for value in values if value is not None).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{value} ({count} runs)" for value, count in counts) or "not recorded"


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json_of(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
