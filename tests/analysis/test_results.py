"""The committed results: every table of the pages comes again from the committed records."""

import json
import re
import tarfile

import pytest
from small import ROOT

from analysis import compute, figures, findings, notebook_files, pages, publish, tables
from analysis.archives import unpack
from analysis.results import Results
from analysis.tables.table import markdown

RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return Results.of(unpack(RESULTS / publish.ARCHIVE, tmp_path_factory.mktemp("results")))


PAGES = [ROOT / "README.md", *sorted(RESULTS.glob("*.md"))]
# Their tables are made by analysis.compute and analysis.claims, or they have none.
WITHOUT_TABLES = {"claims.md", "machines.md", "similarity.md", "studies.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_number_of_a_page_was_typed(page, study):
    text = page.read_text(encoding="utf-8")
    assert bool(re.search("<!-- (table|penalty)", text)) == (page.name not in WITHOUT_TABLES)
    assert pages.fill(text, study) == text
    assert compute.fill(text) == text, "type python -m analysis.compute"


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_results_pages_ask_a_question_and_their_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    title = text.splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?"), title
    for target, anchor in re.findall(r"(?:\]\(|src=\")([^)#\s\"]*)(?:#([^)\"]*))?[)\"]", text):
        if target.startswith("http"):
            continue
        path = (page.parent / target) if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
            slugs = {
                re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
            }
            assert anchor in slugs, f"{target}#{anchor}"


def test_the_main_page_takes_five_minutes_and_reports_no_hours():
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    prose = re.sub(
        r"<!-- (?:table|penalty|facts).*?<!-- end[^>]*-->|```.*?```", "", text, flags=re.DOTALL
    )
    assert len(prose.split()) <= 1600
    for page in PAGES[1:]:
        words = page.read_text(encoding="utf-8")
        assert "told apart" not in words and "speed-up, hours" not in words.lower(), page.name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tables", {"runs": (("main", "cost"), ("speedup",))}),
        (
            "guidance",
            {"runs": (("main", "scale"), ("guidance_scale",)), "guidance": (("response",), ())},
        ),
        (
            "route_placement",
            {
                "placement": (("placement",), ("route_placement",)),
                "fig8": (("placement",), ("throughput",)),
            },
        ),
        ("selection_rate", {"ablations": (("rate",), ("selection_rate", "throughput"))}),
        ("your_runs", {"runs": (("main",), ())}),
    ],
)
def test_committed_notebooks_show_what_the_records_say(name, shown, study, tmp_path):
    notebook = json.loads((notebook_files.FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    outputs = [out.get("data", {}) for cell in notebook["cells"] for out in cell.get("outputs", ())]
    texts = ["".join(data.get("text/markdown", "")) for data in outputs]
    expected = []
    for archive, (sentences, made) in shown.items():
        records = (
            study
            if archive == "runs"
            else Results.of(unpack(RESULTS / f"{archive}.tar.gz", tmp_path))
        )
        expected += [findings.make(each, records) for each in sentences]
        expected += [
            markdown(tables.make(each, records).only(ours=each != "guidance_scale"))
            for each in made
        ]
    if name == "tables":
        expected.append(markdown(tables.answer(tables.make("main", study))))
    assert [text for text in expected if text not in texts] == []


def test_fashion_mnist_leads_and_no_row_is_missing(study):
    """The evidence is on Fashion-MNIST: 8x8 digits are the null case and stand behind it."""
    assert [base.first("data") for base in study.groups[:3]] == ["fashion"] * 3
    overview = figures.make("overview", study).data
    assert set(overview["backbone"]) == {"dit", "mamba", "rwkv"}
    assert overview["of"].str.contains("fashion").all() and (overview["n"] >= 3).all()
    answer = tables.answer(tables.make("main", study))
    assert "fashion" in answer.rows[0].group
    assert not [row for row in answer.rows if any(entry.is_missing for entry in row.entries)]


def test_no_notebook_contradicts_the_results_page():
    text = (notebook_files.FOLDER / "guidance.py").read_text(encoding="utf-8")
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert "No net guidance shows" in page and "show no net guidance" in text
    for notebook in notebook_files.FOLDER.glob("*.ipynb"):
        content = notebook.read_text(encoding="utf-8")
        for phrase in (
            "by the clock",
            "Speed-up, hours",
            "precision and class\n# accuracy rise, recall",
        ):
            assert phrase not in content, (notebook.name, phrase)


def test_the_records_are_whole_and_hold_no_weights(study):
    assert study.problems.empty
    with tarfile.open(RESULTS / publish.ARCHIVE) as tar:
        assert not [name for name in tar.getnames() if name.endswith((".safetensors", ".pt"))]
    rows = (RESULTS / "runs.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == len(study.runs) + 1
