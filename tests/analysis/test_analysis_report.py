"""The report page: complete, self-contained, escaped, and shown by a real headless Chromium."""

import html
import json
import re

import analysis_browser
import pytest
from analysis_runs import write, write_pairs

import analysis
from analysis.command import main
from analysis.comparison.results import Results
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
    assert not re.search(r"url\(|@import|<link[^>]+stylesheet|<script", text)
    assert "default-src 'none'" in text
    assert HOSTILE not in text and html.escape(HOSTILE) in text.replace("&#34;", "&quot;")
    # What is not in the tables is said.
    assert "failed" in text and "config.yaml cannot be read" in text


def test_it_holds_every_table_figure_and_run(page, folder):
    text = page.read_text()
    results = Results.of(folder)
    for table in analysis.tables.make_all(results):
        assert (f'id="table-{table.name}"' in text) == table.covered
    assert 'id="table-main"' in text and 'id="table-route_placement"' in text
    for plot in analysis.figures.make_all(results):
        assert f'id="figure-{plot.name}"' in text
    for run in results.runs["run"]:
        assert run in text
    rows = [row for row in analysis.tables.make("main", results).rows if row.group.startswith("dit")]
    assert all(html.escape(plain(entry)) in text for entry in rows[0].entries if not entry.published)


def test_without_a_finished_run_there_is_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err


@pytest.mark.slow
@analysis_browser.needed
def test_the_page_in_a_browser(page, folder):
    """It loads alone, shows every picture, runs nothing, and fits a phone."""
    browser = analysis_browser.Browser()
    try:
        browser.resize(390)
        browser.open(page)
        assert [url for url in browser.requests if not url.startswith("data:")] == [page.resolve().as_uri()]
        assert browser.run("window.pwned") is None and browser.errors == []
        pictures = browser.run("[...document.images].filter(i => i.complete && i.naturalWidth > 50).length")
        assert pictures == browser.run("document.images.length") > len(analysis.figures.make_all(folder))
        assert browser.run("document.documentElement.scrollWidth") == 390
    finally:
        browser.close()
