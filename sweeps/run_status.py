"""The status of one run, as the status table shows it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backbones.parsing import is_number
from sweeps.planned_run import PlannedRun

WAITS_FOR_WORKER = "waits for a worker"
LIVE = ("running", "starting", "requeued", "pending")
# In the order of the table, with their colours, legible on dark and on light: blue vanishes on
# black, yellow and cyan on white.
STATES = {
    "running": "green", "starting": "green", "failed": "bold red", "requeued": "magenta",
    "pending": "magenta", "stopped": "magenta", "new": "dim", "done": "",
}  # fmt: skip


@dataclass
class RunStatus:
    """One line of the status table.

    Attributes:
        state: A key of `STATES`.
        step: Step that the run has reached or saved, None if unknown.
        steps: Steps that it has in the end, None for other commands than training.
        speed: Images per second.
        eta: Seconds until it ends, None if unknown.
        job: Id of its job.
        attempts: How often it has started.
        why: Reason of its state.
        beat: Seconds since its last heartbeat.
        score: Its first scores.
        held: Whether its job waits until somebody releases it.
        sweep: Another sweep, if it is a job of that one.
        elapsed: Seconds that its starts have run so far.
        trained: Those of them spent on steps.
        memory_ran_out: Whether it was ended since it used more main memory than its job has.
    """

    run: PlannedRun
    state: str
    step: int | None = None
    steps: int | None = None
    speed: float | None = None
    eta: float | None = None
    job: str = ""
    node: str = ""
    attempts: int = 0
    why: str = ""
    beat: float | None = None
    score: str = ""
    held: bool = False
    sweep: str = ""
    elapsed: float = 0.0
    trained: float = 0.0
    memory_ran_out: bool = False

    @property
    def live(self) -> bool:
        """Whether a job for it is in a queue or running."""
        return self.state in LIVE


def finite_number(values: Mapping[str, Any], key: str) -> Any:
    """Return a number of a run's own file; None where it has something else."""
    value = values.get(key)
    # No step, speed or time is beyond 1e15.
    return value if is_number(value) and abs(value) < 1e15 else None
