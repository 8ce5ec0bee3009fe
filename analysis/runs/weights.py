"""Runs with weights below the folders that a command is given, measured one by one."""

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.runs.run_files import Damaged, check_path, shown
from analysis.runs.run_records import AnalysisError, find
from routing.errors import UserError


def with_weights(given: Sequence[Path]) -> list[Path]:
    """Return the run folders with weights at or below folders, and exported files as they are.

    Raises:
        AnalysisError: If there is none.
    """
    found = [run for top in given for run in ([top] if top.suffix == ".safetensors" else find(top))]
    files = [run if run.suffix == ".safetensors" else run / "model.safetensors" for run in found]
    finished = [run for run, file in zip(found, files, strict=True) if file.is_file()]
    if not finished:
        raise AnalysisError(
            f"no run with weights below {given[0]}; give a folder with model.safetensors in it"
        )
    return list(dict.fromkeys(finished))


def beside(run: Path, name: str) -> Path:
    """Return where to store what was measured on a run: in its folder, or next to its file."""
    return run / name if run.is_dir() else run.with_name(f"{run.stem}.{name}")


def read_beside(runs: pd.DataFrame, name: str, read: Callable[[Path], Any]) -> list[Any]:
    """Return what was stored beside runs; a broken file is named and left out."""
    found = []
    for path in (Path(str(folder)) / name for folder in runs.get("path", [])):
        if path.is_file():
            try:
                found.append(read(path))
            except AnalysisError as error:
                warnings.warn(str(error), stacklevel=3)
    return found


def one_by_one(runs: Sequence[Path], measure: Callable[[Path], None]) -> None:
    """Measure every run; one that is damaged is named, and refused after all others are done."""
    failed = 0
    for run in runs:
        try:
            check_path(run)
            measure(run)
        except (UserError, Damaged) as error:
            if len(runs) == 1:
                raise AnalysisError(str(error)) from None
            print(f"damaged: {shown(run.name)}: {error}", file=sys.stderr)
            failed += 1
    if failed:
        raise AnalysisError(f"{failed} of {len(runs)} runs could not be measured")
