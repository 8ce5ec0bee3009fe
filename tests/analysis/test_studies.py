"""The scripts of results/studies: their tables stand on the pages, from the committed records."""

import importlib
import re
import subprocess
import sys

import pandas as pd
import pytest
from analysis_runs import lines, score, write
from small import ROOT
from suite import RESULTS

import analysis
from analysis.tables.table import markdown_rows
from results.studies import common

PAGES = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *RESULTS.glob("*.md")])
BLOCKS = re.findall(r"<!-- study (\w+) (\w+) -->\n\n(.*?)\n<!-- end -->", PAGES, re.DOTALL)
SCRIPTS = sorted(path.stem for path in (RESULTS / "studies").glob("*.py") if path.stem != "common")


def script(study):
    return importlib.import_module(f"results.studies.{study}")


@pytest.mark.parametrize("study", sorted({study for study, _, _ in BLOCKS}))
def test_the_tables_of_a_study_are_those_on_the_pages(study):
    for table, text in [block[1:] for block in BLOCKS if block[0] == study]:
        frame = script(study).table(table)
        assert markdown_rows(list(frame), frame.to_numpy()) == text, "type python -m analysis pages"


def test_every_published_study_has_a_script():
    studies = {path.name.split(".")[0].removeprefix("study_") for path in RESULTS.glob("study_*.tar.gz")}
    assert studies <= set(SCRIPTS)
    for study in studies:
        assert f"sweeps/grids/study_{study}.yaml" in script(study).__doc__


def test_the_text_quotes_the_changes_of_study_jit():
    texts = script("jit").table("changes")["mean (95 %)"]
    assert list(texts) == ["+0.77 [-0.04, +1.59]", "+2.55 [+0.14, +4.96]", "-1.77 [-3.62, +0.07]"]
    section = PAGES.partition("## x-prediction in pixels")[2]
    assert "0.77 (-0.04 to +1.59)" in section and "2.55 (+0.14 to +4.96)" in section and "-1.77 ± 1.85" in section


def test_the_figure_is_drawn_from_the_records():
    exploratory = script("exploratory")
    data = exploratory.figure(exploratory.read(exploratory.ARCHIVE)).data
    pd.testing.assert_frame_equal(data, pd.read_csv(RESULTS / "figures" / "compute.csv"), rtol=1e-9)


def test_a_score_on_the_way_is_not_the_final_one(tmp_path):
    for seed, step in enumerate((400, 400, 200)):
        rows = [score({}, step, 3.0 + seed, f"{name}-500 (digits-classifier)") for name in common.METRICS]
        lines(write(tmp_path, seed=seed) / "scores.jsonl", rows)
    (row,) = common.scores_table(analysis.load(tmp_path).assign(arm="dense")).to_dict("records")
    assert (row["Seeds"], row["FD"]) == ("0, 1", "3.5")


def test_the_command_prints_a_table_or_names_those_there_are():
    def run(*words):
        command = [sys.executable, "-m", "results.studies.learning_rate", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert run("arms").stdout in PAGES
    wrong = run("arm")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "did you mean arms" in wrong.stderr
