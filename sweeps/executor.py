"""submitit's Slurm executor, with a private script and any form of sbatch's answer."""

import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from routing.errors import UserError

# `101`, `101;gpu2` (--parsable), `Submitted batch job 101 on cluster gpu2`
_ANSWER = re.compile(r"(?:Submitted batch job )?(\d+)(?:(?:;| on cluster )([\w.-]+))?", re.ASCII)


def parse_answer(text: str) -> tuple[str, str] | None:
    """Return the job id and the cluster ("" if none is named) that sbatch or a wrapper printed.

    A site's banner may come before or after the answer, and may have numbers in its sentences:
    only a line that is nothing but an answer counts, the last one if there are several.
    """
    for line in reversed(text.splitlines()):
        match = _ANSWER.fullmatch(line.strip())
        if match is not None:
            return match[1], match[2] or ""
    return None


class Executor(SlurmExecutor):  # type: ignore[misc]
    """submitit's executor; `find_by_name` returns the job id of a name in the queue.

    `slurm_cluster` is the cluster that sbatch named in its answer.
    """

    slurm_cluster = ""

    def __init__(self, find_by_name: Callable[[str], str | None], **values: Any) -> None:
        super().__init__(**values)
        self.find_by_name = find_by_name

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        submission_file_path.chmod(0o600)  # its `setup` lines may hold secrets
        return ["sbatch", "--parsable", str(submission_file_path)]

    def _get_job_id_from_submission_command(  # type: ignore[override]  # it was a static method
        self, string: bytes | str
    ) -> str:
        text = string if isinstance(string, str) else string.decode(errors="replace")
        name = self.parameters["job_name"]
        answer = parse_answer(text)
        if answer is None:
            job_id = self.find_by_name(name)
            if job_id is None:
                brief = " ".join(text.split())[:200]
                raise UserError(
                    f"sbatch printed {brief!r}, expected a job id or 'Submitted batch job ID', and "
                    f"no job {name} is in the queue; launch again once `squeue --me` shows none"
                )
            answer = (job_id, "")
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
        try:
            first = self._submit_command(self._submitit_command_str)
        finally:
            del self.parameters["map_count"]
        tasks = list(range(first.num_tasks))
        jobs = []
        for index, path in enumerate(pickles):
            job: SlurmJob[Any] = SlurmJob(
                folder=self.folder, job_id=f"{first.job_id}_{index}", tasks=tasks
            )
            job.paths.move_temporary_file(path, "submitted_pickle")
            jobs.append(job)
        return jobs
