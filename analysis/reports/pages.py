"""`python -m analysis pages`: fill the generated blocks of README.md and results/*.md.

Between an opening such as `<!-- table NAME -->` and the next `<!-- end -->` is text generated from
the runs; all else in a page is its own text. What opens a block:

    table NAME      `ours` leaves out rows that only the paper has, `group=START` keeps the groups
                    whose heading starts so, `having=WORD` those whose heading holds the word,
                    `flat` turns headings into notes, `columns=0,2,3` chooses columns
    facts           from which code and machines the runs came
    study NAME TABLE    a table of results/studies/NAME.py

The first two read results/runs.tar.gz, or `of=results/MORE.tar.gz`.
"""

import argparse
import dataclasses
import functools
import importlib
import re
import sys
from collections import Counter
from pathlib import Path

import pandas as pd

from analysis import tables
from analysis.comparison.results import Results
from analysis.errors import AnalysisError, pick
from analysis.runs.archives import PUBLISHED, unpack
from analysis.runs.run_files import read_environment
from analysis.tables.table import NOT_RUN, markdown, markdown_escape, markdown_rows
from experiments.runtime.errors import ROOT
from experiments.runtime.files import atomic_write

_OPENING = r"(<!-- ((?:table|facts|study)\b[^>]*?) -->\n)"
_BLOCK = re.compile(_OPENING + r".*?(<!-- end -->)", re.DOTALL)
_STUDIES = "results.studies"
# Label of a line and the key in env.json.
_FACTS = {
    "commit": "git", "device": "device", "Python": "python", "torch": "torch", "threads": "threads",
}  # fmt: skip


def command(options: argparse.Namespace) -> int:
    """Fill the blocks of the pages from the published records."""
    results = archived(ROOT / "results" / "runs.tar.gz")
    for page in [ROOT / "README.md", *sorted((ROOT / "results").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        filled = fill(text, results)
        if filled != text:
            atomic_write(page, filled)
            print(f"{page}  filled in")
    return 0


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
    if kind == "study":
        return _study_table(*arguments)
    source, options = results, []
    for argument in arguments:
        if argument.startswith("of="):
            source = archived(ROOT / argument.removeprefix("of="))
        else:
            options.append(argument)
    if kind == "facts":
        # The name of a machine or a commit may hold anything.
        lines = [f"- {markdown_escape(line)}\n" for line in machine_lines(source.runs)]
        return "".join(lines)
    name, *options = options or [""]
    return _table(name, options, source)


def machine_lines(runs: pd.DataFrame) -> list[str]:
    """Return the number of runs, then a line per property of the machines that they ran on."""
    counts: dict[str, Counter[str]] = {label: Counter() for label in _FACTS}
    for path in runs["path"]:
        environment = read_environment(Path(str(path)))
        for label, key in _FACTS.items():
            value = environment.get(key)
            if value is not None:
                counts[label][str(value)] += 1
    lines = [f"{len(runs)} finished runs"]
    for label, values in counts.items():
        texts = [f"{value} ({count} runs)" for value, count in values.most_common()]
        text = next(iter(values)) if len(values) == 1 else ", ".join(texts)
        lines.append(f"{label}: {text or 'not recorded'}")
    return lines


def _study_table(study: str, table: str) -> str:
    """Return a table of `results/studies/STUDY.py`."""
    scripts = (ROOT / _STUDIES.replace(".", "/")).glob("*.py")
    pick("study", study, {path.stem: path for path in scripts})
    if str(ROOT) not in sys.path:  # started outside the checkout
        sys.path.insert(0, str(ROOT))
    frame = importlib.import_module(f"{_STUDIES}.{study}").table(table)
    return markdown_rows(list(frame), frame.to_numpy())


@functools.lru_cache(maxsize=8)
def archived(archive: Path) -> Results:
    """Return the results of an archive of records."""
    return Results.of(unpack(archive, ROOT / PUBLISHED))


def _table(name: str, options: list[str], results: Results) -> str:
    """Return a table after its options, which apply in the order that they are written in."""
    table = tables.make(name, results)
    for option in options:
        kind, _, text = option.partition("=")
        rows, notes = table.rows, table.notes
        if option == "ours":
            rows = tuple(row for row in rows if row.group != NOT_RUN)
        elif kind == "group":
            rows = tuple(row for row in rows if row.group.startswith(text))
        elif kind == "having":
            rows = tuple(row for row in rows if text in row.group)
        elif option == "flat":
            rows = tuple(row._replace(group="") for row in rows)
            notes = (*table.groups, *notes)
        elif kind != "columns":
            raise AnalysisError(
                f"a page asks for table {name} {option}; options are `ours`, `group=START`, "
                "`having=WORD` (of a group's heading), `flat`, `columns=0,2,3` and `of=ARCHIVE`"
            )
        table = dataclasses.replace(table, rows=rows, notes=notes)
        if kind == "columns":
            table = table.only(tables.column_indices(table, text.split(",")))
    # Without the table's title: the page has its own heading.
    return markdown(table.only()).split("\n", 2)[2]
