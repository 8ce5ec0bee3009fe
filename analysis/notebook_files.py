"""Notebooks in percent format, executed to .ipynb with outputs, and the runs that they read.

Those are `ANALYSIS_RUNS`, else the records in `results/`, else a small study trained on the spot by
the commands that a user types: nothing here imports the training code.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from analysis.runs.run_records import PUBLISHED, AnalysisError, find, pick, unpack
from experiments.runtime.files import atomic_write

FOLDER = Path(__file__).with_name("notebooks")
ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "ANALYSIS_RUNS"
RECORDS = ROOT / "results" / "runs.tar.gz"
_SECONDS = 1200  # that a cell may take

# Eight narrow blocks on real digits: a minute for all of them on two quiet cores. `auto` is 2-4 at
# this depth.
SMALL = (
    "data=digits",
    "backbone.depth=8",
    "backbone.width=32",
    "train.steps=60",
    "train.batch=16",
    "train.warmup=5",
    "train.save_every=60",
    "train.sample_every=0",
    "eval.every=20",
    "eval.samples=80",
    "eval.metrics=[fd,accuracy]",
    "sampler.steps=4",
)
STUDY = (
    ("backbone=dit", "backbone=mamba"),
    ("route=none", "route=2-4", "route=0-4", "route=2-4@0.25"),
    ("seed=0",),
)
GUIDES = (
    "none",
    "cfg,scale=1.5",
    *(f"routed,scale=1.5,strong={s},weak={w}" for s, w in product((0, 0.3), (0.6, 0.9))),
)


def names() -> list[str]:
    """Return the notebooks' names, without suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def source(name: str) -> Any:
    """Return a notebook of the percent script `name`, without outputs.

    Raises:
        AnalysisError: if there is no such notebook.
    """
    path = pick("notebook", name, {name: FOLDER / f"{name}.py" for name in names()})
    import jupytext

    notebook = jupytext.read(path)
    for index, cell in enumerate(notebook.cells):
        # Random ids would make every export a change.
        cell["id"] = f"{name}-{index}"
        cell["metadata"] = {}
    return notebook


def execute(name: str) -> Any:
    """Run a notebook in a kernel of this Python and return it with its outputs.

    Raises:
        AnalysisError: if a cell raises, with what it raised.
    """
    from jupyter_client import KernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = source(name)
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    root = str(ROOT)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # Sockets in the file system: nothing listens on a network.
    kernel = KernelManager(kernel_name="python3", transport="ipc")
    client = NotebookClient(
        notebook, km=kernel, timeout=_SECONDS, resources={"metadata": {"path": root}}
    )
    # tqdm asks for widgets that nothing here shows, with a path of this machine in its warning.
    quiet = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore:IProgress not found"}
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:
        # Relative to the working directory otherwise: a kernel that is killed leaves them there.
        kernel.ip = f"{sockets}/ipc"
        # A kernel that the client was given is otherwise left running, its sockets open.
        try:
            client.execute(cleanup_kc=True, env={**os.environ, **quiet})
        except CellExecutionError as error:
            raise AnalysisError(
                f"notebook {name}: {error.ename}: {' '.join(error.evalue.split())[:500]}"
            ) from error
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)
    return notebook


def build(chosen: list[str] | None = None, out: str | Path = FOLDER) -> list[Path]:
    """Execute notebooks and write them as `<name>.ipynb`; return the paths."""
    for package in ("nbformat", "jupytext", "nbclient", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            raise AnalysisError(
                f"notebooks need {package}, which is not installed: pip install -e '.[notebooks]'"
            )
    import nbformat

    paths, every = [], chosen or names()
    for name in every:
        source(name)  # before the first is run
    for name in every:
        path = Path(out) / f"{name}.ipynb"
        atomic_write(path, nbformat.writes(execute(name)) + "\n")
        paths.append(path)
    return paths


def runs_folder() -> Path:
    """Return the folder with the runs that the notebooks read.

    `ANALYSIS_RUNS=DIR` names one with runs in it, or an empty one to be filled. Without it, the
    published records are unpacked below `runs/.published`; `runs/.notebooks` is filled where there
    are none.

    Raises:
        AnalysisError: if training fails; the message holds the command and its last line.
    """
    chosen = os.environ.get(VARIABLE)
    if not chosen and RECORDS.is_file():
        return unpack(RECORDS, ROOT / PUBLISHED)
    path = Path(chosen or ROOT / "runs" / ".notebooks").expanduser()
    if not (path.is_dir() and find(path)):
        train_small_runs(path)
    return path


def train_small_runs(path: Path) -> None:
    """Train the study, then score one routed run under guidances."""
    for cell in product(*STUDY):
        _command("experiments/run.py", *SMALL, *cell, f"paths.runs={path}")
    routed = next(
        (run for run in find(path) if run.name.startswith("dit") and "_2-4_" in run.name), None
    )
    if routed is not None:
        words = ("--samples", "80", "--metrics", "fd", "--guidance", *GUIDES)
        _command("experiments/evaluate.py", str(routed), *words)


def _command(script: str, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], capture_output=True, text=True, cwd=ROOT
    )
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise AnalysisError(f"python {script} {' '.join(arguments)} failed: {' '.join(last)}")


def command(options: argparse.Namespace) -> int:
    """Execute notebooks on the runs given."""
    if options.runs is not None:
        if not (options.runs.is_dir() and find(options.runs)):
            raise AnalysisError(
                f"{options.runs} holds no runs; give a folder of them, or leave --runs out for "
                "those of results/"
            )
        os.environ[VARIABLE] = str(options.runs.resolve())
    for path in build(options.only, options.out or FOLDER):
        print(path)
    return 0
