"""Train one diffusion model: python experiments/run.py backbone=mamba route=2-8 (see --help)."""

from __future__ import annotations

import sys
from pathlib import Path

# The repository root, not this script's folder: `experiments` must be found as a package from
# anywhere.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments.runtime.command import run_command


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return its exit code."""
    from experiments.config import help_text

    if any(flag in argv for flag in ("-h", "--help", "help")):
        print(help_text.help_text())
        return 0
    if any(flag in argv for flag in ("-m", "--multirun")):
        from experiments.multirun import multirun

        return multirun(argv)
    from experiments.config.compose import load

    config = load(argv)
    if config.dry:
        print(help_text.dry_text(config))
        return 0
    from experiments.training.session import train

    train(config)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
