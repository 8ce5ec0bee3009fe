"""The report page: complete, self-contained, escaped, and alive in a real headless Chromium."""

import html
import json
import re

import analysis_browser
import pytest
from analysis_runs import METRIC, write, write_pairs

import analysis
from analysis.command import main
from analysis.comparison.results import Results
from analysis.reports import report
from analysis.reports.report_sections import runs_table
from analysis.tables.table import plain

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_pairs(root, ("dit", "mamba"), routes=("none", "2-8"), samples=True)
    write_pairs(root, ("dit", "mamba"), routes=("0-8",))
    write(root, "dit", "2-8@0.25", 0)
    live = write(root, "dit", "none", 7)
    (live / "summary.json").unlink()
    (live / "status.json").write_text(json.dumps({"status": "failed", "step": 30, "error": HOSTILE}))
    (write(root, "dit", "none", 8) / "config.yaml").unlink()
    hostile = write(root, "dit", "none", 9, experiment=HOSTILE)
    (hostile / "env.json").write_text(json.dumps({"device": HOSTILE}))
    return root


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "report.html"
    assert main(["report", str(folder), "--out", str(path)]) == 0
    return path


def test_it_asks_for_nothing_outside_itself_and_escapes_what_runs_say(page):
    text = page.read_text()
    for address in re.findall(r'(?:src|href)="([^"]*)"', text):
        assert address.startswith(("data:", "#")), address
    assert not re.search(r"url\(|@import|<link[^>]+stylesheet", text)
    assert "default-src 'none'" in text
    assert HOSTILE not in text and html.escape(HOSTILE) in text.replace("&#34;", "&quot;")
    # What is not in the tables is said.
    assert "failed, step 30" in text and "config.yaml cannot be read" in text


def test_it_holds_every_table_figure_and_run(page, folder):
    text = page.read_text()
    for name in analysis.tables.TABLES:
        assert f'id="table-{name}"' in text
    for name in ("overview", "convergence", "route_placement", "selection_rate", "samples", "selections"):
        assert f'id="figure-{name}"' in text
    results = Results.of(folder)
    assert len(runs_table(results).rows) == len(results.runs)
    for run in results.runs["run"]:
        assert run in text


def test_it_opens_on_the_answer(page, folder):
    text = page.read_text()
    order = [text.index(mark) for mark in ('id="table-answer"', 'id="figure-overview"', 'id="figures"')]
    assert order == sorted(order)
    answer = text[order[0] : text.index("</table>", order[0])]
    rows = [r for r in analysis.tables.make("main", folder).rows if r.group.startswith("dit")]
    assert "FD" in rows[0].entries[0].text
    assert all(html.escape(plain(entry)) in answer for entry in rows[0].entries)
    assert "published" not in answer
    # The factors of the cards are those of the table of speed-ups.
    factors = re.findall(r'class="big">([^<]*)<', text)
    rows = [r for r in analysis.tables.make("speedup", folder).rows if r.entries[0].text == "2-8"]
    assert factors == [f"{r.entries[4].value:.2f}x" for r in rows] and len(factors) == 2


def test_an_empty_folder_still_makes_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(report.figures, "FIGURES", {})
    path = report.write(tmp_path, tmp_path / "out.html")
    assert "too few to compare" in path.read_text()


@pytest.fixture(scope="module")
def browser(page):
    found = analysis_browser.Browser()
    found.open(page, ready="document.documentElement.dataset.ready === 'yes'")
    yield found
    found.close()


COLUMN = (
    "(name, table) => { const t = document.getElementById(table);"
    "const i = [...t.tHead.rows[0].cells].findIndex(c => c.textContent.startsWith(name));"
    "return [...t.tBodies].map(b => [...b.rows].filter(r => !r.classList.contains('group') && !r.hidden)"
    ".map(r => r.cells[i].textContent)); }"
)
CLICK = (
    "(name, table) => { const t = document.getElementById(table);"
    "[...t.tHead.rows[0].cells].find(c => c.textContent.startsWith(name)).querySelector('button').click(); }"
)
PICK = (
    "(name, value) => { const pick = document.querySelector(`select[data-pick=${name}]`);"
    "pick.value = value; pick.dispatchEvent(new Event('change')); }"
)
TYPE = (
    "(text, block) => { const box = document.querySelector(`[data-table=${block}] input`);"
    "box.value = text; box.dispatchEvent(new Event('input')); }"
)


@pytest.mark.slow
@analysis_browser.needed
def test_the_page_in_a_browser(browser, page, folder):
    """One page, one browser: it loads alone, shows its figures, sorts, filters, and fits a phone."""
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.resolve().as_uri()]
    assert browser.run("window.pwned") is None
    shown = browser.run(
        "[...document.querySelectorAll('img.plot')].filter(i => i.complete && i.naturalWidth > 50"
        " && i.getBoundingClientRect().width > 50).map(i => i.closest('section').id)"
    )
    assert shown == [f"figure-{plot.name}" for plot in analysis.figures.make_all(folder)]
    assert browser.run("[...document.images].filter(i => !i.complete || !i.naturalWidth).length") == 0
    # Numbers are sorted as numbers, words stay below.
    name = METRIC.split(" ")[0]
    browser.run(f"({CLICK})('{name}', 'table-runs')")
    (rising,) = browser.run(f"({COLUMN})('{name}', 'table-runs')")
    assert len(rising) > 15 and list(map(float, rising)) == sorted(map(float, rising))
    for _ in range(2):
        browser.run(f"({CLICK})('Ours', 'table-route_placement')")
        for body in browser.run(f"({COLUMN})('Ours', 'table-route_placement')"):
            words = [not text[0].isdigit() for text in body]
            assert words == sorted(words)
    # Typed words filter one table.
    browser.run(f"({TYPE})('mamba 2-8', 'runs')")
    (runs,) = browser.run(f"({COLUMN})('Run', 'table-runs')")
    assert len(runs) == 3 and all("mamba" in run and "2-8" in run for run in runs)
    count = browser.run("document.querySelector('[data-table=runs] .count').textContent")
    assert re.fullmatch(r"3 of \d+ rows", count)
    browser.run(f"({TYPE})('', 'runs')")
    # Picked values filter the whole page; a dense run has no route and stays, to be compared with.
    browser.run(f"({PICK})('Backbone', 'mamba')")
    browser.run(f"({PICK})('Route', '0-8')")
    (runs,) = browser.run(f"({COLUMN})('Route', 'table-runs')")
    assert set(runs) == {"0-8", "none"} and len(runs) == 6
    samples = browser.run(
        "[...document.querySelectorAll('.grids figure')].filter(f => !f.hidden).map(f => f.textContent)"
    )
    assert samples and all(text.startswith("mamba") for text in samples)
    browser.resize(390)
    browser.open(page, ready="document.documentElement.dataset.ready === 'yes'")
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run("document.getElementById('table-answer').getBoundingClientRect().top < innerHeight")
    assert browser.errors == []


def test_the_answer_has_pairs_of_three_seeds_alone(tmp_path):
    write_pairs(tmp_path)
    write_pairs(tmp_path, ("mamba",), seeds=2)
    results = Results.of(tmp_path)
    (note, *_) = analysis.tables.answer(analysis.tables.make("main", results)).notes
    assert note == "Settings without a difference of 3 seeds: 1, in the main table."
