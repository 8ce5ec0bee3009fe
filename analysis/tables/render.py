"""A table as LaTeX (booktabs, siunitx), CSV or HTML, escaped for each, and its files."""

import itertools
import math
import re
import textwrap
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.tables.table import Entry, Row, Table, head, markdown, plain
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
PREAMBLE = r"""\usepackage{array,booktabs,siunitx}
\sisetup{detect-all,separate-uncertainty=true,group-digits=false}
"""
# Inches: of a page's text, of a letter in \footnotesize, between columns, of wrapped text.
PAGE_WIDTH, _LETTER, _GAP, _WRAPPED = 6.8, 0.058, 0.11, 1.6
# Lines that fit a page beside caption and notes, letters in a line of wrapped text.
_PAGE_LINES, _WRAP = 48, 26


def latex_escape(text: str) -> str:
    """Return `text` safe in LaTeX; characters outside ASCII without a known command become `?`."""
    flat = " ".join(text.split())
    return "".join(_LATEX.get(c, c if c.isascii() and c.isprintable() else "?") for c in flat)


def latex(table: Table, width: float = PAGE_WIDTH) -> str:
    """Return LaTeX `table`s for a page with `width` inches of text (they need `PREAMBLE`).

    Nothing is scaled down: columns beyond the width of the page continue in further floats, each
    with the first column; so do rows, since a float that is taller than a page is lost.
    """
    parts = [(part, rows) for part in _split(table, width) for rows in _pages(part)]
    floats = [_latex_float(part, rows, width, i > 0) for i, (part, rows) in enumerate(parts)]
    if table.notes:
        notes = " ".join(latex_escape(note) for note in table.notes)
        box = rf"\begin{{minipage}}{{\linewidth}}\scriptsize {notes}\end{{minipage}}"
        floats[-1].insert(-1, rf"  \par\smallskip{box}")
    lines = ["% Needs the packages of preamble.tex; tables.tex compiles it."]
    return "\n".join(lines + [line for made in floats for line in [*made, ""]])


def _heads(table: Table, place: int) -> list[str]:
    """Return a column's heading in lines that are no longer than its entries need."""
    longest = max((len(plain(row.entries[place])) for row in table.rows), default=0)
    return textwrap.wrap(head(table.columns[place]), max(11, min(longest, _WRAP))) or [""]


def _width(table: Table, place: int) -> float:
    """Return the inches that a column takes with the space beside it."""
    texts = [*_heads(table, place), *(plain(row.entries[place]) for row in table.rows)]
    longest = max(map(len, texts))
    if not table.columns[place].numeric and longest > _WRAP:
        return _WRAPPED + _GAP
    return longest * _LETTER + _GAP


def _split(table: Table, width: float) -> list[Table]:
    """Return the table in parts that are no wider, each with the first column."""
    widths = [_width(table, place) for place in range(len(table.columns))]
    parts = _filled(widths, width)
    # As few parts as there must be, of even widths: no column stands alone that need not.
    even = [_filled(widths, width * share) for share in (0.5, 0.6, 0.7, 0.8, 0.9)]
    parts = next((found for found in even if len(found) == len(parts)), parts)
    # Where rows that miss every number were left out, each part leaves out its own.
    trimmed = len(table.only(ours=True).rows) == len(table.rows)
    return [table.only(places, ours=trimmed) for places in parts]


def _filled(widths: list[float], limit: float) -> list[list[int]]:
    parts, left = [[0]], limit - widths[0]
    for place, own in enumerate(widths[1:], 1):
        if own > left and len(parts[-1]) > 1:
            parts.append([0])
            left = limit - widths[0]
        parts[-1].append(place)
        left -= own
    return parts


def _pages(table: Table) -> list[list[Row]]:
    """Return the rows that each float holds; a group stays together where it can."""
    pages: list[list[Row]] = [[]]
    left = _PAGE_LINES
    for group in table.groups:
        rows = [row for row in table.rows if row.group == group]
        tall = {id(row): -(-max(len(e.text) for e in row.entries) // _WRAP) or 1 for row in rows}
        left -= 3
        if sum(tall.values()) > left:
            left = 0
        for row in rows:
            if tall[id(row)] > left and pages[-1]:
                pages.append([])
                left = _PAGE_LINES - 3
            left -= tall[id(row)]
            pages[-1].append(row)
    return pages


def _latex_float(part: Table, rows: list[Row], page: float, continued: bool) -> list[str]:
    places = range(len(part.columns))
    widths = [_width(part, place) for place in places]
    width = min(page, max(sum(widths), 3.2))
    ragged = r">{\raggedright\arraybackslash}p"
    spec = "".join(
        "r" if column.numeric else f"{ragged}{{{_WRAPPED}in}}" if own == _WRAPPED + _GAP else "l"
        for column, own in zip(part.columns, widths, strict=True)
    )
    texts = [r"\\".join(map(latex_escape, _heads(part, place))) for place in places]
    sides = ("r" if column.numeric else "l" for column in part.columns)
    heads = [rf"\shortstack[{s}]{{{text}}}" for s, text in zip(sides, texts, strict=True)]
    label = "" if continued else rf"\label{{tab:{part.name.replace('_', '-')}}}"
    caption = latex_escape(part.title + (" (continued)" if continued else ""))
    # Beyond one column of a page of two.
    kind = "table*" if width > page / 2 - 0.1 else "table"
    lines = [
        rf"\begin{{{kind}}}",
        r"  \centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"  \caption{{{caption}}}{label}",
        rf"  \begin{{tabular}}{{@{{}}{spec}@{{}}}}",
        r"    \toprule",
        rf"    {' & '.join(heads)} \\",
        r"    \midrule",
    ]
    box = rf"\multicolumn{{{len(places)}}}{{@{{}}{ragged}{{{width - 0.05:.2f}in}}@{{}}}}"
    for group, own_rows in itertools.groupby(rows, key=lambda row: row.group):
        if group:
            lines += [r"    \addlinespace"] * (lines[-1] != r"    \midrule")
            lines.append(rf"    {box}{{\emph{{{latex_escape(group)}}}}} \\")
        for row in own_rows:
            lines.append("    " + " & ".join(map(_latex_entry, row.entries)) + r" \\")
    return [*lines, r"    \bottomrule", r"  \end{tabular}", rf"\end{{{kind}}}"]


def document(tables: list[Table], width: float = PAGE_WIDTH) -> str:
    """Return a whole LaTeX document, `tables.tex`, of the files beside it."""
    body = "".join(rf"\input{{{table.name}}}\clearpage" + "\n" for table in tables)
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
        low, high = (_num(entry.number(bound), entry.signed) for bound in (entry.low, entry.high))
        text += rf" {{\footnotesize [{low}, {high}]}}"
    if entry.n is not None:
        mark = r"$^\dagger$" if entry.few else ""
        text += rf" {{\scriptsize ($n{{=}}${entry.seeds}){mark}}}"
    return text + (" " + latex_escape(entry.text) if entry.text else "")


def _num(text: str, signed: bool) -> str:
    return rf"\num[retain-explicit-plus]{{{text}}}" if signed else rf"\num{{{text}}}"


def to_csv(table: Table) -> str:
    """Return CSV: text per word column; value, std, low, high, n and text per numeric one."""

    def number(value: float | None, kind: type = float) -> str:
        return "" if value is None or not math.isfinite(value) else str(kind(value))

    heads, columns = ["group"], [[row.group for row in table.rows]]
    for place, column in enumerate(table.columns):
        entries = [row.entries[place] for row in table.rows]
        if not column.numeric:
            heads.append(column.label)
            columns.append([plain(entry) for entry in entries])
            continue
        heads += [f"{column.label}{part}" for part in ("", " std", " low", " high", " n", " note")]
        for part in ("value", "std", "low", "high"):
            columns.append([number(getattr(entry, part)) for entry in entries])
        columns.append([number(entry.n, int) for entry in entries])
        columns.append([entry.text for entry in entries])
    frame = pd.DataFrame(zip(*columns, strict=True), dtype=str)
    return frame_csv(frame.set_axis(heads, axis="columns"))


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


def write(table: Table, folder: str | Path, width: float = PAGE_WIDTH) -> list[Path]:
    """Write a table in each format as `folder/<name>.<format>`; return the paths."""
    made = {"md": markdown(table), "tex": latex(table, width)}
    made |= {"csv": to_csv(table), "html": to_html(table)}
    paths = [Path(folder) / f"{table.name}.{suffix}" for suffix in made]
    for path, text in zip(paths, made.values(), strict=True):
        atomic_write(path, text)
    return paths
