"""A table as LaTeX (pandas Styler, booktabs, siunitx), CSV or HTML, escaped, and its files."""

import itertools
import math
import re
import textwrap
from pathlib import Path

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
# What the tables need, `preamble.tex`.
PREAMBLE = r"""\usepackage{array,booktabs,graphicx,longtable,siunitx}
\sisetup{detect-all,separate-uncertainty=true,group-digits=false}
"""
PAGE_WIDTH = 6.8  # inches of text in a line of `tables.tex`
LONGEST_FLOAT = 40  # rows that fit a page beside caption and notes
MOST_COLUMNS = 8  # of one LaTeX table: others go on in further ones
NARROW = 3  # columns that fit one column of a page of two
_SMALL = r"\footnotesize\setlength{\tabcolsep}{4pt}"
# Around a tabular: scaled down to the line, never up.
_FIT = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"


def latex_escape(text: str) -> str:
    """Return `text` safe in LaTeX; characters outside ASCII without a known command become `?`."""
    escaped = ""
    for character in " ".join(text.split()):
        printable = character.isascii() and character.isprintable()
        escaped += _LATEX.get(character, character if printable else "?")
    return escaped


def latex(table: Table) -> str:
    """Return the table in LaTeX (needs `PREAMBLE`): several with its first column if it is wide."""
    parts = []
    for start in range(1, max(2, len(table.columns)), MOST_COLUMNS - 1):
        columns = range(len(table.columns))[start : start + MOST_COLUMNS - 1]
        parts.append(_latex_part(table.only([0, *columns]), continued=start > 1))
    return "% Needs the packages of preamble.tex; tables.tex compiles it.\n" + "\n".join(parts)


def _latex_part(table: Table, continued: bool) -> str:
    """Return a `longtable` where the table is long, else a float.

    A float that is wider than its line is scaled down to it; the columns of a `longtable` share the
    line, and their entries wrap.
    """
    count, long = len(table.columns), len(table.rows) > LONGEST_FLOAT
    lines: list[list[str]] = []
    for group, rows in itertools.groupby(table.rows, key=lambda row: row.group):
        if group:
            lines.append([_group_heading(group, count), *[""] * (count - 1)])
        for row in rows:
            lines.append(list(map(_latex_entry, row.entries)))
    heads = list(map(_latex_heading, table.columns))
    styler = pd.DataFrame(lines, columns=heads, dtype=object).style.hide(axis="index")
    environment = "longtable" if long else ("table" if count <= NARROW else "table*")
    text = styler.to_latex(
        environment=environment,
        column_format="@{}" + "".join(_column_formats(table, long)) + "@{}",
        caption=latex_escape(f"{table.title} (continued)" if continued else table.title),
        label=None if continued else f"tab:{table.name.replace('_', '-')}",
        hrules=True,
    )
    # A group's heading takes the place of the empty cells beside it.
    text = re.sub(r"(?m)^(\\multicolumn\{\d+\}\{@.*?)(?: +&)+ +\\\\$", r"\1 \\\\", text)
    notes = " ".join(map(latex_escape, table.notes))
    below = rf"\par\smallskip\noindent\parbox{{\linewidth}}{{\scriptsize {notes}}}" if notes else ""
    if long:
        text = f"{{{_SMALL}\n{text}{below}\\par}}"
    else:
        text = text.replace(r"\begin{tabular}", _FIT + "\n" + r"\begin{tabular}")
        text = text.replace(r"\end{tabular}", r"\end{tabular}}" + below)
        text = text.replace(
            rf"\begin{{{environment}}}", rf"\begin{{{environment}}}\centering{_SMALL}"
        )
    return text.strip() + "\n"


def _latex_heading(column: Column) -> str:
    """Return a column's heading, in lines that are hardly longer than a number."""
    text = r"\\".join(map(latex_escape, textwrap.wrap(head(column), 14)))
    return rf"\shortstack[{'r' if column.numeric else 'l'}]{{{text}}}"


def _group_heading(group: str, count: int) -> str:
    box = r">{\raggedright\arraybackslash}p{0.94\linewidth}"
    return rf"\multicolumn{{{count}}}{{@{{}}{box}@{{}}}}{{\emph{{{latex_escape(group)}}}}}"


def _column_formats(table: Table, long: bool) -> list[str]:
    """Return the kind of each column; those of a `longtable` share the line, two for the first."""
    formats = []
    for index, column in enumerate(table.columns):
        longest = max((len(plain(row.entries[index])) for row in table.rows), default=0)
        side = "left" if column.numeric else "right"
        if long:
            shares = f"{2 if index == 0 else 1}/{len(table.columns) + 1}"
            width = rf"\dimexpr\linewidth*{shares}-2\tabcolsep\relax"
            formats.append(rf">{{\ragged{side}\arraybackslash}}p{{{width}}}")
        elif longest > 26 and not column.numeric:
            formats.append(r">{\raggedright\arraybackslash}p{1.6in}")
        else:
            formats.append("r" if column.numeric else "l")
    return formats


def document(tables: list[Table], width: float = PAGE_WIDTH) -> str:
    """Return a whole LaTeX document, `tables.tex`, of the files beside it."""
    body = ""
    for table in tables:
        body += rf"\input{{{table.name}}}\clearpage" + "\n"
    page = rf"\usepackage[a4paper,textwidth={width}in,vmargin=1.8cm]{{geometry}}"
    return (
        f"\\documentclass{{article}}\n{page}\n\\input{{preamble}}\n"
        f"\\begin{{document}}\n{body}\\end{{document}}\n"
    )


def _latex_entry(entry: Entry) -> str:
    if entry.value is None:
        return latex_escape(entry.text)
    number = entry.number(entry.value)
    if entry.std is not None:
        number += f" +- {entry.std:.{entry.decimals}f}"
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


_CSV_SUFFIXES = ("", " std", " low", " high", " n", " note")


def to_csv(table: Table) -> str:
    """Return CSV: text per word column; value, std, low, high, n and text per numeric one."""
    columns = [pd.Series([row.group for row in table.rows], name="group", dtype=str)]
    for index, column in enumerate(table.columns):
        entries = [row.entries[index] for row in table.rows]
        if not column.numeric:
            columns.append(pd.Series(list(map(plain, entries)), name=column.label, dtype=str))
            continue
        numbers: dict[str, list[str]] = {
            suffix: [] for suffix in ("", " std", " low", " high", " n", " note")
        }
        for entry in entries:
            numbers[""].append(_csv_number(entry.value))
            numbers[" std"].append(_csv_number(entry.std))
            numbers[" low"].append(_csv_number(entry.low))
            numbers[" high"].append(_csv_number(entry.high))
            numbers[" n"].append("" if entry.n is None else str(entry.n))
            numbers[" note"].append(entry.text)
        for suffix, texts in numbers.items():
            columns.append(pd.Series(texts, name=f"{column.label}{suffix}", dtype=str))
    return frame_csv(pd.concat(columns, axis="columns"))


def _csv_number(value: float | None) -> str:
    """Return a number so that it round-trips; nothing for one that is absent or not finite."""
    return "" if value is None or not math.isfinite(value) else str(float(value))


# A spreadsheet runs what starts like a formula. A signed number is none, nor are our own headings,
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
    """Return the table as an HTML fragment; `data-value` holds what a sort goes by."""
    return TEMPLATES.get_template("table.html").render(table=table, head=head, plain=plain)


def write(table: Table, folder: str | Path) -> list[Path]:
    """Write a table in each format as `folder/<name>.<format>`; return the paths."""
    formats = {"md": markdown, "tex": latex, "csv": to_csv, "html": to_html}
    paths = []
    for suffix, render in formats.items():
        path = Path(folder) / f"{table.name}.{suffix}"
        atomic_write(path, render(table))
        paths.append(path)
    return paths
