"""The committed results: every table of the pages comes again from the committed records."""

import json
import tarfile

import pytest
from small import ROOT

from analysis import findings, notebook_files, publish, tables
from analysis.runs.archives import unpack
from analysis.runs.cells import Study
from analysis.tables.table import markdown

RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return Study.of(unpack(RESULTS / publish.ARCHIVE, tmp_path_factory.mktemp("results")))


@pytest.mark.parametrize("page", ["results/README.md", "results/speed.md", "README.md"])
def test_no_number_of_a_page_was_typed(page, study):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- table" in text
    assert publish.fill(text, study) == text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tables", {"findings": ("main", "cost"), "tables": ("main", "speedup")}),
        ("guidance", {"findings": ("response", "scale"), "tables": ("guidance_scale",)}),
        ("route_placement", {"findings": ("placement",), "tables": ("route_placement",)}),
        ("your_runs", {"findings": ("main",)}),
    ],
)
def test_committed_notebooks_show_what_the_records_say(name, shown, study):
    notebook = json.loads((notebook_files.FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    outputs = [out.get("data", {}) for cell in notebook["cells"] for out in cell.get("outputs", ())]
    texts = ["".join(data.get("text/markdown", "")) for data in outputs]
    expected = [findings.make(each, study) for each in shown["findings"]]
    expected += [markdown(tables.make(each, study)) for each in shown.get("tables", ())]
    assert [text for text in expected if text not in texts] == []


def test_the_records_are_whole_and_hold_no_weights(study):
    assert not study.runs.attrs["damaged"] and not study.runs.attrs["unfinished"]
    with tarfile.open(RESULTS / publish.ARCHIVE) as tar:
        assert not [name for name in tar.getnames() if name.endswith((".safetensors", ".pt"))]
    rows = (RESULTS / "runs.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == len(study.runs) + 1
