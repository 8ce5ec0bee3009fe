"""Train one diffusion model: python experiments/run.py backbone=mamba route=2-8 (see --help)."""

from __future__ import annotations

import sys
from pathlib import Path

# The repository root instead of this script's folder, so that `experiments` can be imported.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments.runtime.command import HELP_WORDS, run_command


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return its exit code."""
    from experiments.config.help import help_text

    argv = ["dry=true" if argument == "--dry-run" else argument for argument in argv]
    if not HELP_WORDS.isdisjoint(argv):
        topics = [name for name in argv if name[:1] != "-" and name != "help"]
        print(help_text(*topics[:1]))
        return 0
    from experiments.config.compose import load
    from experiments.multirun import multirun
    from experiments.training.start import train_or_dry_run

    if any(flag in argv for flag in ("-m", "--multirun")):
        return multirun(argv)
    train_or_dry_run(load(argv), argv)
    return 0


def start() -> int:
    """Entry point of `tread-run`; uses `sys.argv`."""
    return run_command(main, computes=True)


if __name__ == "__main__":
    sys.exit(start())
