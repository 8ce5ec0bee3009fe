"""Notebooks in percent format, executed to .ipynb with outputs, and the runs that they read."""

import argparse
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from analysis.errors import AnalysisError, pick
from analysis.runs.archives import PUBLISHED, is_archive, unpack
from analysis.runs.loading import find
from experiments.runtime.errors import ROOT
from experiments.runtime.files import atomic_write

FOLDER = Path(__file__).parents[1] / "notebooks"
# The line that a notebook's user changes; `--runs DIR` replaces it.
_RUNS = re.compile(r'^RUNS = "[^"]*"', re.MULTILINE)
_SECONDS = 1200  # that a cell may take


def names() -> list[str]:
    """Return the notebooks' names, without suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def source(name: str, runs: Path | None = None) -> Any:
    """Return the notebook of a percent script, without outputs.

    Args:
        name: One of `names()`; `AnalysisError` for another.
        runs: Replaces the value of its variable `RUNS`.
    """
    path = pick("notebook", name, {name: FOLDER / f"{name}.py" for name in names()})
    import jupytext

    notebook = jupytext.read(path)
    for index, cell in enumerate(notebook.cells):
        # Random ids would change with every export.
        cell["id"] = f"{name}-{index}"
        cell["metadata"] = {}
        if runs is not None:
            line = f"RUNS = {str(runs)!r}"
            cell["source"] = _RUNS.sub(lambda _: line, cell["source"])  # noqa: B023
    return notebook


def execute(name: str, runs: Path | None = None) -> Any:
    """Run a notebook in a kernel of this Python; `AnalysisError` says what a cell of it raised."""
    from jupyter_client import KernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = source(name, runs)
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
        # Otherwise the kernel is left running with its sockets open.
        try:
            client.execute(cleanup_kc=True, env={**os.environ, **quiet})
        except CellExecutionError as error:
            raise AnalysisError(
                f"notebook {name}: {error.ename}: {' '.join(error.evalue.split())[:500]}"
            ) from error
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)
    return notebook


def build(
    chosen: list[str] | None = None, out: str | Path = FOLDER, runs: Path | None = None
) -> list[Path]:
    """Execute notebooks, on `runs` if given, and write them as `<name>.ipynb`; return the paths."""
    for package in ("nbformat", "jupytext", "nbclient", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            raise AnalysisError(f"notebooks need {package}: pip install -e '.[notebooks]'")
    import nbformat

    paths = {name: Path(out) / f"{name}.ipynb" for name in chosen or names()}
    for name in paths:
        source(name)  # before the first is run
    for name, path in paths.items():
        atomic_write(path, nbformat.writes(execute(name, runs)) + "\n")
    return list(paths.values())


def runs_folder(source: str | Path) -> Path:
    """Return the folder of runs of a notebook's `RUNS`: a folder, or an archive of records.

    An archive is unpacked once below `runs/.published`. A relative path starts at the current
    folder or, where nothing is there, at the checkout: Jupyter starts a notebook in its own folder.
    `AnalysisError` if it holds no runs.
    """
    path = Path(source).expanduser()
    if not path.exists():
        path = ROOT / path
    if is_archive(path):
        return unpack(path, ROOT / PUBLISHED)
    if not (path.is_dir() and find(path)):
        raise AnalysisError(
            f"{source} holds no runs; give a folder of them, or an archive such as "
            "results/runs.tar.gz"
        )
    return path


def command(options: argparse.Namespace) -> int:
    """Execute notebooks, on the runs given or on the records that they name."""
    runs = None if options.runs is None else runs_folder(options.runs).resolve()
    for path in build(options.only, options.out or FOLDER, runs):
        print(path)
    return 0
