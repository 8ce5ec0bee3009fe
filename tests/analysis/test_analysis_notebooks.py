"""Notebooks: committed files match their scripts, scripts run, and a kernel runs them with outputs."""

import os
import re
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from analysis_runs import study
from filelock import FileLock

from analysis import notebook_files
from analysis.errors import AnalysisError

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
# Layer similarity needs models, which written folders do not have.
WITHOUT_MODELS = [name for name in notebook_files.names() if name != "similarity"]


QUESTIONS = ("guidance", "main_table", "route_placement", "selection_rate", "similarity")


def test_there_is_a_notebook_for_each_question_of_the_paper():
    assert notebook_files.names() == sorted(QUESTIONS)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_notebook_is_a_question_one_variable_a_figure_and_a_paragraph(name):
    notebook = notebook_files.source(name)
    assert [cell.cell_type for cell in notebook.cells] == ["markdown", "code", "code", "code"]
    assert len({cell.id for cell in notebook.cells}) == 4
    question, variable, figure, paragraph = (cell.source for cell in notebook.cells)
    assert re.fullmatch(r"# [^\n]+\?", question)
    archive = re.fullmatch(
        r'RUNS = "(\S+)"  # or the folder of your own runs, such as "runs"', variable
    )
    assert (ROOT / archive[1]).is_file()
    # Nothing else is chosen: the folder is used once, and no other value is assigned by hand.
    assert figure.count("RUNS") == 1 and "analysis.figures." in figure.splitlines()[-1]
    assert re.fullmatch(r"Markdown\(answers\.[^\n]+\)", paragraph)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_committed_notebook_shows_one_figure_and_one_paragraph(name):
    import nbformat

    notebook = nbformat.read(notebook_files.FOLDER / f"{name}.ipynb", as_version=4)
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert outputs[0] == [] and "image/png" in outputs[1][0].data
    (paragraph,) = outputs[2]
    assert "\n" not in paragraph.data["text/markdown"].strip()


def test_runs_replaces_the_variable_and_nothing_else(tmp_path):
    before = notebook_files.source("selection_rate").cells
    after = notebook_files.source("selection_rate", tmp_path).cells
    changed = [
        (a.source, b.source) for a, b in zip(before, after, strict=True) if a.source != b.source
    ]
    assert len(changed) == 1 and changed[0][1].startswith(f"RUNS = {str(tmp_path)!r}  # or")


@pytest.mark.parametrize(
    "path", sorted(notebook_files.FOLDER.glob("*.ipynb")), ids=lambda path: path.stem
)
def test_a_committed_notebook_is_its_script_with_outputs(path):
    import nbformat

    committed = nbformat.read(path, as_version=4)
    source = notebook_files.source(path.stem)
    assert [(c.cell_type, c.source) for c in committed.cells] == [
        (c.cell_type, c.source) for c in source.cells
    ]
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code) and any(cell.outputs for cell in code)
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]


def test_records_that_are_not_there_are_one_sentence():
    with pytest.raises(AnalysisError, match="records .*nope.tar.gz are not there; give a folder"):
        notebook_files.runs_folder("results/nope.tar.gz")


def test_an_unknown_notebook_is_refused():
    with pytest.raises(AnalysisError, match="did you mean main_table"):
        notebook_files.source("main_tabel")


def test_no_notebook_is_run_beside_an_unknown_one(tmp_path):
    with pytest.raises(AnalysisError, match="no notebook called 'nope'"):
        notebook_files.build(["main_table", "nope"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_runs_is_found_from_the_current_folder_and_from_the_checkout(
    tmp_path, monkeypatch
):
    study(tmp_path / "mine", seeds=1, backbones=("dit",))
    monkeypatch.chdir(tmp_path)
    assert notebook_files.runs_folder("mine") == Path("mine")
    monkeypatch.setattr(notebook_files, "ROOT", tmp_path)
    monkeypatch.chdir("/")
    assert notebook_files.runs_folder("mine") == tmp_path / "mine"


def test_published_records_are_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook_files, "ROOT", tmp_path)
    archive = ROOT / "results" / "digits.tar.gz"
    folder = notebook_files.runs_folder(archive)
    assert notebook_files.find(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
    (folder / "mine.txt").touch()
    assert notebook_files.runs_folder(archive) == folder and (folder / "mine.txt").exists()


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(AnalysisError, match="holds no runs"):
        notebook_files.runs_folder(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_MODELS)
def test_a_notebook_runs_as_a_script(name, tmp_path):
    runs = tmp_path / "runs"
    study(runs, seeds=2, backbones=("dit",))
    cells = notebook_files.source(name, runs).cells
    script = tmp_path / f"{name}.py"
    script.write_text("\n".join(cell.source for cell in cells if cell.cell_type == "code"))
    result = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-2000:]


# Eight narrow blocks on real digits: a minute for all of them on two quiet cores. `auto` is 2-4 at this depth.
SMALL = (
    "data=digits backbone.depth=8 backbone.width=32 train.steps=60 train.batch=16 train.warmup=5 "
)
SMALL += "train.save_every=60 train.sample_every=0 eval.every=20 eval.samples=80 eval.metrics=[fd,accuracy] sampler.steps=4"
BACKBONES, ROUTES = ("dit", "mamba"), ("none", "2-4", "0-4", "2-4@0.25")
GUIDES = (
    "none",
    "cfg,scale=1.5",
    *(f"routed,scale=1.5,strong={s},weak={w}" for s in (0, 0.3) for w in (0.5, 0.9)),
)


def train_small_runs(path):
    """Train the study by the commands that a user types, then score one routed run under guidances."""

    def call(script, *words):
        subprocess.run(
            [sys.executable, str(ROOT / "experiments" / script), *words], check=True, cwd=ROOT
        )

    for backbone, route in product(BACKBONES, ROUTES):
        call(
            "run.py", *SMALL.split(), f"backbone={backbone}", f"route={route}", f"paths.runs={path}"
        )
    routed = next(path.glob("dit*_2-4_*"))
    call("evaluate.py", str(routed), "--samples", "80", "--metrics", "fd", "--guidance", *GUIDES)


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory):
    """A small study; the first worker trains it for all."""
    root = tmp_path_factory.getbasetemp()
    path = (root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root) / "notebook-runs"
    with FileLock(f"{path}.lock"):
        if not (path / "whole").exists():
            train_small_runs(path)
            (path / "whole").touch()
    return path


def execute(name, folder, *words):
    """Execute a notebook by the command and write it to a folder."""
    command = [sys.executable, "-m", "analysis", "notebooks", "--only", name, "--out", str(folder)]
    environment = {**os.environ, **QUIET}
    result = subprocess.run([*command, *words], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", notebook_files.names())
def test_a_notebook_runs_in_a_kernel_on_real_runs(name, real_runs, tmp_path):
    import nbformat

    execute(name, tmp_path, "--runs", str(real_runs))
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert not [
        out
        for out in outputs
        if out.output_type in ("error", "stream") and out.get("name") == "stderr"
    ]
    kinds = {kind for out in outputs if "data" in out for kind in out["data"]}
    assert {"image/png", "text/markdown"} <= kinds, f"{name} shows {sorted(kinds)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_notebook_takes_less_than_twenty_cpu_seconds_on_the_records(name, tmp_path):
    """A kernel, all imports, the figure and the paragraph; measured: 5 to 7 CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    execute(name, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
    import nbformat

    paragraph = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4).cells[-1].outputs[0]
    committed = nbformat.read(notebook_files.FOLDER / f"{name}.ipynb", as_version=4).cells[-1]
    assert paragraph.data["text/markdown"] == committed.outputs[0].data["text/markdown"]
