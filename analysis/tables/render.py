"""A table as LaTeX (pandas Styler, booktabs, siunitx), CSV or HTML, escaped, and its files."""

import functools
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
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
# Content of `preamble.tex`, which the tables need.
PREAMBLE = r"""\usepackage{array,booktabs,graphicx,longtable,siunitx}
\sisetup{detect-all,separate-uncertainty=true,group-digits=false}
"""
PAGE_WIDTH = 6.8  # inches of text in a line of `tables.tex`
LONGEST_FLOAT = 40  # rows that fit a page beside caption and notes
MOST_COLUMNS = 8  # of one LaTeX table: others go on in further ones
NARROW = 3  # columns that fit one column of a page of two
ONE_COLUMN = 3.5  # inches of a line up to which tables fit one column of a page of two
ROWS_OF_A_COLUMN = 28  # of a float in one column, whose first entries may take two lines
_HEADING_CHARACTERS, _LONGEST_HEADING = 9, 18  # of a line of a heading: at least, at most
_FIRST_CHARACTERS = 22  # of the first column before it wraps, in one column of a page
_CHARACTER_POINTS = 4.6  # mean width of a character of \\footnotesize, on the safe side
_LONGEST_FIRST = 30  # characters of the first column of a `longtable` that count for its width
_COLUMN_CHARACTERS = 62  # of a line in one column of a page, at the size of `_COMPACT`
_COMPACT = r"\scriptsize\setlength{\tabcolsep}{3pt}"
_SMALL = r"\footnotesize\setlength{\tabcolsep}{4pt}"
# Around a tabular: scaled down to the line, never up.
_FIT = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"


def latex_escape(text: str) -> str:
    """Return `text` safe in LaTeX; characters outside ASCII without a known command become `?`."""
    escaped = ""
    for character in " ".join(text.split()):
        printable = character.isascii() and character.isprintable()
        escaped += _LATEX.get(character, character if printable else "?")
    # No line break between a word and its arrow.
    return re.sub(r" (\$\\(?:up|down)arrow\$)", r"~\1", escaped)


def latex(table: Table, width: float = PAGE_WIDTH) -> str:
    """Return the table in LaTeX (needs `PREAMBLE`): several with its first column if it is wide.

    Args:
        table: What to write.
        width: Inches of text in a line. From `ONE_COLUMN` down the tables fit one column of a page
            of two: fewer columns of smaller type, and no `longtable`, which LaTeX refuses there.
    """
    compact = width <= ONE_COLUMN
    if compact:
        table = _without_usual_n(table)
    parts: list[str] = []
    for columns in _column_parts(table, compact):
        narrow = table.only([0, *columns])
        for part in _row_parts(narrow) if compact else [narrow]:
            parts.append(_latex_part(part, width, compact, continued=bool(parts)))
    return "% Needs the packages of preamble.tex; tables.tex compiles it.\n" + "\n".join(parts)


def _column_parts(table: Table, compact: bool) -> list[list[int]]:
    """Return the columns of each LaTeX table but the first column, which all of them have.

    A dense column and the routed one beside it stay in the same table.
    """
    if not compact:
        columns, most = list(range(1, len(table.columns))), MOST_COLUMNS - 1
        return [columns[i : i + most] for i in range(0, len(columns), most)] or [[]]
    units: list[list[int]] = []
    for index, column in enumerate(table.columns):
        is_routed = re.search("TREAD|Routed|tail", column.label) is not None
        if index > 1 and is_routed and "dense" in table.columns[index - 1].label.lower():
            units[-1].append(index)
        elif index > 0:
            units.append([index])
    parts: list[list[int]] = [[]]
    first = min(_longest(table, 0), _FIRST_CHARACTERS)
    for unit in units:
        characters = first + sum(_longest(table, index) + 2 for index in [*parts[-1], *unit])
        if parts[-1] and characters > _COLUMN_CHARACTERS:
            parts.append([])
        parts[-1] += unit
    return parts


def _longest(table: Table, index: int) -> int:
    """Return the characters of a column's longest entry or line of its heading."""
    lines = _heading_lines(table, index)
    return max(_longest_entry(table, index), *map(len, lines), 0)


def _longest_entry(table: Table, index: int) -> int:
    return max((len(plain(row.entries[index])) for row in table.rows), default=0)


def _row_parts(table: Table) -> list[Table]:
    """Return the table in parts of at most `ROWS_OF_A_COLUMN` rows, notes below the last."""
    starts = range(0, max(1, len(table.rows)), ROWS_OF_A_COLUMN)
    parts = []
    for start in starts:
        rows = table.rows[start : start + ROWS_OF_A_COLUMN]
        notes = table.notes if start == starts[-1] else ()
        parts.append(replace(table, rows=rows, notes=notes))
    return parts


def _without_usual_n(table: Table) -> Table:
    """Return the table without the number of seeds that most entries share: a note says it."""
    counts: Counter[str] = Counter()
    for row in table.rows:
        counts.update(entry.seeds for entry in row.entries if entry.n is not None)
    if not counts:
        return table
    usual, _ = counts.most_common(1)[0]
    rows = []
    for row in table.rows:
        entries = []
        for entry in row.entries:
            hide = entry.n is not None and entry.seeds == usual and not entry.few
            entries.append(replace(entry, n=None, of=None) if hide else entry)
        rows.append(Row(row.group, tuple(entries)))
    notes = (f"n = {usual} seeds unless noted.", *table.notes)
    return replace(table, rows=tuple(rows), notes=notes)


def _latex_part(table: Table, width: float, compact: bool, continued: bool) -> str:
    """Return a `longtable` where the table is long, else a float.

    A float that is wider than its line is scaled down to it; the columns of a `longtable` share the
    line, and their entries wrap.
    """
    count, long = len(table.columns), len(table.rows) > LONGEST_FLOAT and not compact
    lines: list[list[str]] = []
    for group, rows in itertools.groupby(table.rows, key=lambda row: row.group):
        if group:
            lines.append([_group_heading(group, count), *[""] * (count - 1)])
        for row in rows:
            lines.append(list(map(_latex_entry, row.entries)))
    heads = [_latex_heading(table, index) for index in range(count)]
    styler = pd.DataFrame(lines, columns=heads, dtype=object).style.hide(axis="index")
    fits_column = compact or count <= NARROW
    environment = "longtable" if long else ("table" if fits_column else "table*")
    text = styler.to_latex(
        environment=environment,
        column_format="@{}" + "".join(_column_formats(table, long, compact, width)) + "@{}",
        caption=latex_escape(f"{table.title} (continued)" if continued else table.title),
        label=None if continued else f"tab:{table.name.replace('_', '-')}",
        hrules=True,
    )
    # A group's heading spans the row: its empty cells are removed.
    text = re.sub(r"(?m)^(\\multicolumn\{\d+\}\{@.*?)(?: +&)+ +\\\\$", r"\1 \\\\", text)
    notes = " ".join(map(latex_escape, table.notes))
    below = rf"\par\smallskip\noindent\parbox{{\linewidth}}{{\scriptsize {notes}}}" if notes else ""
    if long:
        text = f"{{{_SMALL}\n{text}{below}\\par}}"
    else:
        text = text.replace(r"\begin{tabular}", _FIT + "\n" + r"\begin{tabular}")
        text = text.replace(r"\end{tabular}", r"\end{tabular}}" + below)
        text = text.replace(
            rf"\begin{{{environment}}}",
            rf"\begin{{{environment}}}\centering{_COMPACT if compact else _SMALL}",
        )
    return text.strip() + "\n"


def _heading_lines(table: Table, index: int) -> list[str]:
    """Return the lines of a column's heading, hardly longer than its entries.

    `heldout_loss` may break after the underscore.
    """
    words = head(table.columns[index]).replace("_", "_ ")
    longest = min(_longest_entry(table, index), _LONGEST_HEADING)
    width = max(_HEADING_CHARACTERS, longest)
    lines = textwrap.wrap(words, width, break_long_words=False)
    return [line.replace("_ ", "_") for line in lines]


def _latex_heading(table: Table, index: int) -> str:
    text = r"\\".join(map(latex_escape, _heading_lines(table, index)))
    return rf"\shortstack[{'r' if table.columns[index].numeric else 'l'}]{{{text}}}"


def _group_heading(group: str, count: int) -> str:
    box = r">{\raggedright\arraybackslash}p{0.94\linewidth}"
    return rf"\multicolumn{{{count}}}{{@{{}}{box}@{{}}}}{{\emph{{{latex_escape(group)}}}}}"


def _shares(table: Table, width: float) -> list[float]:
    """Return each column's share of a line of so many inches, in a `longtable`.

    Every column gets its longest word, as words do not break; the rest goes to those whose entries
    are longer than a word.
    """
    least, wanted = [], []
    for index in range(len(table.columns)):
        words = _heading_lines(table, index)
        for row in table.rows:
            words.extend(plain(row.entries[index]).split())
        # The space between columns takes about two characters from each.
        least.append(max(map(len, words), default=0) + 2)
        wanted.append(max(_longest(table, index) + 2, least[-1]))
    wanted[0] = max(min(wanted[0], _LONGEST_FIRST), least[0])
    spare = max(0.0, width * 72 / _CHARACTER_POINTS - sum(least))
    missing = sum(wanted) - sum(least)
    portion = min(1.0, spare / missing) if missing else 0.0
    lengths = []
    for length, longer in zip(least, wanted, strict=True):
        lengths.append(length + portion * (longer - length))
    return [length / sum(lengths) for length in lengths]


def _column_formats(table: Table, long: bool, compact: bool, width: float) -> list[str]:
    """Return the kind of each column; those of a `longtable` share the line by their entries."""
    formats = []
    shares = _shares(table, width)
    for index, column in enumerate(table.columns):
        longest = _longest_entry(table, index)
        side = "left" if column.numeric else "right"
        if long:
            box = rf"\dimexpr{shares[index]:.4f}\linewidth-2\tabcolsep\relax"
            formats.append(rf">{{\ragged{side}\arraybackslash}}p{{{box}}}")
        elif compact and longest > _FIRST_CHARACTERS and not column.numeric:
            formats.append(r">{\raggedright\arraybackslash}p{1.05in}")
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
    options, text_width = "", f"textwidth={width}in"
    if width <= ONE_COLUMN:
        # A page of two columns of that width.
        options, text_width = "[twocolumn]", f"textwidth={2 * width + 0.2}in,columnsep=0.2in"
    page = rf"\usepackage[a4paper,{text_width},vmargin=1.8cm]{{geometry}}"
    return (
        f"\\documentclass{options}{{article}}\n{page}\n\\input{{preamble}}\n"
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
    """Return the table as an HTML fragment; `data-value` holds what a sort goes by."""
    # Not by pandas' Styler: it has one tbody, no cells that span columns and no attributes of
    # cells but classes, while the report sorts numbers within groups below a heading of their own.
    return TEMPLATES.get_template("table.html").render(table=table, head=head, plain=plain)


def write(table: Table, folder: str | Path, width: float = PAGE_WIDTH) -> list[Path]:
    """Write a table in each format as `folder/<name>.<format>`; return the paths."""
    in_latex = functools.partial(latex, width=width)
    formats: dict[str, Callable[[Table], str]] = {
        "md": markdown,
        "tex": in_latex,
        "csv": to_csv,
        "html": to_html,
    }
    paths = []
    for suffix, render in formats.items():
        path = Path(folder) / f"{table.name}.{suffix}"
        atomic_write(path, render(table))
        paths.append(path)
    return paths
