"""The numbers of the published tables: mean, spread, interval and n of every cell, from the committed records.

Hours and speed-ups are left out: what a shared machine took says nothing about routing.

REGENERATE=1 python -m pytest tests/analysis/test_pinned_numbers.py writes the file anew, after a change on purpose.
"""

from __future__ import annotations

import csv
import os
import re

import pytest
from suite import DATA, RESULTS, write_tables

from analysis.runs.archives import unpack

PINNED = DATA / "published_numbers.tsv"
# The tables of each archive that a page or results/tables shows.
TABLES = {
    "runs": ("main", "summary", "steps", "sota", "response", "guidance", "guidance_scale", "differences", "all_scores"),
    "third_machine": ("tails",),
    "ablations": ("treatments",),
    "control": ("treatments",),
    "placement": ("treatments",),
    "fig8": ("treatments",),
    "crossing": ("summary",),
    "scan_order": ("scan_order", "treatments"),
    "guidance": ("guidance", "response"),
    "digits": ("summary",),
}  # fmt: skip
LEFT_OUT = re.compile("hour|speed|throughput|images|seconds|time", re.IGNORECASE)
FIELDS = ("", " std", " low", " high", " n")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
# Labels that were reworded since the numbers were written down: old heading or row name, new one. The numbers stay.
RENAMED = {r"[Mm]emorisation(\S*)( \([\w-]+\))?( ↑)?$": r"NN-distance ratio\1\2"}  # the label, since 0.1


def rounded(text: str) -> str:
    return f"{float(text):.7g}"


def cells(path) -> dict[tuple[str, str], str]:
    """Return the numbers of every cell of a table by row and column, `mean std low high n` or those in its text.

    A row is named by its group and its columns of words, a column by its heading.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    headings = list(rows[0])
    numeric = [name for name in headings if f"{name} std" in headings]
    companions = {f"{name}{field}" for name in numeric for field in (*FIELDS, " note")}
    words = [name for name in headings if name not in companions]
    numbers = {}
    for row in rows:
        label = " | ".join(row[name] for name in words if row[name])
        for name in numeric:
            if LEFT_OUT.search(name) or LEFT_OUT.search(label):
                continue
            note = row[f"{name} note"]
            values = [rounded(row[name + field]) if row[name + field] else "-" for field in FIELDS]
            in_text = [rounded(number) for number in NUMBER.findall(note)]
            if values != ["-"] * len(FIELDS) or in_text:
                assert (label, name) not in numbers, f"{path.name} has two rows {label}"
                numbers[label, name] = " ".join(values + in_text)
    return numbers


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """Return the numbers by archive, table, row and column."""
    found = {}
    for archive, names in TABLES.items():
        folder = tmp_path_factory.mktemp(archive)
        write_tables(unpack(RESULTS / f"{archive}.tar.gz", folder), names, folder / "tables")
        for name in names:
            for (row, column), values in cells(folder / "tables" / f"{name}.csv").items():
                found[archive, name, row, column] = values
    return found


def regenerate(numbers) -> None:
    lines, previous = (["# archive, table, row; below them column, mean, std, low, high, n, numbers in the text"], None)
    for (archive, table, row, column), values in numbers.items():
        if (archive, table, row) != previous:
            previous = archive, table, row
            lines.append("\t".join(previous))
        lines.append(f"\t{column}\t{values}")
    PINNED.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pinned() -> dict[tuple[str, str, str, str], str]:
    numbers, place = {}, ()
    for line in PINNED.read_text(encoding="utf-8").splitlines()[1:]:
        fields = line.split("\t")
        for old, new in RENAMED.items():
            fields = [re.sub(old, new, field) for field in fields]
        if fields[0]:
            place = tuple(fields)
        else:
            numbers[*place, fields[1]] = fields[2]
    return numbers


def same(values: str, expected: str) -> bool:
    one, other = values.split(), expected.split()
    return len(one) == len(other) and all(
        a == b or "-" not in (a, b) and float(a) == pytest.approx(float(b), rel=1e-5, abs=1e-9)
        for a, b in zip(one, other, strict=True)
    )


def test_published_tables_keep_their_numbers(numbers):
    if os.environ.get("REGENERATE"):
        regenerate(numbers)
    expected = pinned()
    missing = [key for key in expected if key not in numbers]
    added = [key for key in numbers if key not in expected]
    assert (missing[:5], added[:5]) == ([], [])
    changed = {k: (expected[k], v) for k, v in numbers.items() if not same(v, expected[k])}
    assert dict(list(changed.items())[:5]) == {}


def test_the_pinned_numbers_are_of_every_table_and_hold_intervals():
    expected = pinned()
    assert {key[:2] for key in expected} == {(a, t) for a, names in TABLES.items() for t in names}
    with_interval = [v for v in expected.values() if "-" not in v.split()[2:4]]
    with_spread = [v for v in expected.values() if v.split()[1] != "-"]
    assert len(expected) > 1000 and len(with_interval) > 100 and len(with_spread) > 300
