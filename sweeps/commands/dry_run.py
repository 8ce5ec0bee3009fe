"""The dry run of a sweep: what a launch would submit now, what it costs, and the script."""

import shlex
import shutil
from collections.abc import Sequence

from experiments.runtime.console import show
from sweeps.jobs import sbatch_script
from sweeps.jobs.pool_gpus import choose_gpus
from sweeps.plan.cost import estimate
from sweeps.plan.dependencies import is_parent_done
from sweeps.plan.plan import Plan
from sweeps.plan.resources import by_run, ignored_lines
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources
from sweeps.submission.arrays import split_into_arrays
from sweeps.submission.missing import check_launched, find_missing


def print_plan(plan: Plan, resources: Resources, with_arguments: bool, retry: bool) -> None:
    """Print what a launch would submit now: without runs that are finished or live."""
    sweep, runs = plan.sweep, plan.runs
    if retry:
        check_launched(sweep, runs)
    if plan.grid.search is None:  # the trials of a search are chosen as it runs
        runs, _ = find_missing(sweep, plan.runs, show, need_queue=False, retry=retry)
    each = by_run(resources, runs)  # first, since it refuses what a launch would refuse
    if resources.kind == "local":
        choose_gpus(sweep, resources.workers, list(each.values()))
    arrays = split_into_arrays(runs, each) if resources.kind == "slurm" else []
    lines = estimate(runs, plan.configs, resources.tflops, resources.kind)
    for run in runs if with_arguments else ():
        lines.append(f"{run.entry} {shlex.join(run.args)}")
    hint = "" if with_arguments else " (dry=full adds the arguments of every run)"
    lines.append(
        f"{len(runs)} runs on cluster={resources.name}, {_count_waiting(plan, runs)} of them "
        f"after others; nothing was submitted{hint}"
    )
    if len(arrays) > 1 or resources.runs_per_gpu > 1:
        for number, array in enumerate(arrays, 1):
            lines.append(f"array {number}: {array.describe()}")
    lines += ignored_lines(resources, runs)
    if resources.kind == "slurm" and shutil.which("sbatch") is None:
        lines.append("there is no sbatch here: without cluster= a launch trains on this machine")
    for array in arrays if with_arguments else arrays[:1]:
        lines.append(sbatch_script.script(sweep, array.resources, len(array.runs)))
    show("\n".join(lines))


def _count_waiting(plan: Plan, runs: Sequence[PlannedRun]) -> int:
    """Return how many of the runs wait for another one."""
    names, count = {run.name for run in runs}, 0
    for run in runs:
        count += not names.isdisjoint(run.needs) or not is_parent_done(plan.sweep, run)
    return count
