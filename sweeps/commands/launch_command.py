"""`launch`: plan a grid, check it, and submit it, print it (dry run) or search in it."""

import argparse
import functools
from collections.abc import Callable

from experiments.runtime.console import show
from routing.errors import one_of, require
from sweeps import SweepError
from sweeps.commands.arguments import Arguments
from sweeps.commands.dry_run import print_plan
from sweeps.plan import grid
from sweeps.plan.plan import Plan, make_plan
from sweeps.plan.preflight import Preflight
from sweeps.store.folder import Launch, Sweep
from sweeps.submission.launch import launch
from sweeps.submission.optuna_study import distributions
from sweeps.submission.search import Search


def launch_command(options: argparse.Namespace) -> int:
    """Run `launch`."""
    arguments = Arguments(options)
    dry = "true" if options.dry_run and arguments.dry == "false" else arguments.dry
    chosen = grid.load(options.grid)
    if options.retry:
        _check_retry(chosen, arguments)
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
        search = _prepare_search(chosen, chosen.search, planner, arguments, options.trials)
        show(f"search: {search.trials} trials over {', '.join(search.space)}")
        if dry == "false":
            return search.run(resources)
    elif options.trials is not None:
        raise SweepError(f"--trials: grid {chosen.name} has no search section (see search_route)")
    throttle = resources.throttle if "throttle" in arguments.cluster_keys else None
    plan = planner(chosen)
    show("".join(f"{line}\n" for line in plan.notes()), end="")
    if dry != "false":
        print_plan(plan, resources, with_arguments=dry == "full", retry=options.retry)
        return preflight.exit_code
    typed = Launch(
        options.grid, arguments.stored(), [run.name for run in plan.runs], options.compare_at
    )
    failed = launch(
        plan.sweep, chosen, plan.runs, resources, throttle=throttle, typed=typed,
        retry=options.retry,
    )  # fmt: skip
    return int(bool(failed))


def _check_retry(chosen: grid.Grid, arguments: Arguments) -> None:
    """Refuse a retry of a search, and one on Slurm without `cluster=`.

    The cluster of the last launch is stored to be shown: what it runs is the user's to type.
    """
    require(
        chosen.search is None,
        f"--retry: grid {chosen.name} is a search, which resumes its own trials; leave it out",
        SweepError,
    )
    batches = Sweep(arguments.root, chosen.name).batches()
    require(
        arguments.cluster or not batches or batches[-1].kind != "slurm",
        f"--retry: the last launch of {chosen.name} was on Slurm; type its cluster= again, such as "
        "cluster=slurm, with the cluster.KEY= that it had",
        SweepError,
    )


def _prepare_search(
    chosen: grid.Grid, section: grid.SearchOptions, planner: Callable[[grid.Grid], Plan],
    arguments: Arguments, trials: int | None,
) -> Search:  # fmt: skip
    """Check a grid's search at one corner of its space, before the first trial.

    Raises:
        SweepError: A trial is not one run, its metric is not computed, or a name is typed too.
    """
    prefix = f"grid {chosen.name}: search"
    count = section.trials if trials is None else trials
    require(count >= 1, f"--trials {count}: expected a number of at least 1", SweepError)
    space = distributions(section.over)
    for name in sorted(section.over.keys() & arguments.overrides.keys()):
        raise SweepError(f"{prefix}: {name} is searched over; leave the argument out")
    plan = planner(chosen)
    require(
        len(plan.configs) == 1 and len(plan.runs) == 1,
        f"{prefix}: a trial is one run; expected one seed, no axes and no stages",
        SweepError,
    )
    (config,) = plan.configs.values()
    require(config.eval.enabled, f"{prefix}: eval=none computes no metric", SweepError)
    one_of(f"{prefix}: metric", section.metric, config.eval.metrics, SweepError)
    return Search(
        chosen, lambda point: planner(point).runs, space, section.metric, count, plan.sweep
    )
