"""The commands: launch, status, retry, cancel, show, list."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from routing.errors import Parser, suggest
from sweeps.errors import SweepError
from sweeps.jobs import cluster_resources as resources
from sweeps.jobs import submit
from sweeps.jobs.sweep_folder import Sweep, all_sweeps
from sweeps.planning import grid as grids
from sweeps.planning import overrides, plan
from sweeps.planning.overrides import Typed
from sweeps.planning.plan import Run
from sweeps.view import standing, status_table

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


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    made = Parser(
        "python -m sweeps", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help_: str, grid: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_, description=help_)
        if grid:
            sub.add_argument("grid", metavar="GRID", help="a grid's name or a .yaml file")
        sub.add_argument(
            "words", nargs="*", metavar="KEY=VALUE", help="overrides, or a filter of runs"
        )
        return sub

    launch = command("launch", "submit what is missing of a grid, and leave")
    launch.add_argument(
        "--dry-run", action="store_true", help="print runs, cost and the script; submit nothing"
    )
    launch.add_argument("--throttle", type=int, metavar="N", help="at most N runs at once")
    launch.add_argument(
        "--compare-at",
        default="steps",
        metavar="WAY",
        help="equal steps (default), flops or hours for each cell",
    )
    state = command("status", "where every run of a sweep stands")
    state.add_argument(
        "--once", action="store_true", help="print the table once, also on a terminal"
    )
    retry = command("retry", "submit failed and stopped runs again")
    retry.add_argument("--throttle", type=int, metavar="N", help="at most N runs at once")
    command("cancel", "cancel what is in the queue or running")
    show = command("show", "one grid, or one run: attempts, logs, overrides")
    show.add_argument("--run", metavar="NAME", help="part of a run's name")
    command("list", "the grids, and what was launched", grid=False)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 (a run failed in this process) or 2 (wrong input)."""
    words = list(sys.argv[1:] if argv is None else argv)
    from experiments.runtime.command import run_command

    return run_command(_dispatch, words)


def _dispatch(words: list[str]) -> int:
    made = parser()
    if words and not words[0].startswith("-"):
        known = ("launch", "status", "retry", "cancel", "show", "list")
        if words[0] not in known:
            raise SweepError(
                f"no command {words[0]!r}; expected {', '.join(known)}{suggest(words[0], known)}"
            )
    chosen = _parse(made, words)
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "launch": _launch, "status": _status, "retry": _retry,
        "cancel": _cancel, "show": _show, "list": _list,
    }  # fmt: skip
    return commands[chosen.command](chosen)


def _parse(made: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    # argparse cannot mix flags and positionals under a subcommand: overrides may stand after flags.
    chosen, rest = made.parse_known_args(words)
    for word in rest:
        if word.startswith("-"):
            made.error(f"unrecognized argument: {word}")
        chosen.words.append(word)
    return chosen


class Request:
    """A command's words, sorted: scale, cluster and its keys, and overrides of the runs."""

    def __init__(self, words: Sequence[str]) -> None:
        found = overrides.parse(words)
        self.scale = _one(found, "scale", "tiny")
        self.cluster = _one(found, "cluster", "")
        self.cluster_keys = {
            key.removeprefix("cluster."): _one(found, key, "")
            for key in list(found)
            if key.startswith("cluster.")
        }
        self.user = found
        self.root = plan.runs_root(found).expanduser().absolute()

    def resources(self, throttle: int | None = None, default: str = "debug") -> resources.Resources:
        """Return the resources that were asked for."""
        return resources.load(self.cluster or default, self.scale, self.keys(throttle))

    def keys(self, throttle: int | None) -> dict[str, str]:
        """Return the `cluster.KEY=VALUE` words by key."""
        return self.cluster_keys | ({} if throttle is None else {"throttle": str(throttle)})


def _one(found: dict[str, list[Typed]], key: str, default: str) -> str:
    values = found.pop(key, None)
    if values is None:
        return default
    if len(values) > 1:
        raise SweepError(
            f"{key} takes one value, got {', '.join(v.text for v in values)}; launch once for each"
        )
    return values[0].text.strip("'\"")


def _launch(chosen: argparse.Namespace) -> int:
    from sweeps.jobs.launch import launch
    from sweeps.planning import budget

    request = Request(chosen.words)
    if "dry" in request.user:
        raise SweepError(
            "dry= is for single runs, here it would train nothing; type --dry-run to see the plan"
        )
    found = grids.load(chosen.grid)
    place = request.resources(chosen.throttle, "slurm" if chosen.dry_run else _default_cluster())
    way = budget.budget(chosen.compare_at)
    while True:
        made = plan.plan(found, request.scale, request.user, budget=way)
        for label, why in made.left_out:
            print(f"left out: {label} ({why})")
        if chosen.dry_run:
            return _dry(made, place)
        _have_data(made)
        done = launch(made, place)
        if done.failed or done.stopped:
            print(
                f"{len(done.failed)} of {len(done.submitted)} failed" if done.failed else "stopped"
            )
            return 1
        if place.kind == "debug" and made.waiting and done.submitted:
            continue  # parents are done now: the next stage can be planned
        for label, why in made.waiting:
            print(f"waiting: {label} (for {why}); launch again when that is done")
        return 0


def _have_data(made: plan.Plan) -> None:
    # A plan needs no data, so that it can be looked at anywhere; hundreds of jobs do.
    from experiments.data.specs import fingerprint

    for config in made.configs.values():
        if fingerprint(config.data) == "absent":
            path = config.data.get("path")
            raise SweepError(
                f"data={config.data['name']} needs data.path=FOLDER "
                + (
                    f"({path} is not there)"
                    if path
                    else "(python experiments/prepare.py makes one)"
                )
            )


def _default_cluster() -> str:
    import shutil

    return "slurm" if shutil.which("sbatch") else "local"


def _dry(made: plan.Plan, place: resources.Resources) -> int:
    from sweeps.planning import budget

    for line in budget.estimate(made, place):
        print(line)
    for label, why in made.waiting:
        print(f"waiting: {label} (for {why})")
    print(
        f"{len(made.runs)} runs on cluster={place.name}, {len(made.waiting)} waiting; "
        "nothing was submitted"
    )
    if place.kind == "slurm" and made.runs:
        sweep = Sweep(made.root, made.grid.name)
        print(
            submit.script(sweep, place, len(made.runs), made.root / ".sweeps" / "code" / "SNAPSHOT")
        )
    return 0


def _sweep(chosen: argparse.Namespace) -> tuple[Sweep, list[Run], Request]:
    """Return the sweep, those of its runs that match the words, and the request."""
    request = Request([w for w in chosen.words if not w.startswith("scale=")])
    wanted = overrides.parse(chosen.words)
    name = grids.check_name(Path(chosen.grid).name.removesuffix(".yaml"))
    sweep = Sweep(request.root, name)
    if not sweep.exists():
        known = [s.name for s in all_sweeps(request.root)]
        what = f"expected {', '.join(known)}{suggest(name, known)}" if known else "none was"
        raise SweepError(f"no sweep {name!r} was launched below {request.root}; {what}")
    for key in ("cluster", "paths.runs"):
        wanted.pop(key, None)
    wanted = {k: v for k, v in wanted.items() if not k.startswith("cluster.")}
    runs = [run for run in sweep.runs().values() if _matches(run, wanted)]
    if not runs:
        raise SweepError(f"sweep {name}: none of its runs has {' '.join(chosen.words)}")
    return sweep, runs, request


def _matches(run: Run, wanted: Mapping[str, Sequence[Typed]]) -> bool:
    have = dict(word.split("=", 1) for word in run.args if "=" in word) | dict(run.varies)
    return all(
        any(have.get(key, "").strip("'\"") == v.text.strip("'\"") for v in values)
        for key, values in wanted.items()
    )


def _status(chosen: argparse.Namespace) -> int:
    sweep, runs, _ = _sweep(chosen)
    names = [run.name for run in runs]

    def ask() -> tuple[list[standing.Standing], str]:
        known = sweep.runs()
        return standing.stand(sweep, [known[name] for name in names])

    if sys.stdout.isatty() and not chosen.once:
        status_table.watch(sweep.name, ask)
        return 0
    rows, trouble = ask()
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(status_table.table(sweep.name, rows, console.width))
    else:
        print("\n".join([*status_table.plain(rows), status_table.counts(rows)]))
    if trouble:
        print(trouble, file=sys.stderr)
    return 0


def _retry(chosen: argparse.Namespace) -> int:
    from sweeps.jobs.launch import retry

    sweep, runs, request = _sweep(chosen)
    before = sweep.batches()
    if request.cluster or not before:
        place = request.resources(chosen.throttle, _default_cluster())
    else:
        place = resources.again(before[-1].resources, request.keys(chosen.throttle))
    done = retry(sweep, runs, place)
    return 1 if done.failed or done.stopped else 0


def _cancel(chosen: argparse.Namespace) -> int:
    from sweeps.jobs.launch import cancel

    sweep, runs, _ = _sweep(chosen)
    cancel(sweep, runs)
    return 0


def _show(chosen: argparse.Namespace) -> int:
    from sweeps.view import details as show

    if chosen.run is None:
        lines = show.grid(grids.load(chosen.grid), Request(chosen.words))
    else:
        sweep, runs, _ = _sweep(chosen)
        lines = show.run(sweep, runs, chosen.run)
    print("\n".join(lines))
    return 0


def _list(chosen: argparse.Namespace) -> int:
    from sweeps.view import details as show

    print("\n".join(show.grids_and_sweeps(Request(chosen.words).root)))
    return 0
