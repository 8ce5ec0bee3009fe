"""Small real runs for the notebooks: `ANALYSIS_RUNS`, or a study trained on the spot.

Nothing here imports the training code: runs are made by the commands that a user types.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

from analysis.runs.run_records import AnalysisError, find

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "ANALYSIS_RUNS"

# Eight narrow blocks on real digits: a minute for all of them on two quiet cores. `auto` is 2-4 at
# this depth.
SMALL = (
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


def folder() -> Path:
    """Return the folder with the runs that the notebooks read.

    `ANALYSIS_RUNS=DIR` names one with runs in it, or an empty one to be filled; without it,
    `runs/notebooks` is filled.

    Raises:
        AnalysisError: if training fails; the message holds the command and its last line.
    """
    path = Path(os.environ.get(VARIABLE) or ROOT / "runs" / "notebooks").expanduser()
    if not (path.is_dir() and find(path)):
        make(path)
    return path


def make(path: Path, axes: Iterable[Sequence[str]] = STUDY, guides: Sequence[str] = GUIDES) -> None:
    """Train every combination of overrides, then score one routed run under guidances."""
    for cell in product(*axes):
        _command("experiments/run.py", *SMALL, *cell, f"paths.runs={path}")
    routed = next(
        (run for run in find(path) if run.name.startswith("dit") and "_2-4_" in run.name), None
    )
    if routed is not None and guides:
        _command(
            "experiments/evaluate.py",
            str(routed),
            "--samples",
            "80",
            "--metrics",
            "fd",
            "--guidance",
            *guides,
        )


def _command(script: str, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], capture_output=True, text=True, cwd=ROOT
    )
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise AnalysisError(f"python {script} {' '.join(arguments)} failed: {' '.join(last)}")
