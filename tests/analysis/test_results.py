"""The committed results: every table of the pages comes again from the committed records."""

import tarfile

import pytest
from small import ROOT

from analysis import publish
from analysis.runs.cells import Study

RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    with tarfile.open(RESULTS / publish.ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    return Study.of(folder / "runs")


@pytest.mark.parametrize("page", ["results/README.md", "results/speed.md", "README.md"])
def test_no_number_of_a_page_was_typed(page, study):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- table" in text
    assert publish.fill(text, study) == text


def test_the_records_are_whole_and_hold_no_weights(study):
    assert not study.runs.attrs["damaged"] and not study.runs.attrs["unfinished"]
    with tarfile.open(RESULTS / publish.ARCHIVE) as tar:
        assert not [name for name in tar.getnames() if name.endswith((".safetensors", ".pt"))]
    rows = (RESULTS / "runs.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == len(study.runs) + 1
