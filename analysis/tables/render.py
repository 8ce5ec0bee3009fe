"""A table as LaTeX (pandas Styler, booktabs, siunitx), CSV or HTML, escaped, and its files."""

import itertools
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.tables.table import Column, Entry, Table, head, markdown, plain
from experiments.runtime.files import atomic_write

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "`": r"{\`{}}",
    "\u2020": r"$^\dagger$", "\u00b1": r"$\pm$", "\u2212": r"$-$", "\u00d7": r"$\times$",
    "\u0394": r"$\Delta$", "\u2192": r"$\rightarrow$", "\u2026": r"\dots{}", "\u00b7": r"$\cdot$",
    "\u2191": r"$\uparrow$", "\u2193": r"$\downarrow$",
}  # fmt: skip
# Content of `preamble.tex`, which the tables need.
PREAMBLE = r"""\usepackage{array,booktabs,graphicx,longtable,siunitx}
\sisetup{detect-all,separate-uncertainty=true,group-digits=false}
"""
LONGEST_FLOAT = 40  # rows that fit a page beside caption and notes
# Columns of one LaTeX table, the first included: others go on in further ones. A `longtable` cannot
# be scaled down to its line.
MOST_COLUMNS, MOST_LONG_COLUMNS = 7, 4
NARROW = 3  # columns that fit one column of a page of two
_LONGEST_LINE = 34  # characters of an entry of text; longer ones wrap
_LONGEST_HEADING = 18  # characters of a line of a heading
_SMALL = r"\footnotesize\setlength{\tabcolsep}{4pt}"
# Around a tabular: scaled down to the line, never up.
_FIT = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
# Of `tables.tex`, which shows all tables.
_DOCUMENT = r"""\documentclass{article}
\usepackage[a4paper,textwidth=6.8in,vmargin=1.8cm]{geometry}
\input{preamble}
\begin{document}
%s\end{document}
"""


def latex_escape(text: str) -> str:
    """Return `text` safe in LaTeX; characters outside ASCII without a known command become `?`."""
    escaped = ""
    for character in " ".join(text.split()):
        printable = character.isascii() and character.isprintable()
        escaped += _LATEX.get(character, character if printable else "?")
    # No line break between a word and its arrow.
    return re.sub(r" (\$\\(?:up|down)arrow\$)", r"~\1", escaped)


def latex(table: Table) -> str:
    """Return the table in LaTeX (needs `PREAMBLE`): several with its first column if it is wide."""
    text = "% Needs the packages of preamble.tex; tables.tex compiles it.\n"
    columns = range(1, len(table.columns))
    is_long = len(table.rows) > LONGEST_FLOAT
    most = MOST_LONG_COLUMNS if is_long else MOST_COLUMNS
    parts = max(1, math.ceil(len(columns) / (most - 1)))
    for number, indices in enumerate(np.array_split(columns, parts)):
        part = table.only([0, *indices])
        text += _latex_part(part, is_long, continued=number > 0)
    return text


def _latex_part(table: Table, is_long: bool, continued: bool) -> str:
    """Return a `longtable`, or a float that is no wider than its line."""
    count = len(table.columns)
    lines: list[list[str]] = []
    for group, rows in itertools.groupby(table.rows, key=lambda row: row.group):
        if group:
            lines.append([_group_heading(group, count), *[""] * (count - 1)])
        for row in rows:
            lines.append(list(map(_latex_entry, row.entries)))
    frame = pd.DataFrame(lines, columns=list(map(_latex_heading, table.columns)), dtype=object)
    floating = "table" if count <= NARROW else "table*"
    text = frame.style.hide(axis="index").to_latex(
        environment="longtable" if is_long else floating,
        position_float=None if is_long else "centering",
        column_format=_column_format(table),
        caption=latex_escape(f"{table.title} (continued)" if continued else table.title),
        label=None if continued else f"tab:{table.name.replace('_', '-')}",
        hrules=True,
    )
    # A group's heading spans the row: its empty cells are removed.
    text = re.sub(r"(?m)^(\\multicolumn\{\d+\}\{@.*?)(?: +&)+ +\\\\$", r"\1 \\\\", text)
    notes = " ".join(map(latex_escape, table.notes))
    below = rf"\par\smallskip\noindent\parbox{{\linewidth}}{{\scriptsize {notes}}}" if notes else ""
    if is_long:
        return f"{{{_SMALL}\n{text}{below}\\par}}\n"
    text = text.replace(r"\begin{tabular}", f"{_SMALL}{_FIT}\n\\begin{{tabular}}")
    return text.replace(r"\end{tabular}", r"\end{tabular}}" + below)


def _latex_heading(column: Column) -> str:
    lines = textwrap.wrap(
        head(column), _LONGEST_HEADING, break_long_words=False, break_on_hyphens=False
    )
    text = r"\\".join(map(latex_escape, lines))
    return rf"\shortstack[{'r' if column.numeric else 'l'}]{{{text}}}"


def _group_heading(group: str, count: int) -> str:
    box = r">{\raggedright\arraybackslash}p{0.94\linewidth}"
    return rf"\multicolumn{{{count}}}{{@{{}}{box}@{{}}}}{{\emph{{{latex_escape(group)}}}}}"


def _column_format(table: Table) -> str:
    """Return `r` for each column of numbers, for texts `l`, or a paragraph where they are long."""
    formats = ""
    for index, column in enumerate(table.columns):
        if column.numeric:
            formats += "r"
        elif any(len(plain(row.entries[index])) > _LONGEST_LINE for row in table.rows):
            formats += r">{\raggedright\arraybackslash}p{2.2in}"
        else:
            formats += "l"
    return f"@{{}}{formats}@{{}}"


def document(tables: list[Table]) -> str:
    """Return a whole LaTeX document, `tables.tex`, of the files beside it."""
    return _DOCUMENT % "".join(rf"\input{{{table.name}}}\clearpage" + "\n" for table in tables)


def _latex_entry(entry: Entry) -> str:
    if entry.value is None:
        return latex_escape(entry.text)
    number = entry.number(entry.value)
    if entry.half is not None:
        number += f" +- {entry.half:.{entry.decimals}f}"
    text = _num(number, entry.signed) + latex_escape(entry.unit)
    if entry.best:
        text = rf"{{\bfseries\boldmath {text}}}"
    if entry.low is not None and entry.high is not None:
        low = _num(entry.number(entry.low), entry.signed)
        high = _num(entry.number(entry.high), entry.signed)
        text += rf" {{\footnotesize [{low}, {high}]}}"
    if entry.n is not None:
        mark = r"$^\dagger$" if entry.few else ""
        text += rf" {{\scriptsize ($n{{=}}${entry.seeds}){mark}}}"
    return text + (" " + latex_escape(entry.text) if entry.text else "")


def _num(text: str, signed: bool) -> str:
    return rf"\num[retain-explicit-plus]{{{text}}}" if signed else rf"\num{{{text}}}"


def to_csv(table: Table) -> str:
    """Return CSV: text per word column; value, std, low, high, n and text per numeric one."""
    columns = [pd.Series([row.group for row in table.rows], name="group", dtype=str)]
    for index, column in enumerate(table.columns):
        entries = [row.entries[index] for row in table.rows]
        if not column.numeric:
            columns.append(pd.Series(list(map(plain, entries)), name=column.label, dtype=str))
            continue
        for suffix, field in (("", "value"), (" std", "std"), (" low", "low"), (" high", "high")):
            numbers = pd.Series([getattr(entry, field) for entry in entries], dtype="float64")
            columns.append(numbers.rename(f"{column.label}{suffix}"))
        seeds = pd.Series([entry.n for entry in entries], dtype="Int64")
        texts = pd.Series([entry.text for entry in entries], dtype=str)
        columns += [seeds.rename(f"{column.label} n"), texts.rename(f"{column.label} note")]
    return frame_csv(pd.concat(columns, axis="columns"))


# A spreadsheet evaluates what starts like a formula. Signed numbers are harmless, our headings too,
# which readers know as they are; a metric's name is whoever's wrote the run.
_HARMLESS = re.compile(r"(?is)(?![=+\-@\t\n]).*|[+-][\d.]+(e[+-]?\d+)?|\+ (TREAD|tail)( \w+)?")


def _safe(text: str) -> str:
    # A bare carriage return would start a row of its own: only line feeds are quoted.
    text = text.replace("\r", "\n")
    return text if _HARMLESS.fullmatch(text) else f"'{text}"


def frame_csv(frame: pd.DataFrame) -> str:
    """Return a data frame as CSV; texts that a spreadsheet would run get a leading apostrophe."""
    safe = frame.map(lambda value: _safe(value) if isinstance(value, str) else value)
    safe = safe.rename(columns=lambda name: _safe(str(name)))
    return str(safe.to_csv(index=False, lineterminator="\n"))


# Pages and tables in HTML; every value is escaped.
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
)


def to_html(table: Table) -> str:
    """Return the table as an HTML fragment."""
    # Not by pandas' Styler, which has one tbody and no headings that span columns.
    return TEMPLATES.get_template("table.html").render(table=table, head=head, plain=plain)


def write(table: Table, folder: str | Path) -> list[Path]:
    """Write a table in each format as `folder/<name>.<format>`; return the paths."""
    formats: dict[str, Callable[[Table], str]] = {
        "md": markdown, "tex": latex, "csv": to_csv, "html": to_html,
    }  # fmt: skip
    paths = []
    for suffix, render in formats.items():
        path = Path(folder) / f"{table.name}.{suffix}"
        atomic_write(path, render(table))
        paths.append(path)
    return paths
