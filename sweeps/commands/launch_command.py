"""`launch`: plan a grid, check it, and submit it, print it (dry run) or search in it."""

import argparse
import functools

from sweeps import SweepError
from sweeps.commands.arguments import Arguments
from sweeps.commands.dry_run import print_plan
from sweeps.commands.search_command import prepare_search
from sweeps.plan import grid
from sweeps.plan.plan import make_plan
from sweeps.plan.preflight import Preflight
from sweeps.submission.launch import launch


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
        search = prepare_search(chosen, planner, arguments, options.trials)
        print(f"search: {search.trials} trials over {', '.join(search.space)}")
        if dry == "false":
            return search.run(resources)
    elif options.trials is not None:
        raise SweepError(f"--trials: grid {chosen.name} has no search section (see search_route)")
    throttle = resources.throttle if "throttle" in arguments.cluster_keys else None
    plan = planner(chosen)
    print("".join(f"{line}\n" for line in plan.notes()), end="")
    if dry != "false":
        print_plan(plan, resources, with_arguments=dry == "full")
        return preflight.exit_code
    return int(bool(launch(plan.sweep, chosen, plan.runs, resources, throttle=throttle)))
