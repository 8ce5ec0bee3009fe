"""The committed results: every table of the pages comes again from the committed records."""

import re
import tarfile

import pytest
from small import ROOT

from analysis.reports import pages

RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def study(records):
    return records("runs")


PAGES = [ROOT / "README.md", *sorted(RESULTS.glob("*.md"))]
# Their tables are made by analysis.claims, or they have none.
WITHOUT_TABLES = {"claims.md", "machines.md", "similarity.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_number_of_a_page_was_typed(page, study):
    text = page.read_text(encoding="utf-8")
    assert bool(re.search("<!-- (table|facts|study)", text)) == (page.name not in WITHOUT_TABLES)
    text = re.sub(r"<!-- study .*?<!-- end -->", "", text, flags=re.DOTALL)  # test_studies.py
    assert pages.fill(text, study) == text, "type python -m analysis pages"


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_the_links_of_results_pages_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"(?:\]\(|src=\")([^)#\s\"]*)(?:#([^)\"]*))?[)\"]", text):
        if target.startswith("http"):
            continue
        path = (page.parent / target) if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}#{anchor}"


def test_the_records_are_whole_and_hold_no_weights(study):
    assert study.problems.empty
    with tarfile.open(RESULTS / "runs.tar.gz") as tar:
        assert not [name for name in tar.getnames() if name.endswith((".safetensors", ".pt"))]
