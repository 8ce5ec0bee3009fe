"""One submission: recorded, then handed to Slurm or a pool."""

from collections.abc import Mapping, Sequence

from sweeps import NothingSubmitted
from sweeps.jobs import pool
from sweeps.jobs.snapshot import new_launch, remove_launch, remove_launches
from sweeps.plan.resources import by_run, ignored_lines
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources
from sweeps.submission.arrays import plural, split_into_arrays, submit_arrays
from sweeps.submission.live_jobs import LiveJobs, find_live_jobs, live_launches
from sweeps.submission.missing import Print


def submit(sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, say: Print) -> JobBatch:
    """Record a submission, then hand its runs to Slurm or a pool; `debug` runs start later.

    Each of the runs comes after those that it waits for, and gets `resources` with the keys that
    the grid changes. Returns the batch, the last one of several.

    Raises:
        SweepError: The scheduler refuses, or the resources of a run are invalid.
    """
    kind = resources.kind
    each = by_run(resources, runs)
    for line in ignored_lines(resources, runs):
        say(line)
    for run in runs:
        # The weights of its parent may be others by the time it finds its folder again.
        sweep.forget_resolution(run.name)
    sweep.logs.mkdir(parents=True, exist_ok=True)  # a pool without it would wait for it
    live = find_live_jobs(sweep, runs, kind)
    if kind == "debug":
        batch = JobBatch.create(sweep.name, runs, resources)
        sweep.intend(batch)
        return batch
    remove_launches(sweep.launches, keep=live_launches(sweep))
    launch, code = new_launch(sweep.launches)
    try:
        if kind == "slurm":
            arrays = split_into_arrays(runs, each)
            return submit_arrays(sweep, arrays, launch.name, code, live, say)
        return _start_pool(sweep, runs, resources, each, launch.name, code, live, say)
    except NothingSubmitted:
        remove_launch(launch)
        raise


def _start_pool(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, each: Mapping[str, Resources],
    launch: str, code: str, live: LiveJobs, say: Print,
) -> JobBatch:  # fmt: skip
    batch = JobBatch.create(sweep.name, runs, resources, code, launch)
    sweep.intend(batch)
    others = pool.running_pools(sweep.root)
    if others:
        verb = "is" if len(others) == 1 else "are"
        text = f"{plural(len(others), 'other pool')} {verb} running on this machine"
        say(f"{text}: {', '.join(others)}; the runs of all pools share its cores")
    ids = pool.start(sweep, runs, resources.workers, each, batch, live.ids)
    sweep.submitted(batch.name, ids)
    workers = min(resources.workers, len(runs))
    runs_text, pool_text = plural(len(runs), "run"), plural(workers, "worker")
    say(f"submitted {runs_text} to a pool of {pool_text}; code {code}")
    say(sweep.command("status"))
    return batch
