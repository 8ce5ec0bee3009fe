"""Arguments of the sweep commands: cluster keys, overrides of the runs, filters of runs."""

import argparse
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from routing.errors import one_of, require, suggest
from sweeps import SweepError
from sweeps.plan import resources
from sweeps.plan.cells import PLAN_KEYS
from sweeps.plan.grid import check_name
from sweeps.store import overrides
from sweeps.store.folder import Sweep, all_sweeps
from sweeps.store.overrides import Typed, runs_root
from sweeps.store.planned_run import RunRecord
from sweeps.store.resource_options import Resources

# Keys that belong to some commands only; elsewhere they are refused.
_COMMANDS_OF = {"cluster": ("launch",), "dry": ("launch",)}


class Arguments:
    """The `key=value` arguments of a command.

    Attributes:
        typed: All values by key.
        overrides: Those for the runs; `scale` and the keys of a cluster are left out.
        cluster: `cluster=`, or "".
        cluster_keys: `cluster.KEY=`, by key.
        dry: `dry=`: true, false or full.
        root: Folder of the run folders.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.typed = overrides.parse(options.overrides)
        self.overrides: dict[str, list[Typed]] = {}
        self.cluster_keys: dict[str, str] = {}
        for key, values in self.typed.items():
            group, _, cluster_key = key.partition(".")
            commands = _COMMANDS_OF.get(group)
            if commands is not None and options.command not in commands:
                raise SweepError(f"{group}= belongs to {', '.join(commands)}; leave it out")
            if group == "cluster" and cluster_key:
                # One value with its commas, as sbatch has lists: cluster.exclude=n1,n2
                self.cluster_keys[cluster_key] = ",".join(values).strip("'\"")
            elif key not in PLAN_KEYS:
                self.overrides[key] = values
        throttle = getattr(options, "throttle", None)
        if throttle is not None:
            require(
                "throttle" not in self.cluster_keys,
                "--throttle and cluster.throttle are one setting; type one",
                SweepError,
            )
            self.cluster_keys["throttle"] = str(throttle)
        self.root = runs_root(self.overrides)
        self.cluster, self.dry = self.only("cluster", ""), self.only("dry", "false")
        one_of("dry", self.dry, ("true", "false", "full"), SweepError)

    def only(self, key: str, default: str) -> str:
        """Return the one value of a key, or `default`."""
        return overrides.only(key, self.typed.get(key, [Typed(default)]))

    @property
    def scale(self) -> str:
        """The scale of what is launched; in other commands it is a filter like any other key."""
        return self.only("scale", "tiny")

    def resources(self, default: str = "") -> Resources:
        """Return the requested resources; by default Slurm where there is sbatch, else local."""
        default = default or ("slurm" if shutil.which("sbatch") else "local")
        return resources.load(self.cluster or default, self.scale, self.cluster_keys)

    def stored(self) -> list[str]:
        """Return the overrides as typed, `scale=` included, for the record of a launch."""
        texts = []
        for key, values in self.typed.items():
            if (key in self.overrides and key != "paths.runs") or key == "scale":
                texts.append(f"{key}={','.join(values)}")
        return texts

    def matching_runs(self, sweep: Sweep) -> list[RunRecord]:
        """Return the runs of a sweep with the values that were typed."""
        runs = sweep.runs()
        filters = overrides.without(self.overrides, ["paths.runs"])
        if "scale" in self.typed:
            filters["scale"] = self.typed["scale"]
        matching = []
        for run in runs.values():
            values = run_values(run, runs)
            if all(_has(run, values, key, filters[key]) for key in filters):
                matching.append(run)
        return matching

    def select(self, grid: str, shown: str) -> tuple[Sweep, list[RunRecord]]:
        """Return a launched sweep by the name of its grid, and its matching runs.

        `shown`: the arguments as typed, for error messages.
        """
        name = check_name(re.sub(r"\.ya?ml\Z", "", Path(grid).name))
        names = [sweep.name for sweep in all_sweeps(self.root)]
        if name not in names:
            expected = f"expected {', '.join(names)}{suggest(name, names)}" if names else "none was"
            raise SweepError(f"no sweep {name!r} was launched below {self.root}; {expected}")
        sweep = Sweep(self.root, name).open()
        runs = self.matching_runs(sweep)
        require(runs, f"sweep {name}: none of its runs has {shown}", SweepError)
        return sweep, runs


def _has(run: RunRecord, values: Mapping[str, str], key: str, wanted: list[Typed]) -> bool:
    """Return whether a run has one of the values of a key; of `STAGE:key` only in that stage."""
    stage, _, key = key.rpartition(":")
    is_of_stage = not stage or run.stage == stage
    return is_of_stage and overrides.is_any_of(Typed(values.get(key, "")), wanted)


def run_values(run: RunRecord, runs: Mapping[str, RunRecord]) -> dict[str, str]:
    """Return a run's overrides by key; for a command, with those of the run that it reads."""
    parent = runs.get(run.parent, run)
    return {**parent.values, **run.values}
