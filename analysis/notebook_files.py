"""Notebooks in percent format, executed to .ipynb with outputs."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from analysis.runs.run_records import AnalysisError
from experiments.runtime.files import atomic_write
from routing.errors import suggest

FOLDER = Path(__file__).with_name("notebooks")


def names() -> list[str]:
    """Return the notebooks' names, without suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def source(name: str) -> Any:
    """Return a notebook of the percent script `name`, without outputs.

    Raises:
        AnalysisError: if there is no such notebook.
    """
    if name not in names():
        raise AnalysisError(
            f"no notebook {name}; there are {', '.join(names())}{suggest(name, names())}"
        )
    import jupytext

    notebook = jupytext.read(FOLDER / f"{name}.py")
    for index, cell in enumerate(notebook.cells):
        # Random ids would make every export a change.
        cell["id"] = f"{name}-{index}"
        cell["metadata"] = {}
    return notebook


def execute(name: str, timeout: int = 1200) -> Any:
    """Run a notebook in a kernel of this Python and return it with its outputs.

    Args:
        name: The notebook.
        timeout: Seconds a cell may take.

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
    root = str(FOLDER.parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # Sockets in the file system: nothing listens on a network.
    kernel = KernelManager(kernel_name="python3", transport="ipc")
    client = NotebookClient(
        notebook, km=kernel, timeout=timeout, resources={"metadata": {"path": root}}
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

    paths = []
    for name in chosen or names():
        path = Path(out) / f"{name}.ipynb"
        atomic_write(path, nbformat.writes(execute(name)) + "\n")
        paths.append(path)
    return paths
