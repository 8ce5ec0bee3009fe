"""Notebooks: committed files match their scripts, scripts run, and a kernel runs them with outputs."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
from analysis_runs import similarity_map, study
from small import ROOT

from analysis import command
from analysis.errors import AnalysisError
from analysis.reports import notebook_files

QUESTIONS = ("guidance", "main_table", "route_placement", "selection_rate", "similarity")


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_committed_notebook_is_its_script_with_a_figure_and_a_table(name):
    import nbformat

    committed = nbformat.read(notebook_files.FOLDER / f"{name}.ipynb", as_version=4)
    cells = [(cell.cell_type, cell.source) for cell in committed.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in notebook_files.source(name).cells]
    outputs = [cell.outputs for cell in committed.cells if cell.cell_type == "code"]
    assert outputs[0] == [] and "image/png" in outputs[1][0].data
    assert all("text/markdown" in output[0].data for output in outputs[2:])
    assert not [out for cell in outputs for out in cell if out.output_type == "error"]


def test_the_package_that_notebooks_need_is_named(monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nbformat" else find(name))
    assert command.main(["notebooks", "--out", str(tmp_path)]) == 2
    assert "nbformat" in capsys.readouterr().err


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(AnalysisError, match="no archive .*nope.tar.gz; pass another"):
        notebook_files.runs_folder("results/nope.tar.gz")
    with pytest.raises(AnalysisError, match="holds no runs"):
        notebook_files.runs_folder(tmp_path)
    with pytest.raises(AnalysisError, match="did you mean main_table"):
        notebook_files.build(["guidance", "main_tabel"], tmp_path)
    assert not list(tmp_path.iterdir())  # the known one was not run


def test_published_records_are_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook_files, "ROOT", tmp_path)
    archive = ROOT / "results" / "digits.tar.gz"
    folder = notebook_files.runs_folder(archive)
    assert notebook_files.find(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
    (folder / "mine.txt").touch()
    assert notebook_files.runs_folder(archive) == folder and (folder / "mine.txt").exists()


@pytest.mark.slow
def test_the_notebooks_run_in_a_kernel_on_a_users_runs(tmp_path):
    import nbformat

    runs = study(tmp_path / "runs", seeds=2, backbones=("dit",))
    for route in ("none", "2-8"):
        folder = next(runs.glob(f"dit-*_{route}_s0-*"))
        similarity_map(np.eye(13), route, run=folder.name).save(folder / "similarity.npz")
    words = ["-m", "analysis", "notebooks", "--runs", str(runs), "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], env=environment, check=True)
    for name in QUESTIONS:
        notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
        assert f"RUNS = {str(runs)!r}  # or" in notebook.cells[1].source
        outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
        assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
        kinds = {kind for out in outputs if "data" in out for kind in out["data"]}
        shown = {"image/png"} if name == "similarity" else {"image/png", "text/markdown"}
        assert shown <= kinds, f"{name} shows {sorted(kinds)}"
