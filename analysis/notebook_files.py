"""Notebooks in percent format, executed to .ipynb with outputs, and the runs that they read."""

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from analysis.archives import PUBLISHED, unpack
from analysis.errors import AnalysisError, pick
from analysis.loading import find
from experiments.runtime.errors import ROOT
from experiments.runtime.files import atomic_write

FOLDER = Path(__file__).with_name("notebooks")
VARIABLE = "ANALYSIS_RUNS"
RECORDS = ROOT / "results"
_SECONDS = 1200  # that a cell may take


def names() -> list[str]:
    """Return the notebooks' names, without suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def source(name: str) -> Any:
    """Return the notebook of a percent script, without outputs; `AnalysisError` if it is none."""
    path = pick("notebook", name, {name: FOLDER / f"{name}.py" for name in names()})
    import jupytext

    notebook = jupytext.read(path)
    for index, cell in enumerate(notebook.cells):
        # Random ids would make every export a change.
        cell["id"] = f"{name}-{index}"
        cell["metadata"] = {}
    return notebook


def execute(name: str) -> Any:
    """Run a notebook in a kernel of this Python; `AnalysisError` says what a cell of it raised."""
    from jupyter_client import KernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = source(name)
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["kernelspec"] = python
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Sockets in the file system: nothing listens on a network.
    kernel = KernelManager(kernel_name="python3", transport="ipc")
    resources = {"metadata": {"path": str(ROOT)}}
    client = NotebookClient(notebook, km=kernel, timeout=_SECONDS, resources=resources)
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
            raise AnalysisError(f"notebooks need {package}: pip install -e '.[notebooks]'")
    import nbformat

    paths = {name: Path(out) / f"{name}.ipynb" for name in chosen or names()}
    for name in paths:
        source(name)  # before the first is run
    for name, path in paths.items():
        atomic_write(path, nbformat.writes(execute(name)) + "\n")
    return list(paths.values())


def runs_folder(folder: Path | None = None, records: str = "runs") -> Path:
    """Return the folder with the runs that the notebooks read: `folder`, or `ANALYSIS_RUNS=DIR`.

    Without either, the published records `results/<records>.tar.gz` are unpacked below
    `runs/.published`. `AnalysisError` if it holds no runs.
    """
    chosen = folder or os.environ.get(VARIABLE)
    if not chosen:
        return unpack(RECORDS / f"{records}.tar.gz", ROOT / PUBLISHED)
    path = Path(chosen).expanduser()
    if not (path.is_dir() and find(path)):
        raise AnalysisError(
            f"{path} holds no runs; give a folder of them, or leave {VARIABLE} and --runs out for "
            "those of results/"
        )
    return path


def command(options: argparse.Namespace) -> int:
    """Execute notebooks on the runs given."""
    if options.runs is not None:
        os.environ[VARIABLE] = str(runs_folder(options.runs).resolve())
    for path in build(options.only, options.out or FOLDER):
        print(path)
    return 0
