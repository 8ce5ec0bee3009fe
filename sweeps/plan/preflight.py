"""Checks of a launch before anything is submitted."""

from collections.abc import Iterable

from experiments.config import GROUPS, Config
from experiments.preflight import check_ready
from experiments.runtime.errors import print_error, sentence
from experiments.runtime.memory import visible_gpus
from routing.errors import require, suggest
from sweeps import SweepError
from sweeps.plan.resources import by_run
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources


class Preflight:
    """Checks what a run would refuse before its first step, at the resources of a launch.

    The first refusal ends a launch (`stop`). A dry run prints it and continues, so that the plan
    and its cost can be seen where the data are missing; `exit_code` is 2 then.
    """

    def __init__(self, resources: Resources, stop: bool) -> None:
        self.resources = resources
        self.on_slurm = resources.kind == "slurm"  # which alone knows its nodes
        self.on_gpu = self.on_slurm or bool(visible_gpus())
        self.stop, self.exit_code = stop, 0

    def check_keys(self, keys: Iterable[str]) -> None:
        """Refuse a misspelt `cluster=`, which no configuration could suggest."""
        for key in keys:
            suggestion = suggest(key, (*GROUPS, "cluster", "seed"))
            require(
                not suggestion.endswith(" cluster?"), f"unknown key {key}{suggestion}", SweepError
            )

    def __call__(self, config: Config, run: PlannedRun) -> None:
        """Check one configuration at the resources of its run."""
        if self.exit_code:
            return
        resources = by_run(self.resources, [run])[run.name]  # which the plan of a dry run needs too
        processes = resources.nodes * resources.tasks if self.on_slurm else 1
        try:
            check_ready(config, processes, self.on_gpu)
        except Exception as error:
            text = sentence(error)
            if self.stop or text is None:
                raise
            print_error(text)
            self.exit_code = 2
