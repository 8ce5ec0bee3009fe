"""Submission of one array to Slurm, through submitit.

`Executor` is submitit's, with logs in a folder of their own and any form of sbatch's answer.
"""

import contextlib
import io
import re
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmExecutor, SlurmJob, _make_sbatch_string

from routing.errors import UserError
from sweeps import NothingSubmitted, SweepError
from sweeps.jobs import slurm
from sweeps.jobs.job import Job
from sweeps.jobs.sbatch_script import parameters, python_command, sbatch_environment
from sweeps.jobs.sharing import SharedJob
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources

# `101`, `101;gpu2` (--parsable), `Submitted batch job 101 on cluster gpu2`
_ANSWER = re.compile(r"(?:Submitted batch job )?(\d+)(?:(?:;| on cluster )([\w.-]+))?", re.ASCII)


def submit(
    sweep: Sweep, runs: Sequence[PlannedRun], resources: Resources, batch: JobBatch,
    after: str, dependencies: Mapping[str, str],
) -> dict[str, str]:  # fmt: skip
    """Submit runs as an array that starts after the job `after` ("" for none); return ids by run.

    With `runs_per_gpu` so many runs share a task. `dependencies` are what each run waits for, as in
    sbatch's `--dependency`. Tasks of one array get different ones while it is held. A job whose
    dependency has failed is removed by Slurm.

    The cluster that sbatch names in its answer is stored in the batch.

    Raises:
        NothingSubmitted: sbatch refused, or the array was cancelled while it was held.
        UserError: Some of the jobs are, or may be, in the queue.
    """
    command = python_command(resources)
    launch = sweep.launches / batch.launch
    executor = Executor(folder=launch, max_num_timeout=10_000, python=command)
    executor.logs = sweep.logs
    options = parameters(resources, batch.name, launch, len(runs))
    extra = options["additional_parameters"]
    shared = [str(extra.get("dependency") or ""), f"afterany:{after}" if after else ""]
    by_task = []
    for names in batch.tasks():
        by_task.append(_join(list(dict.fromkeys(dependencies[name] for name in names))))
    differ = len(set(by_task)) > 1
    shared_text = _join([*shared, "" if differ else by_task[0]])
    if shared_text:
        extra["dependency"] = shared_text
    if any(by_task):
        extra["kill-on-invalid-dep"] = "yes"
    is_held = bool(extra.get("hold"))
    if differ:
        extra["hold"] = True
    executor.update_parameters(**options)
    jobs = _make_jobs(sweep, runs, batch)
    try:
        # submitit prints sbatch's messages, which are in the exception too.
        with (
            sbatch_environment(launch / "code"),
            contextlib.redirect_stderr(io.StringIO()),
            executor.batch(),
        ):
            handles = [executor.submit(job) for job in jobs]
    except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
        text = str(getattr(error, "stderr", None) or error)
        raise _refusal(_reason(text), len(runs), bool(after)) from None
    batch.slurm_cluster = executor.slurm_cluster or batch.slurm_cluster
    task_ids = [handle.job_id for handle in handles]
    ids = {}
    for names, task_id in zip(batch.tasks(), task_ids, strict=True):
        ids.update(dict.fromkeys(names, task_id))
    if differ:
        conditions = [_join([*shared, condition]) for condition in by_task]
        _set_dependencies(task_ids, conditions, batch.slurm_cluster, release=not is_held)
    return ids


def _make_jobs(
    sweep: Sweep, runs: Sequence[PlannedRun], batch: JobBatch
) -> Sequence[Job | SharedJob]:
    """Return what each task of an array calls."""
    if batch.runs_per_task == 1:
        return [Job.create(sweep, run, batch) for run in runs]
    by_name = {run.name: run for run in runs}
    jobs = []
    for names in batch.tasks():
        jobs.append(SharedJob.create(sweep, [by_name[name] for name in names], batch))
    return jobs


def _join(conditions: Sequence[str]) -> str:
    return ",".join(filter(None, conditions))


def _set_dependencies(
    ids: Sequence[str], conditions: Sequence[str], slurm_cluster: str, release: bool
) -> None:
    """Give each task of a held array its dependency, then release it; if refused, cancel it.

    Raises:
        NothingSubmitted: Slurm refused, or did not answer; the array is cancelled.
        UserError: The array could not be cancelled either, and may be in the queue.
    """
    cluster, array_id = slurm.on_cluster(slurm_cluster), ids[0].partition("_")[0]
    try:
        for job_id, condition in zip(ids, conditions, strict=True):
            if condition:
                change = ["update", f"JobId={job_id}", f"Dependency={condition}"]
                slurm.call(["scontrol", *cluster, *change])
        if release:
            slurm.call(["scontrol", *cluster, "release", array_id])
    except SweepError as error:
        cancel = ["scancel", *cluster, array_id]
        try:
            slurm.call(cancel)
        except SweepError as cancel_error:
            raise UserError(
                f"sbatch accepted job {array_id}, but setting its dependencies failed ({error}) "
                f"and so did cancelling it ({cancel_error}); it may still be in the queue: type "
                f"{' '.join(cancel)} before you launch again"
            ) from None
        raise NothingSubmitted(str(error)) from None


def _reason(text: str) -> str:
    """Return sbatch's messages in one line, without the `sbatch: error: ` before each of them."""
    messages = []
    for line in text.splitlines():
        messages.append(line.removeprefix("sbatch: ").removeprefix("error: ").strip())
    return "; ".join(filter(None, messages))[-400:]


def _refusal(reason: str, count: int, is_later_array: bool) -> UserError:
    if "timed out" in reason:  # the controller may have the jobs: their name tells
        return UserError(f"no answer from sbatch ({reason}); status shows what was submitted")
    if is_later_array:
        return UserError(
            f"sbatch refused {count} of the runs: {reason}; type the same launch to submit them"
        )
    return NothingSubmitted(f"sbatch refused: {reason}")


def parse_answer(text: str) -> tuple[str, str] | None:
    """Return the job id and the cluster ("" if none is named) that sbatch or a wrapper printed.

    A site may print a banner before or after the answer, with numbers in its sentences:
    only a line that is nothing but an answer counts, the last one if there are several.
    """
    for line in reversed(text.splitlines()):
        match = _ANSWER.fullmatch(line.strip())
        if match is not None:
            return match[1], match[2] or ""
    return None


class Executor(SlurmExecutor):  # type: ignore[misc]
    """submitit's executor.

    Its folder has the pickles and scripts, which jobs execute and `setup` may put secrets into.

    Attributes:
        logs: Another folder for the output of the jobs.
        slurm_cluster: Cluster that sbatch named in its answer.
    """

    logs: Path
    slurm_cluster = ""

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return _make_sbatch_string(command=command, folder=self.logs, **self.parameters)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    def _get_job_id_from_submission_command(  # type: ignore[override]  # it was a static method
        self, string: bytes | str
    ) -> str:
        text = string if isinstance(string, str) else string.decode(errors="replace")
        answer = parse_answer(text)
        if answer is None:
            brief = " ".join(text.split())[:200]
            raise UserError(
                f"sbatch printed {brief!r}, expected a job id or 'Submitted batch job ID'; status "
                "and launch find the jobs by their name once they are in the queue"
            )
        job_id, self.slurm_cluster = answer
        return job_id

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> Any:
        """Submit as one array; submitit's own method creates an executor of its own class."""
        if len(delayed_submissions) == 1:
            return super()._internal_process_submissions(delayed_submissions)
        folder = JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        pickles = []
        for delayed in delayed_submissions:
            delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            pickles.append(folder / f"{uuid.uuid4().hex}.pkl")
            delayed.dump(pickles[-1])
        self.parameters["map_count"] = len(pickles)
        first = self._submit_command(self._submitit_command_str)
        tasks = list(range(first.num_tasks))
        jobs = []
        for index, path in enumerate(pickles):
            job: SlurmJob[Any] = SlurmJob(
                folder=self.folder, job_id=f"{first.job_id}_{index}", tasks=tasks
            )
            job.paths.move_temporary_file(path, "submitted_pickle")
            jobs.append(job)
        return jobs
