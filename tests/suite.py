"""Everything that the pinning tests import from the suite, in one place: moving a module is one edit here.

The pinning tests (`test_pinned_*.py`, `test_golden_*.py`, `test_surface.py`, `test_old_run.py`) hold the behaviour
that a restructuring must not change. They know configurations as plain values, runs as folders and tables as CSV
files; how those are made is known here alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from small import ROOT

DATA = ROOT / "tests" / "data"
RESULTS = ROOT / "results"


# --- configuration --------------------------------------------------------------------------------


def config_from_values(values: Mapping[str, Any]) -> Any:
    """Return the checked configuration of plain values, as `config.yaml` and weights hold them."""
    from experiments.config.schema import Config

    return Config.from_dict(values)


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what Hydra composes from the command line, as plain nested values."""
    from experiments.config import compose as composition

    return composition._compose(list(overrides))


# --- analysis -------------------------------------------------------------------------------------


def write_tables(runs: Path, names: Sequence[str], folder: Path) -> None:
    """Write tables of a folder of runs as `folder/NAME.csv`, as `python -m analysis tables` does."""
    from analysis.analysis_command import main

    assert main(["tables", str(runs), "--out", str(folder), "--only", *names]) == 0
