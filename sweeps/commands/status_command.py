"""`status`, `show`, `list` and `cancel`: what needs no configuration (no torch here)."""

import argparse
import json
import sys

from experiments.runtime.console import show
from routing.errors import UserError
from sweeps import SweepError
from sweeps.commands.arguments import Arguments
from sweeps.plan import grid
from sweeps.plan.dependencies import display_name
from sweeps.status import status_table
from sweeps.status.run_status import RunStatus
from sweeps.status.status import PARENT_DIVERGED, cached_queue, statuses
from sweeps.status.status_table import mixed_pairs
from sweeps.store.folder import all_sweeps
from sweeps.submission.live_jobs import cancel
from sweeps.submission.optuna_study import summary as search_summary


def status_command(options: argparse.Namespace) -> None:
    """Run `status`: of one sweep, run by run, or of all."""
    if options.grid is not None and "=" in options.grid:  # no grid, but an override
        options.overrides.insert(0, options.grid)
        options.grid = None
    if options.grid is None:
        _all_sweeps(options)
        return
    sweep, runs = Arguments(options).select(options.grid, " ".join(options.overrides))

    def ask() -> tuple[list[RunStatus], str]:
        stored = sweep.runs()  # another launch may have changed their steps
        return statuses(sweep, [stored[run.name] for run in runs])

    is_terminal = sys.stdout.isatty()
    is_live = is_terminal and not (options.json or options.once)
    rows, trouble = status_table.watch(sweep.name, ask) if is_live else ask()
    if options.json:
        show(json.dumps(status_table.as_json(sweep, rows, trouble), indent=1))
        return
    if is_live:
        pass  # the table is there
    elif is_terminal:
        from rich.console import Console

        console = Console()
        console.print(status_table.table(sweep.name, rows, console.width))
    else:
        show("\n".join([*status_table.plain(rows), status_table.totals(rows)]))
    for line in [*search_summary(sweep), *mixed_pairs(sweep, [row.run for row in rows])]:
        show(line)
    due = []
    for row in rows:
        if row.state in ("failed", "stopped") and row.why != PARENT_DIVERGED:
            due.append(row.run.name)
    for line in sweep.retry_lines(due):
        show(f"to submit them again, with the cluster= of that launch:\n{line}")
    if trouble:
        show(trouble, stream=sys.stderr)


def _all_sweeps(options: argparse.Namespace, prefix: str = "") -> None:
    """Print a line about every sweep that has matching runs."""
    arguments = Arguments(options)
    queue = cached_queue()
    lines, values, troubles = [], [], set()
    sweeps = all_sweeps(arguments.root)
    for sweep in sweeps:
        try:
            runs = arguments.matching_runs(sweep.open())
        except UserError as error:  # of this sweep; the others are shown
            troubles.add(str(error))
            continue
        if runs:
            rows, trouble = statuses(sweep, runs, queue)
            lines.append(prefix + status_table.overview(sweep, rows))
            values.append(status_table.as_json(sweep, rows, trouble))
            troubles.add(trouble)
    if getattr(options, "json", False):
        show(json.dumps(values, indent=1))
    elif lines:
        show("\n".join(lines))
    elif not prefix and sweeps:
        show(f"no run of a sweep below {arguments.root} has the values that were typed")
    elif not prefix:
        show(f"no sweep was launched below {arguments.root}")
    for trouble in sorted(troubles - {""}):
        show(trouble, stream=sys.stderr)


def show_command(options: argparse.Namespace) -> None:
    """Run `show`: one grid, or everything about one run."""
    if options.run is None:
        _show_grid(options)
        return
    sweep, runs = Arguments(options).select(options.grid, " ".join(options.overrides))
    # As the table shows them: some runs are named after their cell until they start.
    matching = [run for run in runs if (options.run or "") in f"{display_name(run)} {run.name}"]
    if len(matching) != 1:
        names = ", ".join(display_name(run) for run in (matching or runs)[:4])
        raise SweepError(
            f"--run {options.run}: expected the name of one run, but {len(matching)} have it; "
            f"such as --run {names}"
        )
    show("\n".join(status_table.details(sweep, matching[0])))


def _show_grid(options: argparse.Namespace) -> None:
    from sweeps.plan.plan import make_plan

    arguments, chosen = Arguments(options), grid.load(options.grid)
    plan = make_plan(chosen, arguments.scale, arguments.overrides)
    show(f"{chosen.name}: {chosen.title}")
    show(f"makes: {', '.join(chosen.makes) or 'no table or figure'}")
    if chosen.raw.get("note"):
        show(" ".join(chosen.raw["note"].split()))
    for run in plan.runs:
        show(f"  {run.name}  {run.label}")
    for line in plan.notes():
        show(f"  {line}")
    show(f"{len(plan.runs)} runs at scale {arguments.scale}, {len(plan.waiting)} waiting")


def list_command(options: argparse.Namespace) -> None:
    """Run `list`: the grids of the package, and the sweeps that were launched."""
    names = grid.names()
    width = max(map(len, names))
    for name in names:
        show(f"{name:<{width}}  {grid.load(name).title}")
    _all_sweeps(options, prefix="launched: ")


def cancel_command(options: argparse.Namespace) -> None:
    """Run `cancel`."""
    sweep, runs = Arguments(options).select(options.grid, " ".join(options.overrides))
    cancel(sweep, runs)
