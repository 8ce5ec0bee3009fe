"""The dry run of a sweep: what a launch would submit now, what it costs, and the script."""

import shlex
import shutil

from sweeps import sbatch
from sweeps.cost import estimate
from sweeps.folder import Sweep
from sweeps.launch import find_missing
from sweeps.plan import Plan
from sweeps.resources import Resources


def print_plan(plan: Plan, resources: Resources, with_arguments: bool) -> None:
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
