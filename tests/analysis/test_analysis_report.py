"""The report page: complete, self-contained, escaped, and alive in a real headless Chromium."""

import html
import json
import re
from pathlib import Path

import analysis_browser
import numpy as np
import pytest
from analysis_runs import METRIC, write
from PIL import Image

import analysis
from analysis import report
from analysis.report import runs_table
from analysis.runs.cells import Study

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for backbone in ("dit", "mamba"):
        for seed in range(3):
            for route in ("none", "2-8", "0-8"):
                write(root, backbone, route, seed, samples=seed == 0 and route != "0-8")
    write(root, "dit", "2-8@0.25", 0)
    live = write(root, "dit", "none", 7)
    (live / "summary.json").unlink()
    (live / "status.json").write_text(
        json.dumps({"status": "failed", "step": 30, "error": HOSTILE})
    )
    (write(root, "dit", "none", 8) / "config.yaml").unlink()
    hostile = write(root, "dit", "none", 9, experiment=HOSTILE)
    (hostile / "env.json").write_text(json.dumps({"device": HOSTILE}))
    return root


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    return report.write(folder, tmp_path_factory.mktemp("out") / "report.html")


def test_it_asks_for_nothing_outside_itself(page):
    text = page.read_text()
    for address in re.findall(r'(?:src|href)="([^"]*)"', text):
        assert address.startswith(("data:", "#")), address
    assert not re.search(r"url\(|@import|<link[^>]+stylesheet", text)
    assert "default-src 'none'" in text


def test_it_holds_every_covered_table_figure_and_run(page, folder):
    text = page.read_text()
    study = Study.of(folder)
    for table in analysis.tables.make_all(study):
        assert f'id="table-{table.name}"' in text
    for plot in analysis.figures.make_all(study):
        assert f'id="figure-{plot.name}"' in text
    for run in study.runs["run"]:
        assert run in text
    assert len(runs_table(study).rows) == len(study.runs)


def test_what_is_not_in_the_tables_is_said(page):
    text = html.unescape(page.read_text())
    assert "failed, step 30" in text and "config.yaml cannot be read" in text


def test_strings_from_runs_are_escaped(page):
    assert HOSTILE not in page.read_text()
    assert html.escape(HOSTILE) in page.read_text().replace("&#34;", "&quot;")


def test_an_empty_folder_still_makes_a_page(tmp_path):
    path = report.write(tmp_path, tmp_path / "out.html")
    assert "nothing to compare" in path.read_text()


def test_a_broken_picture_is_left_out(folder, tmp_path):
    from analysis.figures.sample_grids import picture

    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "final.png").write_bytes(b"\x89PNG nonsense")
    assert picture(tmp_path) is None and picture(tmp_path / "absent") is None
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "samples" / "final.png")
    assert picture(tmp_path).shape == (4, 4, 3)


browser_needed = pytest.mark.skipif(
    analysis_browser.find() is None,
    reason="no Chromium on PATH (apt-get install --no-install-recommends chromium)",
)


@pytest.fixture(scope="module")
def browser(page):
    found = analysis_browser.Browser()
    found.open(Path(page), ready="document.documentElement.dataset.ready === 'yes'")
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
TYPE = (
    "(text, block) => { const box = document.querySelector(`[data-table=${block}] input`);"
    "box.value = text; box.dispatchEvent(new Event('input')); }"
)


@pytest.mark.slow
@browser_needed
def test_browser_loads_without_errors_or_requests(browser):
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("data:", "file:"))] == []
    assert browser.run("window.pwned") is None
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1


@pytest.mark.slow
@browser_needed
def test_browser_shows_every_figure(browser, folder):
    shown = browser.run(
        "[...document.querySelectorAll('img.plot')].filter(i => i.complete && i.naturalWidth > 50 && i.getBoundingClientRect().width > 50)"
        ".map(i => i.closest('section').id)"
    )
    assert shown == [f"figure-{plot.name}" for plot in analysis.figures.make_all(folder)]
    broken = browser.run("[...document.images].filter(i => !i.complete || !i.naturalWidth).length")
    assert broken == 0


@pytest.mark.slow
@browser_needed
def test_browser_sorts_numbers_as_numbers_with_words_last(browser):
    name = METRIC.split(" ")[0]
    browser.run(f"({CLICK})('{name}', 'table-runs')")
    (rising,) = browser.run(f"({COLUMN})('{name}', 'table-runs')")
    assert [float(v) for v in rising] == sorted(float(v) for v in rising) and len(rising) > 15
    browser.run(f"({CLICK})('{name}', 'table-runs')")
    (falling,) = browser.run(f"({COLUMN})('{name}', 'table-runs')")
    assert [float(v) for v in falling] == sorted(map(float, rising), reverse=True)
    for _ in range(2):
        browser.run(f"({CLICK})('Ours', 'table-route_placement')")
        for body in browser.run(f"({COLUMN})('Ours', 'table-route_placement')"):
            words = [text == "missing" for text in body]
            assert words == sorted(words), "missing must stay below the numbers"


@pytest.mark.slow
@browser_needed
def test_browser_filters_rows_and_says_how_many(browser):
    browser.run(f"({TYPE})('mamba 2-8', 'runs')")
    (runs,) = browser.run(f"({COLUMN})('Run', 'table-runs')")
    assert len(runs) == 3 and all("mamba" in run and "2-8" in run for run in runs)
    count = "document.querySelector('[data-table=runs] .count').textContent"
    assert re.fullmatch(r"3 of \d+ rows", browser.run(count))
    browser.run(f"({TYPE})('', 'runs')")
    browser.run(
        "(() => { const pick = document.querySelector('[data-table=runs] select[aria-label=Backbone]');"
        "pick.value = 'mamba'; pick.dispatchEvent(new Event('change')); })()"
    )
    (runs,) = browser.run(f"({COLUMN})('Backbone', 'table-runs')")
    assert set(runs) == {"mamba"} and len(runs) == 9
    browser.run(f"({TYPE})('no such run', 'runs')")
    assert browser.run(f"({COLUMN})('Run', 'table-runs')") == [[]]
    assert browser.errors == []
