"""The GPUs of a pool: which there are, and which have room for another run."""

import math
from collections.abc import Collection, Sequence
from fractions import Fraction

from experiments.runtime import run_folder
from experiments.runtime.locks import is_locked
from experiments.runtime.memory import visible_gpus
from routing.errors import require
from sweeps import NothingSubmitted
from sweeps.store.folder import Sweep
from sweeps.store.resource_options import Resources


class GpuSlots:
    """How full each GPU of a pool is: a run takes a GPU whole, or 1/k of one that k runs share."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self.load = dict.fromkeys(gpus, Fraction(0))

    def choose(self, count: int, runs_per_gpu: int) -> list[str] | None:
        """Return the `count` emptiest GPUs with room for a run; None if there are fewer."""
        share = Fraction(1, runs_per_gpu)
        with_room = [gpu for gpu, load in self.load.items() if load + share <= 1]
        if len(with_room) < count:
            return None
        return sorted(with_room, key=self.load.__getitem__)[:count]

    def take(self, gpus: Sequence[str], runs_per_gpu: int) -> None:
        """Count a run that starts on some GPUs."""
        for gpu in gpus:
            self.load[gpu] += Fraction(1, runs_per_gpu)

    def release(self, gpus: Sequence[str], runs_per_gpu: int) -> None:
        """Count a run that has ended on some GPUs."""
        for gpu in gpus:
            self.load[gpu] -= Fraction(1, runs_per_gpu)


def choose_gpus(sweep: Sweep, workers: int, wanted: Collection[Resources]) -> list[str]:
    """Return the GPUs of a pool, those first that no other pool of the sweep uses.

    There have to be enough for all workers, unless the `wanted` resources of the runs differ: then
    runs wait until enough GPUs are free.

    Raises:
        NothingSubmitted: There are too few.
    """
    kinds = {(resources.gpu_count, resources.runs_per_gpu) for resources in wanted}
    if not any(count for count, _ in kinds):
        return []
    busy = _busy_gpus(sweep)  # a search has a pool for each of its trials
    visible = sorted(visible_gpus(), key=lambda gpu: gpu in busy)
    needed = 0
    for count, runs_per_gpu in kinds:
        require(
            count <= len(visible),
            f"cluster.gpus={count} needs {count} GPUs, {len(visible)} are visible; try "
            f"cluster.gpus={len(visible)}",
            NothingSubmitted,
        )
        needed = max(needed, math.ceil(workers / runs_per_gpu) * count)
    if len(kinds) == 1 and needed > len(visible):
        ((count, runs_per_gpu),) = kinds
        sharing = f" and cluster.runs_per_gpu={runs_per_gpu}" if runs_per_gpu > 1 else ""
        raise NothingSubmitted(
            f"cluster.workers={workers} with cluster.gpus={count}{sharing} needs {needed} GPUs, "
            f"{len(visible)} are visible; try "
            f"cluster.workers={len(visible) // count * runs_per_gpu}"
        )
    return visible[:needed]


def _busy_gpus(sweep: Sweep) -> set[str]:
    """Return the GPUs of runs in the sweep's live pools."""
    busy: set[str] = set()
    for folder in sweep.path.glob("pools/*"):
        if is_locked(folder):
            busy.update(map(str, run_folder.read(folder / "state.json").get("gpus", [])))
    return busy
