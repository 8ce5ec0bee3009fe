"""The commands: launch, status, retry, cancel, show, list."""

import argparse
import contextlib
import functools
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.config import Config
from experiments.config.groups import GROUPS
from experiments.preflight import check_ready
from experiments.runtime.command import print_error, run_command, sentence
from experiments.runtime.memory import visible_gpus
from routing.errors import Parser, one_of, suggest
from sweeps import SweepError, status_table
from sweeps.jobs import cluster_resources, slurm
from sweeps.jobs.sweep_folder import Sweep, all_sweeps
from sweeps.launch import cancel, launch, missing, retry
from sweeps.planning import grid, overrides
from sweeps.planning.overrides import Typed
from sweeps.planning.planned_runs import Plan, PlannedRun, estimate, plan, runs_root
from sweeps.run_status import RunStatus, slurm_queue, statuses
from sweeps.search import Search
from sweeps.search import summary as search_summary

HELP = """\
Many runs, one grid per table or figure of the paper.

  python -m sweeps list                             grids, and what was launched
  python -m sweeps launch route_placement --dry-run runs, cost, sbatch script
  python -m sweeps launch route_placement cluster=debug train.steps=20
  python -m sweeps launch route_placement backbone=dit,mamba cluster=slurm \\
      scale=paper
  python -m sweeps launch search_route --trials 20  optuna proposes
  python -m sweeps launch mygrid.py                 a grid in Python (executed)
  python -m sweeps status                           all sweeps, any shell, later
  python -m sweeps status route_placement           one, run by run

The same launch again submits only what is missing. A word is an override
(key=value); a comma makes a list: it replaces that axis of the grid, picks rows
of it, or adds an axis. cluster= names a file in sweeps/resources or a path;
cluster.KEY=VALUE sets one of its keys.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    plain = argparse.RawDescriptionHelpFormatter
    made = Parser("python -m sweeps", description=HELP, formatter_class=plain)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sub = {}
    for name, (_, what) in COMMANDS.items():
        sub[name] = commands.add_parser(name, help=what, description=what)
        if name != "list":
            sub[name].add_argument(
                "grid", metavar="GRID", help="a grid's name, a .yaml or a .py file",
                nargs="?" if name == "status" else None,
            )  # fmt: skip
        what = "overrides, or a filter of runs"
        sub[name].add_argument("words", nargs="*", metavar="KEY=VALUE", help=what)
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    flag: dict[str, Any] = {"action": "store_true"}
    for names, option, what, kind in (
        ("launch", "--dry-run",
         "or dry=true: print runs, cost and the script, refuse what a launch would refuse", flag),
        ("launch retry", "--throttle", "at most N runs at once", number),
        ("launch", "--compare-at", "equal steps (default), flops or hours for each cell",
         {"default": "steps", "metavar": "WAY"}),
        ("launch", "--trials", "of a grid with a search section: N in all", number),
        ("status", "--once", "print the table once, also on a terminal", flag),
        ("status", "--json", "print plain values instead", flag),
        ("show", "--follow", "print a run's log as it grows, until the run ends", flag),
        ("show", "--run", "part of a run's name", {"metavar": "NAME"}),
    ):  # fmt: skip
        for name in names.split():
            sub[name].add_argument(option, help=what, **kind)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 (a run failed in this process) or 2 (wrong input)."""
    return run_command(_dispatch, list(sys.argv[1:] if argv is None else argv))


def _dispatch(words: list[str]) -> int | None:
    if not words:
        launched = [sweep.name for sweep in all_sweeps(runs_root({}))]
        step = f"status {launched[-1]}" if launched else "launch route_placement --dry-run"
        print(f"{HELP}\nNext: python -m sweeps {step}\n      python -m sweeps COMMAND --help")
        return 0
    if not words[0].startswith("-"):
        one_of("no command", words[0], list(COMMANDS), SweepError)
    made = parser()
    # argparse cannot mix flags and positionals under a subcommand: overrides may stand after flags.
    chosen, rest = made.parse_known_args(words)
    for word in rest:
        if word.startswith("-"):
            made.error(f"unrecognized argument: {word}")
        chosen.words.append(word)
    command, _ = COMMANDS[chosen.command]
    return command(chosen)


class CommandWords:
    """A command's words, sorted: scale, cluster and its keys, and overrides of the runs."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.typed = overrides.parse(chosen.words)
        for key in {key.partition(".")[0] for key in self.typed} & {"cluster", "dry"}:
            theirs = ("launch", "retry") if key == "cluster" else ("launch",)
            if chosen.command not in theirs:
                where = " and ".join(theirs)
                raise SweepError(f"{key}= belongs to {where}; leave it out of {chosen.command}")
        throttle = getattr(chosen, "throttle", None)
        ours = ("scale", "cluster", "dry")
        keys = [key for key in self.typed if key.startswith("cluster.")]
        self.overrides = {k: v for k, v in self.typed.items() if k not in (*ours, *keys)}
        # One value with its commas, as sbatch has lists: cluster.exclude=n1,n2
        texts = {key.removeprefix("cluster."): ",".join(self.typed[key]) for key in keys}
        self.cluster_keys = {key: text.strip("'\"") for key, text in texts.items()}
        if throttle is not None:
            if "throttle" in self.cluster_keys:
                raise SweepError("--throttle and cluster.throttle are one setting; type one")
            self.cluster_keys["throttle"] = str(throttle)
        self.root = runs_root(self.overrides)
        self.cluster, self.dry = self.one("cluster", ""), self.one("dry", "false")
        one_of("dry", self.dry, ("true", "false", "full"), SweepError)
        for key in self.overrides:  # a run has no such keys, so that it could not suggest them
            if (guess := suggest(key, (*GROUPS, "cluster", "seed"))).endswith(" cluster?"):
                raise SweepError(f"unknown key {key}{guess}")

    def one(self, key: str, default: str) -> str:
        """Return the one value of a key, or `default`."""
        return overrides.only(key, self.typed.get(key, [Typed(default)]))

    @property
    def scale(self) -> str:
        """The scale of what is launched; elsewhere it is a filter like any other key."""
        return self.one("scale", "tiny")

    def resources(self, default: str = "", scale: str = "") -> cluster_resources.Resources:
        """Return the resources that were asked for; by default Slurm where there is one."""
        default = default or ("slurm" if shutil.which("sbatch") else "local")
        name = self.cluster or default
        return cluster_resources.load(name, scale or self.scale, self.cluster_keys)

    def among(self, sweep: Sweep) -> list[PlannedRun]:
        """Return the runs of a sweep that have the values that were typed."""
        every = sweep.runs()
        filters = {k: v for k, v in self.typed.items() if k in self.overrides or k == "scale"}
        filters.pop("paths.runs", None)
        return [
            run
            for run in every.values()
            if all(
                any(overrides.same(Typed(_values(run, every).get(key, "")), v) for v in values)
                for key, values in filters.items()
            )
        ]


def _values(run: PlannedRun, every: Mapping[str, PlannedRun]) -> dict[str, str]:
    """Return a run's overrides by key; a command has those of the run that it reads too."""
    return {**every.get(Path(run.folder).name, run).values, **run.values}


def _launch(chosen: argparse.Namespace) -> int:
    words = CommandWords(chosen)
    dry = "true" if chosen.dry_run and words.dry == "false" else words.dry
    found = grid.load(chosen.grid)
    place = words.resources("slurm" if dry != "false" else "")
    ready = _Ready(place, stop=dry == "false")
    planned = functools.partial(
        plan, scale=words.scale, user=words.overrides, compare_at=chosen.compare_at, check=ready
    )
    if found.raw.get("search"):
        space = Search(found, planned, words.overrides, chosen.trials)
        print(f"search: {space.trials} trials over {', '.join(space.space)}")
        if dry == "false":
            return space.work(place)
    elif chosen.trials is not None:
        raise SweepError(f"--trials: grid {found.name} has no search section (see search_route)")
    while True:
        made = planned(found)
        print("".join(f"{line}\n" for line in made.notes()), end="")
        if dry != "false":
            _dry_run(made, place, full=dry == "full")
            return ready.exit_code
        failed = launch(made, place)
        if failed is None or failed or place.kind != "debug" or not made.waiting:
            return int(bool(failed))
        # Parents are done now: the next stage can be planned.


class _Ready:
    """Checks what a run would refuse before its first step, at the resources of a launch.

    The first refusal ends a launch (`stop`). A dry run prints it and goes on: the plan and its cost
    can be looked at where the data are not.
    """

    def __init__(self, place: cluster_resources.Resources, stop: bool) -> None:
        on_slurm = place.kind == "slurm"  # whose nodes are known to it alone
        self.processes = place.nodes * place.tasks if on_slurm else 1
        self.on_gpu = on_slurm or bool(visible_gpus())
        self.stop, self.exit_code = stop, 0

    def __call__(self, config: Config) -> None:
        if self.exit_code:
            return
        try:
            check_ready(config, self.processes, self.on_gpu)
        except Exception as error:
            text = sentence(error)
            if self.stop or text is None:
                raise
            print_error(text)
            self.exit_code = 2


def _dry_run(made: Plan, place: cluster_resources.Resources, full: bool) -> None:
    """Print what a launch would submit now, without the runs that are finished or live."""
    sweep, runs = Sweep(made.root, made.grid.name), made.runs
    if not made.grid.raw.get("search"):  # its trials are chosen as it runs
        runs, _ = missing(sweep, made.runs, print, need_queue=False)
    left = replace(made, runs=runs)
    script = ""  # first, for it refuses what a launch would refuse
    if place.kind == "slurm" and runs:
        script = slurm.script(sweep, place, len(runs), sweep.snapshots / "SNAPSHOT")
    words = [f"{run.entry} {shlex.join(run.args)}" for run in runs] if full else []
    print("".join(f"{line}\n" for line in [*estimate(left, place.tflops), *words]), end="")
    counts = f"{len(runs)} runs on cluster={place.name}, {len(made.waiting)} waiting"
    more = "" if full else " (dry=full adds the words of every run)"
    print(f"{counts}; nothing was submitted{more}")
    if place.kind == "slurm" and shutil.which("sbatch") is None:
        print("there is no sbatch here: a launch without cluster= would train on this machine")
    if script:
        print(script)


def _sweep(chosen: argparse.Namespace) -> tuple[Sweep, list[PlannedRun], CommandWords]:
    """Return the sweep, those of its runs that match the words, and the words."""
    words = CommandWords(chosen)
    name = grid.check_name(re.sub(r"\.(yaml|yml|py)\Z", "", Path(chosen.grid).name))
    sweep, known = Sweep(words.root, name), [s.name for s in all_sweeps(words.root)]
    if name not in known:
        what = f"expected {', '.join(known)}{suggest(name, known)}" if known else "none was"
        raise SweepError(f"no sweep {name!r} was launched below {words.root}; {what}")
    runs = words.among(sweep)
    if not runs:
        raise SweepError(f"sweep {name}: none of its runs has {' '.join(chosen.words)}")
    return sweep, runs, words


def _status(chosen: argparse.Namespace) -> None:
    if chosen.grid is None or "=" in chosen.grid:
        _all_sweeps(chosen)
        return
    sweep, runs, _ = _sweep(chosen)

    def ask() -> tuple[list[RunStatus], str]:
        known = sweep.runs()  # another launch may have changed their steps
        return statuses(sweep, [known[run.name] for run in runs])

    terminal = sys.stdout.isatty()
    if terminal and not (chosen.json or chosen.once):
        status_table.watch(sweep.name, ask)
        return
    rows, trouble = ask()
    if chosen.json:
        print(json.dumps(status_table.as_json(sweep, rows, trouble), indent=1))
        return
    if terminal:
        from rich.console import Console

        console = Console()
        console.print(status_table.table(sweep.name, rows, console.width))
    else:
        print("\n".join([*status_table.plain(rows), status_table.sums(rows)]))
    for line in search_summary(sweep):
        print(line)
    if trouble:
        print(trouble, file=sys.stderr)


def _all_sweeps(chosen: argparse.Namespace, before: str = "") -> None:
    chosen.words += filter(None, [getattr(chosen, "grid", None)])  # no grid, but a first word
    words = CommandWords(chosen)
    queue, found, told, troubles = functools.cache(slurm_queue), [], [], set()
    launched = all_sweeps(words.root)
    for sweep in launched:
        try:
            runs = words.among(sweep)
        except SweepError as error:  # of this sweep; the others are shown
            troubles.add(str(error))
            continue
        if runs:
            rows, trouble = statuses(sweep, runs, queue)
            found.append(before + status_table.overview(sweep, rows))
            told.append(status_table.as_json(sweep, rows, trouble))
            troubles.add(trouble)
    if getattr(chosen, "json", False):
        print(json.dumps(told, indent=1))
    elif found or not before:
        none = f"no run of a sweep below {words.root} has the values that were typed"
        print("\n".join(found) or none if launched else f"no sweep was launched below {words.root}")
    for trouble in sorted(troubles - {""}):
        print(trouble, file=sys.stderr)


def _retry(chosen: argparse.Namespace) -> int:
    sweep, runs, words = _sweep(chosen)
    every, latest = sweep.runs(), sweep.latest_batches()
    due = [row.run for row in statuses(sweep, runs)[0] if row.state in ("failed", "stopped")]
    groups: dict[str, tuple[cluster_resources.Resources, list[PlannedRun]]] = {}
    for run in due or runs[:1]:  # without any, or without an answer, `retry` says so
        # As it was launched last: a sweep may have several scales, and a run that was debugged.
        if not words.cluster and run.name in latest and (before := latest[run.name].resources):
            place = cluster_resources.again(before, words.cluster_keys)
        else:
            place = words.resources(scale=_values(run, every).get("scale", ""))
        groups.setdefault(repr(place), (place, []))[1].append(run)
    found = grid.load(chosen.grid) if chosen.grid.endswith(".py") else None
    # What is submitted first does not wait.
    ordered = sorted(groups.values(), key=lambda group: group[0].kind == "debug")
    return int(any([retry(sweep, part, place, found=found) for place, part in ordered]))


def _cancel(chosen: argparse.Namespace) -> None:
    sweep, runs, _ = _sweep(chosen)
    cancel(sweep, runs)


def _show(chosen: argparse.Namespace) -> None:
    if chosen.run is not None or chosen.follow:
        sweep, runs, _ = _sweep(chosen)
        found = [run for run in runs if (chosen.run or "") in run.name]
        if len(found) != 1:
            some = ", ".join(run.name for run in (found or runs)[:4])
            raise SweepError(f"{len(found)} runs are so named; expected one, such as --run {some}")
        if not chosen.follow:
            print("\n".join(status_table.details(sweep, found[0])))
            return
        with contextlib.suppress(KeyboardInterrupt):
            status_table.follow(sweep, found[0])
        return
    words, one = CommandWords(chosen), grid.load(chosen.grid)
    made = plan(one, words.scale, words.overrides)
    print(f"{one.name}: {one.title}")
    print(f"makes: {', '.join(one.makes) or 'nothing of its own'}")
    if one.raw.get("note"):
        print(" ".join(one.raw["note"].split()))
    for line in (*(f"{run.name}  {run.label}" for run in made.runs), *made.notes()):
        print(f"  {line}")
    print(f"{len(made.runs)} runs at scale {words.scale}, {len(made.waiting)} waiting")


def _list(chosen: argparse.Namespace) -> None:
    titles = {name: grid.load(name).title for name in grid.names()}
    for name, title in titles.items():
        print(f"{name:<{max(map(len, titles))}}  {title}")
    _all_sweeps(chosen, before="launched: ")


# What does each command, and what it is.
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int | None], str]] = {
    "launch": (_launch, "submit what is missing of a grid, and leave"),
    "status": (_status, "where every run of a sweep stands; without a grid, all sweeps"),
    "retry": (_retry, "submit failed and stopped runs again"),
    "cancel": (_cancel, "cancel what is in the queue or running"),
    "show": (_show, "one grid, or one run: attempts, logs, overrides"),
    "list": (_list, "the grids, and what was launched"),
}
