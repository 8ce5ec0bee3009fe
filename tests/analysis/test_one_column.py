"""LaTeX for one column of a page of two: it compiles, stays inside the column, and keeps pairs of columns together."""

import re
import shutil
import subprocess

import pytest
from analysis_runs import compile_latex

from analysis.command import main
from analysis.tables import make, render

COLUMN = 3.3  # inches
NAMES = ("main", "summary", "differences", "all_scores", "route_placement", "throughput", "high_res")


def test_dense_and_routed_stay_in_the_same_float(made_runs):
    for name in ("main", "high_res"):
        text = render.latex(make(name, made_runs), COLUMN)
        assert "table*" not in text and "longtable" not in text
        for float_text in text.split(r"\begin{table}")[1:]:
            columns = re.findall(r"\\shortstack\[[lr]\]\{([^}]*)\}", float_text)
            assert ("+ TREAD" in columns) == ("Dense" in columns), columns
            assert ("Paper dense" in columns) == ("Paper + TREAD" in columns)
    assert render.latex(make("main", made_runs), COLUMN).count(r"\begin{table}") > 1


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("pdflatex") is None or shutil.which("pdftotext") is None,
    reason="pdflatex or poppler-utils is not installed",
)
def test_a_two_column_paper_compiles_and_no_word_leaves_its_column(made_runs, tmp_path):
    assert main(["tables", str(made_runs), "--width", str(COLUMN), "--out", str(tmp_path), "--only", *NAMES]) == 0
    printed = compile_latex(tmp_path)
    assert "Overfull" not in printed
    subprocess.run(["pdftotext", "-bbox", "tables.pdf", "words.html"], cwd=tmp_path, check=True)
    text = (tmp_path / "words.html").read_text()
    # A4 is 595 points wide: the text is two columns of 3.3 inches, 0.2 apart, in the middle.
    left = (595.28 - (2 * COLUMN + 0.2) * 72) / 2
    columns = [(left, left + COLUMN * 72), (left + (COLUMN + 0.2) * 72, left + (2 * COLUMN + 0.2) * 72)]
    words = re.findall(r'xMin="([\d.]+)" yMin="[\d.]+" xMax="([\d.]+)" yMax="([\d.]+)">(.*?)<', text)
    assert len(words) > 500
    for low, high, bottom, word in words:
        inside = any(start - 2 <= float(low) and float(high) <= end + 2 for start, end in columns)
        is_page_number = float(bottom) > 770 and word.isdigit()
        assert inside or is_page_number, (word, low, high)
