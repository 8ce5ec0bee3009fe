"""Which copy of the code each run used, and pairs whose two runs used different ones."""

from collections.abc import Sequence
from pathlib import Path

from experiments.runtime import run_folder
from sweeps.dependencies import display_name
from sweeps.folder import Sweep
from sweeps.planned_run import PlannedRun


def code_of(sweep: Sweep, run: PlannedRun) -> list[str]:
    """Return the hashes of the copies of the code that a run used, one for each in turn.

    A run that another sweep trained, or went on with, has the last hash in the `env.json` of its
    folder. Runs of a checkout, as with `cluster=debug`, have none.
    """
    hashes: dict[str, None] = {}
    for event in sweep.events(run.name):
        code = event.get("code")
        if event["event"] == "start" and isinstance(code, str):
            hashes[code] = None
    snapshot = run_folder.read(Path(run.folder) / "env.json").get("snapshot")
    if isinstance(snapshot, str):
        hashes[snapshot] = None
    return list(hashes)


def mixed_pairs(sweep: Sweep, runs: Sequence[PlannedRun]) -> list[str]:
    """Return a line for each dense and routed run of one seed that used different code.

    The two differ in `route`, `routing.*` and their number of steps only.
    """
    pairs: dict[tuple[str, ...], tuple[list[PlannedRun], list[PlannedRun]]] = {}
    for run in runs:
        if run.trains:
            dense, routed = pairs.setdefault(_pair_key(run), ([], []))
            is_dense = run.values.get("route", "none") == "none"
            (dense if is_dense else routed).append(run)
    lines = []
    for dense, routed in pairs.values():
        for first in dense:
            for second in routed:
                old, new = code_of(sweep, first), code_of(sweep, second)
                if old and new and {*old, *new} != {old[0]}:
                    lines.append(
                        f"different code in a pair: {display_name(first)} used {', '.join(old)}, "
                        f"{display_name(second)} used {', '.join(new)}"
                    )
    return lines


def _pair_key(run: PlannedRun) -> tuple[str, ...]:
    """Return what the two runs of a pair have in common."""
    texts = [run.stage]
    for key, value in sorted(run.values.items()):
        if key not in ("route", "train.steps", "init") and not key.startswith("routing."):
            texts.append(f"{key}={value}")
    return tuple(texts)
