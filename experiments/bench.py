"""Measure speed: python experiments/bench.py backbone=mamba tokens=256 (--help lists all keys)."""

from __future__ import annotations

import sys
from pathlib import Path

# The repository root instead of this script's folder, so that `experiments` can be imported.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments.runtime.command import HELP_WORDS, run_command
from experiments.runtime.console import loading


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return its exit code."""
    from experiments.benchmark.bench_options import BenchOptions, help_text, parse

    if not HELP_WORDS.isdisjoint(argv):
        print(help_text())
        return 0
    options = parse(argv, BenchOptions)
    with loading():
        from experiments.benchmark.bench_report import run
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
