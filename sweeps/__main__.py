"""`python -m sweeps`: see `sweeps.sweeps_command`."""

import sys

from experiments.runtime.command import run_command


def main(words: list[str]) -> int:
    """Run the command; imported here, so that a missing package is one sentence."""
    from sweeps.sweeps_command import main as command

    return command(words)


if __name__ == "__main__":
    sys.exit(run_command(main))
