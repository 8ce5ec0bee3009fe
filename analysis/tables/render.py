"""A table as LaTeX (booktabs, siunitx), CSV or HTML, escaped for each, and its files."""

from __future__ import annotations

import csv
import html
import io
import math
from pathlib import Path

import pandas as pd

from analysis.runs.run_records import AnalysisError
from analysis.tables.table import Column, Entry, Row, Table, head, markdown, plain
from experiments.runtime.files import atomic_write
from routing.errors import suggest

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "`": r"{\`{}}",
    "\u2020": r"$^\dagger$", "\u00b1": r"$\pm$", "\u2212": r"$-$", "\u00d7": r"$\times$",
    "\u0394": r"$\Delta$", "\u2192": r"$\rightarrow$", "\u2026": r"\dots{}", "\u00b7": r"$\cdot$",
    "\u2191": r"$\uparrow$", "\u2193": r"$\downarrow$",
}  # fmt: skip
# Rows that fit a landscape page beside caption and notes.
_PAGE_LINES = 28


def latex_escape(text: str) -> str:
    """Return `text` safe in LaTeX; characters outside ASCII without a known command become `?`."""
    flat = " ".join(text.split())
    return "".join(
        _LATEX.get(char, char if char.isascii() and char.isprintable() else "?") for char in flat
    )


def latex(table: Table) -> str:
    """Return LaTeX `table`s (they need graphicx, booktabs and siunitx: see `preamble`).

    A float that is taller than a page is lost, so a long table continues in further floats, split
    between groups where it can be.
    """
    parts = _pages(table)
    return "\n".join(
        _latex_float(table, rows, first=i == 0, last=i == len(parts) - 1)
        for i, rows in enumerate(parts)
    )


def _pages(table: Table) -> list[list[Row]]:
    pages: list[list[Row]] = [[]]
    for group in table.groups:
        rows = [row for row in table.rows if row.group == group]
        lines = len(pages[-1]) + 2 * len({row.group for row in pages[-1]})
        if pages[-1] and lines + len(rows) + 2 > _PAGE_LINES:
            pages.append([])
        while rows:
            pages[-1] += rows[:_PAGE_LINES]
            rows = rows[_PAGE_LINES:]
            if rows:
                pages.append([])
    return pages


def _latex_float(table: Table, rows: list[Row], first: bool, last: bool) -> str:
    spec = "".join("r" if column.numeric else "l" for column in table.columns)
    heads = " & ".join(latex_escape(head(column)) for column in table.columns)
    label = rf"\label{{tab:{table.name.replace('_', '-')}}}" if first else ""
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{latex_escape(table.title + ('' if first else ' (continued)'))}}}{label}",
        r"  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"  \begin{{tabular}}{{{spec}}}",
        r"    \toprule",
        rf"    {heads} \\",
        r"    \midrule",
    ]
    group = None
    for row in rows:
        if row.group and row.group != group:
            if group is not None:
                lines.append(r"    \addlinespace")
            group = row.group
            width = len(table.columns)
            lines.append(rf"    \multicolumn{{{width}}}{{l}}{{\emph{{{latex_escape(group)}}}}} \\")
        lines.append("    " + " & ".join(_latex_entry(entry) for entry in row.entries) + r" \\")
    lines += [r"    \bottomrule", r"  \end{tabular}}"]
    if table.notes and last:
        notes = " ".join(latex_escape(note) for note in table.notes)
        box = rf"\begin{{minipage}}{{\linewidth}}\footnotesize {notes}\end{{minipage}}"
        lines.append(rf"  \par\smallskip{box}")
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def preamble() -> str:
    """Return the LaTeX lines that the tables need."""
    return "\n".join(
        [
            r"\usepackage{graphicx,booktabs,siunitx}",
            r"\sisetup{detect-all,separate-uncertainty=true,group-digits=false}",
        ]
    )


def document(tables: list[Table]) -> str:
    """Return a whole LaTeX document with the given tables."""
    body = "\n".join(latex(table) + "\\clearpage" for table in tables)
    head_ = (
        "\\documentclass{article}\n\\usepackage[a4paper,landscape,margin=1.5cm]{geometry}\n"
        + preamble()
    )
    return f"{head_}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"


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
        text += rf" {{\scriptsize ($n=${entry.seeds}){mark}}}"
    return text + (" " + latex_escape(entry.text) if entry.text else "")


def _num(text: str, signed: bool) -> str:
    return rf"\num[retain-explicit-plus]{{{text}}}" if signed else rf"\num{{{text}}}"


def to_csv(table: Table) -> str:
    """Return CSV: text per word column; value, std, low, high, n and text per numeric one."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    header = ["group"]
    for column in table.columns:
        parts = ("", " std", " low", " high", " n", " note") if column.numeric else ("",)
        header += [column.label + part for part in parts]
    writer.writerow(header)
    for row in table.rows:
        line: list[object] = [_safe(row.group)]
        for column, entry in zip(table.columns, row.entries, strict=True):
            if column.numeric:
                line += [_raw(v) for v in (entry.value, entry.std, entry.low, entry.high)]
                line += ["" if entry.n is None else entry.n, _safe(entry.text)]
            else:
                line.append(_safe(plain(entry)))
        writer.writerow(line)
    return stream.getvalue()


def _raw(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else repr(float(value))


def _safe(text: str) -> str:
    # A spreadsheet runs what starts like a formula; a signed number is none. A bare carriage return
    # would start a row of its own: only line feeds are quoted.
    text = text.replace("\r", "\n")
    if not text.startswith(("=", "+", "-", "@", "\t", "\n")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def frame_csv(frame: pd.DataFrame) -> str:
    """Return a data frame as CSV; texts that a spreadsheet would run get a leading apostrophe."""
    safe = frame.rename(columns=_safe)
    for name in safe.select_dtypes(exclude=["number", "bool"]):
        safe[name] = [_safe(value) if isinstance(value, str) else value for value in safe[name]]
    return str(safe.to_csv(index=False, lineterminator="\n"))


def to_html(table: Table) -> str:
    """Return the table as an HTML fragment; `data-value` holds what a sort goes by."""
    heads = "".join(
        f'<th scope="col" class="{_classes(c)}" aria-sort="none">'
        f'<button type="button">{html.escape(head(c))}</button></th>'
        for c in table.columns
    )
    lines = [
        f'<table class="data" id="table-{html.escape(table.name)}">',
        f"<thead><tr>{heads}</tr></thead>",
    ]
    for group in table.groups:
        lines.append("<tbody>")
        if group:
            lines.append(
                f'<tr class="group"><th colspan="{len(table.columns)}" scope="rowgroup">'
                f"{html.escape(group)}</th></tr>"
            )
        for row in table.rows:
            if row.group == group:
                cells = zip(table.columns, row.entries, strict=True)
                lines.append("<tr>" + "".join(_html_entry(c, e) for c, e in cells) + "</tr>")
        lines.append("</tbody>")
    return "\n".join([*lines, "</table>"])


def _classes(column: Column) -> str:
    return " ".join(
        ["num" if column.numeric else "text", *(["published"] if column.published else [])]
    )


def _html_entry(column: Column, entry: Entry) -> str:
    classes = _classes(column)
    for flag, name in ((entry.best, "best"), (entry.few, "few"), (entry.is_missing, "missing")):
        classes += f" {name}" if flag else ""
    value = "" if entry.value is None else f' data-value="{entry.value!r}"'
    return f'<td class="{classes}"{value}>{html.escape(plain(entry))}</td>'


FORMATS = {"md": markdown, "tex": latex, "csv": to_csv, "html": to_html}


def write(
    table: Table, folder: str | Path, formats: tuple[str, ...] = ("md", "tex", "csv", "html")
) -> list[Path]:
    """Write a table in each format as `folder/<name>.<format>`; return the paths.

    Raises:
        AnalysisError: if a format is not one of md, tex, csv, html.
    """
    for name in formats:
        if name not in FORMATS:
            raise AnalysisError(
                f"no format {name!r}; formats are {', '.join(FORMATS)}{suggest(name, FORMATS)}"
            )
    paths = [Path(folder) / f"{table.name}.{name}" for name in formats]
    for path, name in zip(paths, formats, strict=True):
        atomic_write(path, FORMATS[name](table))
    return paths
