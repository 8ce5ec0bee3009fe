"""`launch`: plan a grid, check it, and submit it, print it (dry run) or search in it."""

import argparse
import functools
import shlex
import shutil
from collections.abc import Callable

from routing.errors import one_of
from sweeps import SweepError, grid, sbatch
from sweeps.arguments import Arguments
from sweeps.cost import estimate
from sweeps.folder import Sweep
from sweeps.plan import Plan, make_plan
from sweeps.planned_run import PlannedRun
from sweeps.preflight import Preflight
from sweeps.resources import Resources
from sweeps.search import Search, distributions
from sweeps.submit import find_missing, launch


def launch_command(options: argparse.Namespace) -> int:
    """Run `launch`."""
    arguments = Arguments(options)
    dry = "true" if options.dry_run and arguments.dry == "false" else arguments.dry
    chosen = grid.load(options.grid)
    resources = arguments.resources("slurm" if dry != "false" else "")
    preflight = Preflight(resources, stop=dry == "false")
    preflight.check_keys(arguments.overrides)
    planner = functools.partial(
        make_plan,
        scale=arguments.scale,
        user=arguments.overrides,
        compare_at=options.compare_at,
        check=preflight,
    )
    if chosen.search is not None:
        search = _prepare_search(chosen, planner, arguments, options.trials)
        print(f"search: {search.trials} trials over {', '.join(search.space)}")
        if dry == "false":
            return search.run(resources)
    elif options.trials is not None:
        raise SweepError(f"--trials: grid {chosen.name} has no search section (see search_route)")
    while True:
        plan = planner(chosen)
        print("".join(f"{line}\n" for line in plan.notes()), end="")
        if dry != "false":
            _print_plan(plan, resources, with_arguments=dry == "full")
            return preflight.exit_code
        failed = launch(Sweep(plan.root, chosen.name), chosen, plan.runs, resources)
        if failed is None or failed or resources.kind != "debug" or not plan.waiting:
            return int(bool(failed))
        # The parents are done now, so that the next stage can be planned.


def _prepare_search(
    chosen: grid.Grid, planner: Callable[[grid.Grid], Plan], arguments: Arguments,
    trials: int | None,
) -> Search:  # fmt: skip
    """Check a grid's search at one corner of its space.

    Raises:
        SweepError: A trial is not one run, its metric is not computed, or a name is typed too.
    """
    section = chosen.search
    assert section is not None
    prefix = f"grid {chosen.name}: search"
    count = section.trials if trials is None else trials
    if count < 1:
        raise SweepError(f"--trials {count}: expected a number of at least 1")
    space = distributions(section.over)
    typed = sorted(section.over.keys() & arguments.overrides.keys())
    if typed:
        raise SweepError(f"{prefix}: {typed[0]} is searched over; leave the argument out")
    plan = planner(chosen)
    if len(plan.configs) != 1 or len(plan.runs) + len(plan.waiting) != 1:
        raise SweepError(f"{prefix}: a trial is one run; expected one seed, no axes and no stages")
    (config,) = plan.configs.values()
    metrics = tuple(config.eval.get("metrics", ()))
    one_of(f"{prefix}: metric", section.metric, metrics, SweepError)
    sweep = Sweep(plan.root, chosen.name)

    def plan_runs(point: grid.Grid) -> list[PlannedRun]:
        return planner(point).runs

    return Search(chosen, plan_runs, space, section.metric, count, sweep)


def _print_plan(plan: Plan, resources: Resources, with_arguments: bool) -> None:
    """Print what a launch would submit now: without runs that are finished or live."""
    sweep, runs = Sweep(plan.root, plan.grid.name), plan.runs
    if plan.grid.search is None:  # the trials of a search are chosen as it runs
        runs, _ = find_missing(sweep, plan.runs, print, need_queue=False)
    script = ""  # first, since it refuses what a launch would refuse
    if resources.kind == "slurm" and runs:
        script = sbatch.script(sweep, resources, len(runs), sweep.snapshots / "SNAPSHOT")
    lines = estimate(runs, plan.configs, resources.tflops)
    for run in runs if with_arguments else ():
        lines.append(f"{run.entry} {shlex.join(run.args)}")
    hint = "" if with_arguments else " (dry=full adds the arguments of every run)"
    lines.append(
        f"{len(runs)} runs on cluster={resources.name}, {len(plan.waiting)} waiting; nothing was "
        f"submitted{hint}"
    )
    if resources.kind == "slurm" and shutil.which("sbatch") is None:
        lines.append("there is no sbatch here: without cluster= a launch trains on this machine")
    if script:
        lines.append(script)
    print("\n".join(lines))
