"""One folder that shows what runs gave: tables, figures, the runs as CSV, their records, a page.

`python -m analysis publish RUNS --out results` writes everything but the sentences. A page keeps
its own text; between `<!-- table NAME -->`, `<!-- finding NAME -->` (analysis/findings.py) or
`<!-- facts -->` and the next `<!-- end -->` stands what the runs say. `<!-- table NAME ours
columns=0,2,3 -->` leaves out rows that only the paper has, and columns; `group=START` keeps the
groups whose heading starts so, `flat` has headings as notes, `of=results/MORE.tar.gz` takes other
records than the folder's. `<!-- finding NAME having=WORD -->`
says the sentences of groups whose name holds the word.
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
from analysis.archives import PUBLISHED, unpack
from analysis.errors import AnalysisError
from analysis.machines import machine_lines
from analysis.results import Results, results_for_command
from analysis.tables.cost import benchmarks
from analysis.tables.render import frame_csv
from analysis.tables.table import NOT_RUN, Row, Table, markdown, markdown_escape
from experiments.runtime.errors import ROOT
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
# Columns of the runs that say nothing outside this machine.
_LOCAL = ("path", "root", "config_keys", "shared_config")


def publish(results: Results, folder: Path, pages: Sequence[Path] = ()) -> list[str]:
    """Write tables, figures, `runs.csv` and `runs.tar.gz`; return the tables' and figures' names.

    The blocks of the Markdown files in the folder and of `pages` are filled in. Without a finished
    run, or where a page asks for what does not exist, nothing is written: `AnalysisError`.
    """
    if results.runs.empty:
        raise AnalysisError("no finished run to publish; python -m analysis list RUNS says why")
    filled = {}
    for page, text in _pages(folder, pages).items():
        filled[page] = fill(text, results)
    covered = []
    for table in tables.make_all(results):
        if table.covered:
            covered.append(table.only(ours=True))
    tables.save(covered, folder / "tables")
    plots = figures.make_all(results)
    figures.save(plots, folder / "figures")
    runs = results.runs.drop(columns=list(_LOCAL), errors="ignore").dropna(axis=1, how="all")
    atomic_write(folder / "runs.csv", without_paths(frame_csv(runs).encode(), results))
    files = {}
    for name, path in records(results).items():
        content = path.read_bytes()
        # A picture or an array is kept byte by byte.
        is_binary = name.endswith((".png", ".npz"))
        files[name] = content if is_binary else without_paths(content, results)
    atomic_write(folder / ARCHIVE, archive(files))
    for page, text in filled.items():
        atomic_write(page, text)
    return [table.name for table in covered] + [plot.name for plot in plots]


def _pages(folder: Path, more: Sequence[Path]) -> dict[Path, str]:
    """Return the texts of the folder's own pages and of further ones."""
    texts = {}
    for page in [*sorted(folder.glob("*.md")), *more]:
        try:
            texts[page] = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise AnalysisError(f"{page} is no page; name Markdown files in UTF-8") from None
    return texts


def _root(results: Results) -> Path:
    return results.roots[0] if results.roots else Path("runs")


def records(results: Results) -> dict[str, Path]:
    """Return what goes into the archive: name in it to file."""
    root = _root(results)
    files = {}
    for path in benchmarks(results):
        files[f"runs/{path.relative_to(root)}"] = path
    lowest_seed = results.runs["seed"].dropna().min()
    names = Counter(results.runs["run"])
    for path, seed in zip(results.runs["path"], results.runs["seed"], strict=True):
        run = Path(str(path))
        # One configuration that was trained twice has two folders of one name.
        name = run.name if names[run.name] == 1 else os.path.relpath(run, root)
        for record in RECORDS + (PICTURES if str(seed) == str(lowest_seed) else ()):
            if (run / record).is_file():
                files[f"runs/{name}/{record}"] = run / record
        for evaluation in sorted((run / "evaluations").glob("*.json")):
            files[f"runs/{name}/evaluations/{evaluation.name}"] = evaluation
    return files


def without_paths(content: bytes, results: Results) -> bytes:
    """Return a file's content with the folder of the runs, which is one machine's, as `runs`."""
    return content.replace(str(_root(results).absolute()).encode(), b"runs")


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


# --- blocks of a page -----------------------------------------------------------------------------


def fill(text: str, results: Results) -> str:
    """Return a page with its blocks filled in."""

    def replace_block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_block(match[2], results)}\n{match[3]}"

    openings, blocks = (len(re.findall(form, text)) for form in (_OPENING, _BLOCK))
    if openings != blocks:  # all the page's own text up to the next end would be lost
        raise AnalysisError(
            f"a page opens {openings} blocks and ends {blocks}; put <!-- end --> behind each"
        )
    return _BLOCK.sub(replace_block, text)


def _block(request: str, results: Results) -> str:
    """Return the body of a block such as `table main ours of=results/ablations.tar.gz`."""
    kind, *arguments = request.split()
    if kind == "facts":
        # The name of a machine or a commit may hold anything.
        lines = [f"- {markdown_escape(line)}\n" for line in machine_lines(results.runs)]
        return "".join(lines)
    source, options = results, []
    for argument in arguments:
        if argument.startswith("of="):
            source = _archived(ROOT / argument.removeprefix("of="))
        else:
            options.append(argument)
    name, *options = options or [""]
    if kind == "table":
        return _table(name, options, source)
    subjects = []
    for option in options:
        if not option.startswith("having="):
            raise AnalysisError(
                f"a page asks for finding {name} {' '.join(options)}; options are `having=WORD` "
                "(of a setting) and `of=ARCHIVE`"
            )
        subjects.append(option.removeprefix("having="))
    return findings.make(name, source, subjects) + "\n"


@functools.lru_cache(maxsize=8)
def _archived(archive: Path) -> Results:
    return Results.of(unpack(archive, ROOT / PUBLISHED))


def _table(name: str, options: list[str], results: Results) -> str:
    table = tables.make(name, results)
    # Groups are asked for by their heading before headings become notes.
    for option in sorted(options, key=_option_order):
        if option.startswith("columns="):
            columns = option.removeprefix("columns=").split(",")
            table = table.only(tables.column_indices(table, columns))
        elif option == "flat":
            rows = tuple(row._replace(group="") for row in table.rows)
            table = dataclasses.replace(table, rows=rows, notes=(*table.groups, *table.notes))
        else:
            table = _filtered(table, option)
    # The page has headings of its own.
    return markdown(table.only()).split("\n", 2)[2]


def _option_order(option: str) -> tuple[bool, bool]:
    return option == "flat", option.startswith("columns=")


def _filtered(table: Table, option: str) -> Table:
    """Return the table with the rows that an option keeps."""
    kind, _, text = option.partition("=")

    def is_kept(row: Row) -> bool:
        if option == "ours":
            return row.group != NOT_RUN
        return row.group.startswith(text) if kind == "group" else text in row.group

    if option != "ours" and kind not in ("group", "having"):
        raise AnalysisError(
            f"a page asks for table {table.name} {option}; options are `ours`, `flat`, "
            "`group=START`, `having=WORD` (of a group's heading), `columns=0,2,3` and `of=ARCHIVE`"
        )
    return dataclasses.replace(table, rows=tuple(filter(is_kept, table.rows)))


def command(options: argparse.Namespace) -> int:
    """Publish a folder of runs."""
    names = publish(results_for_command(options), options.out, options.pages)
    print(f"{options.out}  {', '.join(names)}")
    return 0
