"""`python -m sweeps`: see `sweeps.command`."""

import sys

from experiments.runtime.command import run_command


def main(arguments: list[str]) -> int:
    """Run the command; imported here, so that a missing package is reported in one sentence."""
    from sweeps.command import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(run_command(main))
