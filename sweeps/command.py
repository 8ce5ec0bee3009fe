"""The command `python -m sweeps`: launch, status, cancel, show and list."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from experiments.runtime.command import run_command
from experiments.runtime.parser import Parser
from routing.errors import one_of
from sweeps import SweepError
from sweeps.commands.status_command import (
    cancel_command,
    list_command,
    show_command,
    status_command,
)
from sweeps.store.folder import all_sweeps
from sweeps.store.overrides import runs_root

HELP = """\
Many runs, one grid per table or figure of the paper.

  python -m sweeps list                             grids, and what was launched
  python -m sweeps launch route_placement --dry-run runs, cost, sbatch script
  python -m sweeps launch route_placement cluster=debug train.steps=20
  python -m sweeps launch route_placement backbone=dit,mamba cluster=slurm \\
      scale=paper
  python -m sweeps launch search_route --trials 20  a search with Optuna
  python -m sweeps status                           all sweeps, any shell, later
  python -m sweeps status route_placement           one, run by run

The same launch again submits only what is missing, with --retry also what has
failed and what follows from it. key=value is an override; a comma makes a list:
it replaces that axis of the grid, selects rows of it, or adds an axis. It
applies to the first stage of the grid; STAGE:key=value addresses another one.
cluster= names a file in sweeps/resources or a path; cluster.KEY=VALUE sets one
of its keys: cluster.gpus=1 cluster.runs_per_gpu=4 lets four runs share a GPU. In
a grid file, cluster: {gpus: 2, tasks: 2} in a stage or an entry of cells applies
to its runs only.
"""
# What each command does.
COMMANDS = {
    "launch": "submit the runs of a grid that are missing, and return",
    "status": "status of every run of a sweep; without a grid, of all sweeps",
    "cancel": "cancel what is in the queue or running",
    "show": "one grid, or one run with its attempts, logs and overrides",
    "list": "the grids, and what was launched",
}


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    plain = argparse.RawDescriptionHelpFormatter
    result = Parser("python -m sweeps", description=HELP, formatter_class=plain)
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, description in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=description, description=description)
        if name != "list":
            grid_count: dict[str, Any] = {"nargs": "?"} if name == "status" else {}
            parsers[name].add_argument(
                "grid", metavar="GRID", help="name of a grid, or a .yaml file", **grid_count
            )
        parsers[name].add_argument(
            "overrides", nargs="*", metavar="KEY=VALUE", help="overrides, or a filter of runs"
        )
    launch, status, show = parsers["launch"], parsers["status"], parsers["show"]
    launch.add_argument(
        "--dry-run",
        action="store_true",
        help="or dry=true: check everything, and print runs, cost and the script; submit nothing",
    )
    launch.add_argument(
        "--retry", action="store_true", help="also submit failed runs, and what follows from them"
    )
    launch.add_argument("--throttle", type=int, metavar="N", help="at most N runs at once")
    launch.add_argument(
        "--compare-at",
        default="steps",
        metavar="WHAT",
        help="give every run the steps (default), or flops of its dense run",
    )
    launch.add_argument(
        "--trials", type=int, metavar="N", help="total number of trials of a search"
    )
    status.add_argument(
        "--once", action="store_true", help="print the table once, also on a terminal"
    )
    status.add_argument("--json", action="store_true", help="print JSON instead")
    show.add_argument("--run", metavar="NAME", help="part of a run's name")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 (a run failed in this process) or 2 (invalid input)."""
    return run_command(_dispatch, list(sys.argv[1:] if argv is None else argv))


def _dispatch(arguments: list[str]) -> int | None:
    if not arguments:
        _print_help()
        return 0
    if not arguments[0].startswith("-"):
        one_of("command", arguments[0], list(COMMANDS), SweepError)
    command_parser = parser()
    # argparse cannot mix flags and positionals under a subcommand: overrides may follow flags.
    options, rest = command_parser.parse_known_args(arguments)
    for argument in rest:
        if argument.startswith("-"):
            command_parser.error(f"unrecognized argument: {argument}")
        options.overrides.append(argument)
    if options.command == "launch":
        # The only command that composes configurations, which imports more.
        from sweeps.commands.launch_command import launch_command

        return launch_command(options)
    others = {
        "status": status_command,
        "cancel": cancel_command,
        "show": show_command,
        "list": list_command,
    }
    others[options.command](options)
    return 0


def _print_help() -> None:
    launched = [sweep.name for sweep in all_sweeps(runs_root({}))]
    step = f"status {launched[-1]}" if launched else "launch route_placement --dry-run"
    print(f"{HELP}\nNext: python -m sweeps {step}\n      python -m sweeps COMMAND --help")
