"""Submission of a launch's arrays to Slurm, one after the other."""

from collections.abc import Callable, Sequence

from routing.errors import UserError
from sweeps import SweepError, sbatch, slurm
from sweeps.arrays import JobArray, count
from sweeps.folder import JobBatch, Sweep
from sweeps.live_jobs import LiveJobs


def submit_arrays(
    sweep: Sweep, arrays: Sequence[JobArray], code: str, live: LiveJobs, say: Callable[[str], None]
) -> JobBatch:
    """Submit arrays in order, each of which may wait for earlier ones; return the last batch.

    A submission that is cut off is found in the queue by its jobs' name, which is the batch's.
    Hence more runs than one array may have are several batches; each starts when the one before it
    has ended.
    """
    limit = slurm.max_array(arrays[0].resources.slurm_cluster)
    lines: list[str] = []
    array_ids: list[str] = []
    for array in arrays:
        resources, size = array.resources, limit * array.resources.runs_per_gpu
        if resources.runs_per_gpu > 1:
            live.shared.update(run.name for run in array.runs)
        previous = ""
        for start in range(0, len(array.runs), size):
            part = array.runs[start : start + size]
            batch = JobBatch.create(sweep.name, part, resources, code)
            sweep.intend(batch)
            conditions = {run.name: live.condition(run) for run in part}
            try:
                ids = sbatch.submit(sweep, part, resources, batch, previous, conditions)
            except SweepError as error:
                if not array_ids:
                    raise
                # The earlier arrays are in the queue and stay noted.
                raise UserError(f"{error}; the same launch submits the rest") from None
            sweep.submitted(batch.name, ids, slurm_cluster=batch.slurm_cluster)
            live.ids |= ids
            previous = ids[part[0].name].split("_")[0]
            array_ids.append(previous)
            lines.append(f"  job {previous}: {JobArray(resources, part).describe()}")
    all_runs = [run for array in arrays for run in array.runs]
    jobs, each = ", ".join(array_ids), " each" if len(array_ids) > 1 else ""
    limit_text = f"at most {arrays[0].resources.throttle} at once{each}"
    say(f"submitted {count(all_runs)} as job {jobs}, {limit_text}; code {code}")
    for line in lines if len(array_ids) > 1 or resources.runs_per_gpu > 1 else ():
        say(line)
    say(sweep.command("status"))
    return batch
