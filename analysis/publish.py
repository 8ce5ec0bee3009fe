"""One folder that shows what runs gave: tables, figures, the runs as CSV, their records, a page.

`python -m analysis publish RUNS --out results` writes everything but the sentences. A page keeps
its own text; between `<!-- table NAME -->`, `<!-- finding NAME -->` (analysis/findings.py) or
`<!-- facts -->` and the next `<!-- end -->` stands what the runs say. `<!-- table NAME ours
columns=0,2,3 -->` leaves out rows that only the paper has, and columns; `group=START` keeps the
groups whose heading starts so, `flat` has headings as notes, `of=results/MORE.tar.gz` takes other
records than the folder's. `<!-- finding NAME having=WORD -->`
says the sentences of settings whose name holds the word.
"""

import argparse
import dataclasses
import functools
import gzip
import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis import figures, findings, tables
from analysis.runs.archives import PUBLISHED, unpack
from analysis.runs.cells import Study, study_for_command
from analysis.runs.run_files import json_or_nothing
from analysis.runs.run_records import AnalysisError
from analysis.tables.equal_cost import benchmarks
from analysis.tables.render import frame_csv
from analysis.tables.table import NOT_RUN, markdown, markdown_escape
from experiments.runtime.command import ROOT
from experiments.runtime.files import atomic_write

# What a run leaves but for its weights: enough for every table.
RECORDS = (
    "config.yaml", "env.json", "status.json", "summary.json", "scores.jsonl", "metrics.jsonl",
    "guidance_scale.json",
)  # fmt: skip
# Of the lowest seed alone: they are most of the bytes and say the same for each seed.
PICTURES = ("similarity.npz", "samples/final.png")
ARCHIVE = "runs.tar.gz"
_OPENING = r"(<!-- (table [^>]*?|finding [^>]*?|facts) -->\n)"
_BLOCK = re.compile(_OPENING + r".*?(<!-- end -->)", re.DOTALL)


def publish(study: Study, folder: Path, pages: Sequence[Path] = ()) -> list[str]:
    """Write tables, figures, `runs.csv` and `runs.tar.gz`; return the tables' and figures' names.

    The blocks of the Markdown files in the folder and of `pages` are filled in. Without a finished
    run, or where a page asks for what does not exist, nothing is written: `AnalysisError`.
    """
    if study.runs.empty:
        raise AnalysisError("no finished run to publish; python -m analysis list RUNS says why")
    filled = {page: fill(text, study) for page, text in _pages(folder, pages).items()}
    given = [table.only(ours=True) for table in tables.make_all(study) if table.covered]
    tables.save(given, folder / "tables")
    plots = figures.make_all(study)
    figures.save(plots, folder / "figures")
    rows = study.runs.drop(columns=["path"], errors="ignore").dropna(axis="columns", how="all")
    atomic_write(folder / "runs.csv", neutral(frame_csv(rows).encode(), study))
    files = {name: path.read_bytes() for name, path in records(study).items()}
    for name, content in files.items():
        if not name.endswith((".png", ".npz")):  # a picture or an array is kept byte by byte
            files[name] = neutral(content, study)
    atomic_write(folder / ARCHIVE, archive(files))
    for page, text in filled.items():
        atomic_write(page, text)
    return [table.name for table in given] + [plot.name for plot in plots]


def _pages(folder: Path, more: Sequence[Path]) -> dict[Path, str]:
    """Return the texts of the folder's own pages and of further ones."""
    found = {}
    for page in [*sorted(folder.glob("*.md")), *more]:
        try:
            found[page] = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise AnalysisError(f"{page} is no page; name Markdown files in UTF-8") from None
    return found


def records(study: Study) -> dict[str, Path]:
    """Return what goes into the archive: name in it to file."""
    root = Path(str(study.runs.attrs.get("root", "")))
    found = {f"runs/{path.relative_to(root)}": path for path in benchmarks(study)}
    first = study.runs["seed"].dropna().min()
    known = Counter(study.runs["run"])
    for path, seed in zip(study.runs["path"], study.runs["seed"], strict=True):
        run = Path(str(path))
        # One configuration that was trained twice has two folders of one name.
        place = run.name if known[run.name] == 1 else os.path.relpath(run, root)
        for name in RECORDS + (PICTURES if str(seed) == str(first) else ()):
            if (run / name).is_file():
                found[f"runs/{place}/{name}"] = run / name
        for later in sorted((run / "evaluations").glob("*.json")):
            found[f"runs/{place}/evaluations/{later.name}"] = later
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
        kind, *words = match[2].split()
        archives = [word.removeprefix("of=") for word in words if word.startswith("of=")]
        of = _archived(ROOT / archives[-1]) if archives else study
        name, *options = [word for word in words if not word.startswith("of=")] or [""]
        if kind == "table":
            body = _table(name, options, of)
        elif kind == "facts":  # what a machine or a commit is called may hold anything
            body = "".join(f"- {markdown_escape(line)}\n" for line in facts(study))
        elif all(word.startswith("having=") for word in options):
            having = [word.removeprefix("having=") for word in options]
            body = findings.make(name, of, having) + "\n"
        else:
            raise AnalysisError(
                f"a page asks for finding {name} {' '.join(options)}; options are `having=WORD` "
                "(of a setting) and `of=ARCHIVE`"
            )
        return f"{match[1]}\n{body}\n{match[3]}"

    openings, blocks = (len(re.findall(form, text)) for form in (_OPENING, _BLOCK))
    if openings != blocks:  # all the page's own text up to the next end would be lost
        raise AnalysisError(
            f"a page opens {openings} blocks and ends {blocks}; put <!-- end --> behind each"
        )
    return _BLOCK.sub(block, text)


@functools.lru_cache(maxsize=8)
def _archived(archive: Path) -> Study:
    return Study.of(unpack(archive, ROOT / PUBLISHED))


def _table(name: str, options: list[str], study: Study) -> str:
    table = tables.make(name, study)
    # Headings are asked for by name before they become notes.
    for word in sorted(options, key=lambda word: (word == "flat", word.startswith("columns="))):
        kind, _, text = word.partition("=")
        if kind == "columns":
            table = table.only(tables.places(table, text.split(",")))
            continue
        if word == "ours":
            rows = [row for row in table.rows if row.group != NOT_RUN]
        elif kind == "group":
            rows = [row for row in table.rows if row.group.startswith(text)]
        elif kind == "having":
            rows = [row for row in table.rows if text in row.group]
        elif word == "flat":
            rows = [row._replace(group="") for row in table.rows]
            table = dataclasses.replace(table, notes=(*table.groups, *table.notes))
        else:
            raise AnalysisError(
                f"a page asks for table {name} {word}; options are `ours`, `flat`, `group=START`, "
                "`having=WORD` (of a group's heading), `columns=0,2,3` and `of=ARCHIVE`"
            )
        table = dataclasses.replace(table, rows=tuple(rows))
    # The page has headings of its own.
    return markdown(table.only()).split("\n", 2)[2]


def facts(study: Study) -> list[str]:
    """Say from which code, machine and versions the runs came, in a few lines."""
    about = [json_or_nothing(Path(str(path)) / "env.json") for path in study.runs["path"]]
    lines = [f"{len(about)} finished runs"]
    keys = {"commit": "git", "device": "device", "Python": "python", "torch": "packages"}
    for label, key in (keys | {"threads": "threads"}).items():
        values = [entry.get(key) for entry in about]
        if key == "packages":
            values = [packages.get("torch") for packages in values if isinstance(packages, dict)]
        counts = Counter(str(value) for value in values if value is not None)
        texts = [f"{value} ({count} runs)" for value, count in counts.most_common()]
        said = next(iter(counts)) if len(counts) == 1 else ", ".join(texts)
        lines.append(f"{label}: {said or 'not recorded'}")
    return lines


def command(options: argparse.Namespace) -> int:
    """Publish a folder of runs."""
    given = publish(study_for_command(options), options.out, options.pages)
    print(f"{options.out}  {', '.join(given)}")
    return 0
