"""Results that are measured on trained models and stored beside their runs."""

import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from analysis.errors import AnalysisError
from analysis.runs import run_files
from analysis.runs.loading import find
from analysis.runs.run_files import Damaged, shown
from experiments.runtime.console import show
from routing.errors import UserError, require


def check_protocol(
    command: str, levels: Sequence[float], samples: int, batch: int, least: int = 1
) -> None:
    """Raise `AnalysisError` unless noise levels are above 0 and there are `least` samples or more.

    Args:
        command: Name of the command that measures, for the message.
        levels: Noise levels sigma / alpha over the data's standard deviation.
        samples: Held-out samples.
        batch: Samples per pass.
        least: Fewest samples that the measurement can be made on.
    """
    text = " ".join(map(str, levels)) or "(none)"
    is_valid = levels and all(0 < level < math.inf for level in levels)
    for condition, message in (
        (is_valid, f"levels {text}: expected noise levels above 0, such as 0.1 1 10"),
        (samples >= least, f"samples {samples}: expected a number of at least {least}"),
        (batch >= 1, f"batch {batch}: expected a number of at least 1"),
    ):
        require(condition, f"{command} --{message}", AnalysisError)


def with_weights(paths: Sequence[Path]) -> list[Path]:
    """Return runs with weights at or below folders, and exported files; name what has none yet.

    `AnalysisError` where an exported file is missing, nothing has weights, or two exported files
    have the same name, under which their results are stored.
    """
    models: dict[Path, None] = {}
    empty = []
    for path in paths:
        candidates = _models_at(path)
        models.update(dict.fromkeys(candidates))
        if not candidates:
            empty.append(path)
    if not models:
        raise AnalysisError(f"no run with weights in {paths[0]}; give one with model.safetensors")
    for path in empty:
        show(f"no weights: {shown(path)}", stream=sys.stderr)
    stems = Counter(path.stem for path in models if path.suffix == ".safetensors")
    for stem, count in stems.items():
        if count > 1:
            raise AnalysisError(
                f"{count} of the files are called {stem}.safetensors, and results are stored under "
                "that name in the current folder; measure them one at a time"
            )
    return list(models)


def _models_at(path: Path) -> list[Path]:
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise AnalysisError(f"{path} is no file; give run folders or exported .safetensors")
        return [path]
    return [run for run in find(path) if (run / "model.safetensors").is_file()]


def result_path(run: Path, name: str) -> Path:
    """Return where to store what was measured on a run: in its folder.

    Results of an exported file go to the current folder: the file may be a bundled one, or lie
    where nothing can be written.
    """
    return run / name if run.is_dir() else Path(f"{run.stem}.{name}")


def read_beside(folders: Iterable[str], name: str, read: Callable[[Path], Any]) -> list[Any]:
    """Return what was stored beside runs; a broken file is left out with a warning."""
    results = []
    for folder in folders:
        path = Path(str(folder)) / name
        if path.is_file():
            try:
                results.append(read(path))
            except AnalysisError as error:
                warnings.warn(str(error), stacklevel=3)
    return results


def one_by_one(runs: Sequence[Path], measure: Callable[[Path], None]) -> None:
    """Measure every run; report damaged ones, and fail only after all others are done."""
    failures = 0
    for run in runs:
        try:
            run_files.check_path(run)
            measure(run)
        except (UserError, Damaged) as error:
            if len(runs) == 1:
                raise AnalysisError(str(error)) from None
            failures += 1
            show(f"damaged: {shown(run.name)}: {error}", stream=sys.stderr)
    if failures:
        raise AnalysisError(f"{failures} of {len(runs)} runs could not be measured")
