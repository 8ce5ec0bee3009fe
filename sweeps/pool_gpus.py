"""The GPUs of a pool's workers."""

from experiments.runtime import run_folder
from experiments.runtime.locks import is_locked
from experiments.runtime.memory import visible_gpus
from sweeps import SweepError
from sweeps.folder import Sweep
from sweeps.resources import Resources


def share_gpus(sweep: Sweep, resources: Resources) -> list[list[str] | None]:
    """Return the GPUs of each worker, None for workers without.

    Raises:
        SweepError: There are too few.
    """
    count = resources.gpu_count
    if not count:
        return [None] * resources.workers
    busy = _busy_gpus(sweep)  # a search has a pool for each of its trials
    gpus = sorted(visible_gpus(), key=lambda gpu: gpu in busy)
    if len(gpus) < resources.workers * count:
        workers = len(gpus) // count
        fitting = f"cluster.workers={workers}" if workers else f"cluster.gpus={len(gpus)}"
        raise SweepError(
            f"cluster.workers={resources.workers} with cluster.gpus={resources.gpus} needs "
            f"{resources.workers * count} GPUs, {len(gpus)} are visible; try {fitting}"
        )
    shares: list[list[str] | None] = []
    for worker in range(resources.workers):
        shares.append(gpus[worker * count : (worker + 1) * count])
    return shares


def _busy_gpus(sweep: Sweep) -> set[str]:
    """Return the GPUs of runs in the sweep's live pools."""
    busy: set[str] = set()
    for folder in sweep.path.glob("pools/*"):
        if is_locked(folder):
            busy.update(map(str, run_folder.read(folder / "state.json").get("gpus", [])))
    return busy
