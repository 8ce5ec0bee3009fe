"""Search: Optuna proposes values for a grid's `search` section, and bad trials are pruned.

One coordinator asks and tells. The study is optuna's journal in the sweep's folder, and a trial's
run is the folder that its configuration names: after the coordinator was killed, the same command
finds the run of every trial again, and no trial is lost or trained twice.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.runtime.console import show
from routing.errors import UserError, require
from sweeps.plan.grid import Grid
from sweeps.status.status import RunStatus, statuses
from sweeps.store.folder import Sweep
from sweeps.store.planned_run import PlannedRun
from sweeps.store.resource_options import Resources
from sweeps.submission import optuna_study
from sweeps.submission.launch import launch
from sweeps.submission.live_jobs import cancel


@dataclass
class Search:
    """The coordinator of a search."""

    grid: Grid  # with a `search` section
    plan_runs: Callable[[Grid], Sequence[PlannedRun]]  # of a grid without one
    space: dict[str, Any]  # optuna's distributions by name
    metric: str  # to optimise
    trials: int  # in all, those of earlier starts included
    sweep: Sweep

    def run(self, resources: Resources) -> int:
        """Run trials until there are as many as wanted; return 1 if none has a score.

        `throttle` (Slurm) or `workers` (a pool) of the resources is how many run at once.

        Raises:
            UserError: Another coordinator is at work, or the study has another space.
        """
        slots = {"slurm": resources.throttle, "local": resources.workers}.get(resources.kind, 1)
        self.sweep.open()
        with optuna_study.open_study(self.sweep, self.metric, self.space) as study:
            running = optuna_study.running_trials(study)
            live = self._start(study, running, resources)
            if running:  # their runs may have ended since
                show(f"resuming {len(running)} trials of an earlier launch")
                runs = list({run.name: run for run in live.values()}.values())
                launch(self.sweep, self.grid, runs, resources, _quiet, retry=True)
            while live or len(study.trials) < self.trials:
                count = min(slots - len(live), self.trials - len(study.trials))
                asked = [study.ask(self.space) for _ in range(count)]
                live |= self._start(study, asked, resources)
                rows, trouble = statuses(self.sweep, list(live.values()))
                for row in rows if not trouble else ():
                    for trial, run in list(live.items()):
                        if run.name == row.run.name and self._has_ended(study, trial, row):
                            del live[trial]
                if live:
                    time.sleep(10.0 if resources.kind == "slurm" else 1.0)
        for line in optuna_study.summary(self.sweep)[-2:]:
            show(line)
        return int(all(trial.value is None for trial in study.trials))

    def _start(
        self, study: Any, trials: Sequence[Any], resources: Resources
    ) -> dict[Any, PlannedRun]:
        """Launch the runs of trials; a point that cannot be run is a failed trial."""
        live: dict[Any, PlannedRun] = {}
        for trial in trials:
            has_values = trial.params.keys() == self.space.keys()
            try:
                require(has_values, "the coordinator was stopped before the trial had its values")
                (run,) = self.plan_runs(self.grid.at(optuna_study.trial_values(trial)))
            except UserError as error:
                self._tell(study, trial, "FAIL", str(error))
                continue
            trial.set_user_attr("run", run.name)
            show(f"trial {trial.number}  {optuna_study.format_trial(trial)}  {run.name}")
            live[trial] = run
        if live:
            runs = list({run.name: run for run in live.values()}.values())
            say = show if resources.kind == "debug" else _quiet
            launch(self.sweep, self.grid, runs, resources, say)
        return live

    def _has_ended(self, study: Any, trial: Any, row: RunStatus) -> bool:
        """Report a trial's scores so far, or its end; return whether it has ended."""
        scores = optuna_study.read_scores(row.run.folder, self.metric)
        if row.state == "done" and row.run.steps in scores:
            value = scores[row.run.steps]
            self._tell(study, trial, "COMPLETE", f"{self.metric} {value:.4g}", value)
            return True
        if row.state in ("done", "failed", "stopped"):
            text = f"{row.state}: {row.why or f'no score {self.metric}'}"
            self._tell(study, trial, "FAIL", text)
            return True
        for step in scores.keys() - study.trials[trial.number].intermediate_values.keys():
            trial.report(scores[step], step)
        if not scores or not trial.should_prune():
            return False
        cancel(self.sweep, [row.run], _quiet)
        last = max(scores)
        self._tell(study, trial, "PRUNED", f"at step {last}, {scores[last]:.4g}")
        return True

    def _tell(
        self, study: Any, trial: Any, state: str, text: str, value: float | None = None
    ) -> None:
        study.tell(trial, value, optuna_study.import_optuna().trial.TrialState[state])
        show(f"trial {trial.number}  {state.lower()}  {text}")


def _quiet(_: str) -> None: ...
