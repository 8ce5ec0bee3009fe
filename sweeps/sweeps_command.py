"""The commands: launch, status, retry, cancel, show, list."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.data.specs import fingerprint
from experiments.runtime.command import run_command
from routing.errors import Parser, suggest
from sweeps import SweepError
from sweeps.jobs import cluster_resources, slurm
from sweeps.jobs.sweep_folder import Sweep, all_sweeps
from sweeps.launch import Launched, cancel, launch, retry
from sweeps.planning import budget, grid, overrides
from sweeps.planning.overrides import Typed
from sweeps.planning.planned_runs import Plan, PlannedRun, plan, runs_root
from sweeps.view import status_table
from sweeps.view.run_status import RunStatus, statuses

HELP = """\
Many runs, one grid per table or figure of the paper.

  python -m sweeps list                                             the grids, and what was launched
  python -m sweeps launch route_placement --dry-run                 runs, cost and the sbatch script
  python -m sweeps launch route_placement cluster=debug train.steps=20
  python -m sweeps launch route_placement backbone=dit,mamba,rwkv cluster=slurm scale=paper
  python -m sweeps status route_placement                           any shell, later

The same launch again submits only what is missing. A word is an override (key=value); a comma makes
a list: it replaces that axis of the grid, picks rows of it, or adds an axis. cluster= names a file
in sweeps/resources or a path; cluster.KEY=VALUE sets one of its keys.
"""


COMMANDS = {
    "launch": "submit what is missing of a grid, and leave",
    "status": "where every run of a sweep stands",
    "retry": "submit failed and stopped runs again",
    "cancel": "cancel what is in the queue or running",
    "show": "one grid, or one run: attempts, logs, overrides",
    "list": "the grids, and what was launched",
}


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    made = Parser(
        "python -m sweeps", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sub = {}
    for name, what in COMMANDS.items():
        sub[name] = commands.add_parser(name, help=what, description=what)
        if name != "list":
            sub[name].add_argument("grid", metavar="GRID", help="a grid's name or a .yaml file")
        sub[name].add_argument(
            "words", nargs="*", metavar="KEY=VALUE", help="overrides, or a filter of runs"
        )
    sub["launch"].add_argument(
        "--dry-run", action="store_true", help="print runs, cost and the script; submit nothing"
    )
    for name in ("launch", "retry"):
        sub[name].add_argument("--throttle", type=int, metavar="N", help="at most N runs at once")
    sub["launch"].add_argument(
        "--compare-at", default="steps", metavar="WAY",
        help="equal steps (default), flops or hours for each cell",
    )  # fmt: skip
    sub["status"].add_argument(
        "--once", action="store_true", help="print the table once, also on a terminal"
    )
    sub["show"].add_argument("--run", metavar="NAME", help="part of a run's name")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 (a run failed in this process) or 2 (wrong input)."""
    return run_command(_dispatch, list(sys.argv[1:] if argv is None else argv))


def _dispatch(words: list[str]) -> int | None:
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise SweepError(
            f"no command {words[0]!r}; expected {', '.join(COMMANDS)}{suggest(words[0], COMMANDS)}"
        )
    made = parser()
    # argparse cannot mix flags and positionals under a subcommand: overrides may stand after flags.
    chosen, rest = made.parse_known_args(words)
    for word in rest:
        if word.startswith("-"):
            made.error(f"unrecognized argument: {word}")
        chosen.words.append(word)
    commands: dict[str, Callable[[argparse.Namespace], int | None]] = {
        "launch": _launch, "status": _status, "retry": _retry,
        "cancel": _cancel, "show": _show, "list": _list,
    }  # fmt: skip
    return commands[chosen.command](chosen)


class CommandWords:
    """A command's words, sorted: scale, cluster and its keys, and overrides of the runs."""

    def __init__(self, words: Sequence[str]) -> None:
        self.overrides = overrides.parse(words)
        self.scale = self._one("scale", "tiny")
        self.cluster = self._one("cluster", "")
        keys = [key for key in self.overrides if key.startswith("cluster.")]
        self.cluster_keys = {key.removeprefix("cluster."): self._one(key, "") for key in keys}
        self.root = runs_root(self.overrides)

    def _one(self, key: str, default: str) -> str:
        values = self.overrides.pop(key, [Typed(default)])
        if len(values) > 1:
            raise SweepError(
                f"{key} takes one value, got {', '.join(v.text for v in values)}; "
                "launch once for each"
            )
        return values[0].text.strip("'\"")

    def keys(self, throttle: int | None) -> dict[str, str]:
        """Return the `cluster.KEY=VALUE` words by key."""
        return self.cluster_keys | ({} if throttle is None else {"throttle": str(throttle)})

    def resources(self, throttle: int | None, default: str) -> cluster_resources.Resources:
        """Return the resources that were asked for."""
        return cluster_resources.load(self.cluster or default, self.scale, self.keys(throttle))


def _default_cluster() -> str:
    return "slurm" if shutil.which("sbatch") else "local"


def _launch(chosen: argparse.Namespace) -> int:
    words = CommandWords(chosen.words)
    if "dry" in words.overrides:
        raise SweepError(
            "dry= is for single runs, here it would train nothing; type --dry-run to see the plan"
        )
    found = grid.load(chosen.grid)
    place = words.resources(chosen.throttle, "slurm" if chosen.dry_run else _default_cluster())
    way = budget.budget(chosen.compare_at)
    while True:
        made = plan(found, words.scale, words.overrides, way)
        for label, why in made.left_out:
            print(f"left out: {label} ({why})")
        if chosen.dry_run:
            _dry_run(made, place)
            return 0
        _check_data(made)
        done = launch(made, place)
        if _failed(done):
            print(
                f"{len(done.failed)} of {len(done.submitted)} failed" if done.failed else "stopped"
            )
            return 1
        if place.kind == "debug" and made.waiting and done.submitted:
            continue  # parents are done now: the next stage can be planned
        for label, why in made.waiting:
            print(f"waiting: {label} (for {why}); launch again when that is done")
        return 0


def _failed(done: Launched) -> bool:
    return bool(done.failed or done.stopped)


def _check_data(made: Plan) -> None:
    # A plan needs no data, so that it can be looked at anywhere; hundreds of jobs do.
    for config in made.configs.values():
        if fingerprint(config.data) == "absent":
            path = config.data.get("path")
            why = f"{path} is not there" if path else "python experiments/prepare.py makes one"
            raise SweepError(f"data={config.data['name']} needs data.path=FOLDER ({why})")


def _dry_run(made: Plan, place: cluster_resources.Resources) -> None:
    for line in budget.estimate(made, place.tflops):
        print(line)
    for label, why in made.waiting:
        print(f"waiting: {label} (for {why})")
    print(
        f"{len(made.runs)} runs on cluster={place.name}, {len(made.waiting)} waiting; "
        "nothing was submitted"
    )
    if place.kind == "slurm" and made.runs:
        sweep = Sweep(made.root, made.grid.name)
        print(slurm.script(sweep, place, len(made.runs), sweep.snapshots / "SNAPSHOT"))


def _sweep(chosen: argparse.Namespace) -> tuple[Sweep, list[PlannedRun], CommandWords]:
    """Return the sweep, those of its runs that match the words, and the words."""
    # Here `scale` is a filter like any other key.
    scales = [word for word in chosen.words if word.startswith("scale=")]
    words = CommandWords([word for word in chosen.words if word not in scales])
    wanted = words.overrides | overrides.parse(scales)
    wanted.pop("paths.runs", None)
    name = grid.check_name(Path(chosen.grid).name.removesuffix(".yaml"))
    sweep = Sweep(words.root, name)
    if not sweep.exists():
        known = [s.name for s in all_sweeps(words.root)]
        what = f"expected {', '.join(known)}{suggest(name, known)}" if known else "none was"
        raise SweepError(f"no sweep {name!r} was launched below {words.root}; {what}")
    runs = [run for run in sweep.runs().values() if _matches(run, wanted)]
    if not runs:
        raise SweepError(f"sweep {name}: none of its runs has {' '.join(chosen.words)}")
    return sweep, runs, words


def _matches(run: PlannedRun, wanted: Mapping[str, Sequence[Typed]]) -> bool:
    have = dict(word.split("=", 1) for word in run.args if "=" in word) | dict(run.varies)
    return all(
        any(overrides.same(Typed(have.get(key, "")), value) for value in values)
        for key, values in wanted.items()
    )


def _status(chosen: argparse.Namespace) -> None:
    sweep, runs, _ = _sweep(chosen)

    def ask() -> tuple[list[RunStatus], str]:
        known = sweep.runs()  # another launch may have changed their steps
        return statuses(sweep, [known[run.name] for run in runs])

    terminal = sys.stdout.isatty()
    if terminal and not chosen.once:
        status_table.watch(sweep.name, ask)
        return
    rows, trouble = ask()
    if terminal:
        from rich.console import Console

        console = Console()
        console.print(status_table.table(sweep.name, rows, console.width))
    else:
        print("\n".join([*status_table.plain(rows), status_table.counts(rows)]))
    if trouble:
        print(trouble, file=sys.stderr)


def _retry(chosen: argparse.Namespace) -> int:
    sweep, runs, words = _sweep(chosen)
    before = sweep.batches()
    if words.cluster or not before:
        place = words.resources(chosen.throttle, _default_cluster())
    else:
        place = cluster_resources.again(before[-1].resources, words.keys(chosen.throttle))
    return int(_failed(retry(sweep, runs, place)))


def _cancel(chosen: argparse.Namespace) -> None:
    sweep, runs, _ = _sweep(chosen)
    cancel(sweep, runs)


def _show(chosen: argparse.Namespace) -> None:
    if chosen.run is not None:
        sweep, runs, _ = _sweep(chosen)
        print("\n".join(status_table.details(sweep, runs, chosen.run)))
        return
    words, found = CommandWords(chosen.words), grid.load(chosen.grid)
    made = plan(found, words.scale, words.overrides)
    print(f"{found.name}: {found.title}")
    print(f"makes: {', '.join(found.makes) or 'nothing of its own'}")
    if found.raw.get("note"):
        print(" ".join(str(found.raw["note"]).split()))
    for run in made.runs:
        print(f"  {run.name}  {run.label}")
    for label, why in made.waiting:
        print(f"  waits for {why}: {label}")
    for label, why in made.left_out:
        print(f"  left out: {label} ({why})")
    print(f"{len(made.runs)} runs at scale {words.scale}, {len(made.waiting)} waiting")


def _list(chosen: argparse.Namespace) -> None:
    titles = {name: grid.load(name).title for name in grid.names()}
    for name, title in titles.items():
        print(f"{name:<{max(map(len, titles))}}  {title}")
    for sweep in all_sweeps(CommandWords(chosen.words).root):
        print(f"launched: {sweep.name}  {status_table.counts(statuses(sweep)[0])}")
