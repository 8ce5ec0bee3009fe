"""Search: optuna proposes values for a grid's `search` section, and bad trials are pruned.

One coordinator asks and tells. The study is optuna's journal in the sweep's folder, and a trial's
run is the folder that its configuration names: after the coordinator was killed the same command
finds every trial's run again, so that none is lost and none is trained twice.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routing.errors import UserError, require
from sweeps.cancel import cancel
from sweeps.folder import Sweep
from sweeps.grid import Grid
from sweeps.launch import launch
from sweeps.optuna_study import (
    format_trial,
    live_trial,
    open_study,
    read_scores,
    summary,
    trial_state,
    trial_values,
)
from sweeps.planned_run import PlannedRun
from sweeps.resource_options import Resources
from sweeps.retry import retry
from sweeps.status import RunStatus, statuses

Print = Callable[[str], None]


class Search:
    """The coordinator of a search.

    Args:
        grid: A grid with a `search` section.
        plan_runs: Plans the runs of a grid without one.
        space: Optuna's distributions by name.
        metric: The metric to optimise.
        trials: Number of trials in the end, those of earlier starts included.
        sweep: The folder of the sweep.
    """

    def __init__(
        self, grid: Grid, plan_runs: Callable[[Grid], Sequence[PlannedRun]],
        space: Mapping[str, Any], metric: str, trials: int, sweep: Sweep,
    ) -> None:  # fmt: skip
        self.grid, self.plan_runs, self.space = grid, plan_runs, space
        self.metric, self.trials, self.sweep = metric, trials, sweep
        self.live: dict[int, tuple[Any, PlannedRun]] = {}  # trial and run by number

    def run(self, resources: Resources, say: Print = print) -> int:
        """Run trials until there are as many as wanted; return 1 if none has a score.

        `throttle` (Slurm) or `workers` (a pool) of the resources is how many run at once.

        Raises:
            UserError: Another coordinator is at work, or the study has another space.
        """
        self.resources, self.say = resources, say
        slots = {"slurm": resources.throttle, "local": resources.workers}.get(resources.kind, 1)
        with open_study(self.sweep, self.metric) as self.study:
            self._resume_trials()
            while True:
                count = min(slots - len(self.live), self.trials - len(self.study.trials))
                self._start(self._ask(count))
                if not self.live and count <= 0:
                    break
                rows, trouble = statuses(self.sweep, [run for _, run in self.live.values()])
                for row in rows if not trouble else ():
                    self._update(row)
                if self.live:
                    time.sleep(10.0 if resources.kind == "slurm" else 1.0)
        for line in summary(self.sweep)[-2:]:
            say(line)
        return int(all(trial.value is None for trial in self.study.trials))

    def _resume_trials(self) -> None:
        """Go on with trials that an earlier coordinator left, whose runs may have ended since."""
        trials = []
        for trial in self.study.trials:
            if trial.state.is_finished():
                continue
            names, has_run = trial.params.keys(), "run" in trial.user_attrs
            # A trial with a run had all its values; one that was cut off had the first of them.
            if names - self.space.keys() or (has_run and names != self.space.keys()):
                raise self._other_space(f"trial {trial.number} has {', '.join(names)}")
            trials.append(live_trial(self.study, trial))
        if trials:
            self.say(f"{len(trials)} trials of an earlier start go on")
            self._start(trials)
            runs = [run for _, run in self.live.values()]
            retry(self.sweep, runs, self.resources, _quiet, self.grid)

    def _ask(self, count: int) -> list[Any]:
        try:
            return [self.study.ask(self.space) for _ in range(count)]
        except ValueError as error:
            raise self._other_space(str(error)) from None

    def _other_space(self, reason: str) -> UserError:
        return UserError(
            f"grid {self.grid.name}: its search is another than its study has ({reason}); "
            "copy the file under another name"
        )

    def _start(self, trials: Sequence[Any]) -> None:
        """Plan and launch the runs of trials; values that one had before a kill stay."""
        runs = {}
        for trial in trials:
            values = trial_values(trial)
            try:
                require(
                    values.keys() == self.space.keys(),
                    "it was cut off before it had its values",
                    UserError,
                )
                (run,) = self.plan_runs(self.grid.at(values))
            except UserError as error:  # a point that cannot be run
                self._tell(trial, "FAIL", str(error))
                continue
            trial.set_user_attr("run", run.name)
            self.say(f"trial {trial.number}  {format_trial(trial)}  {run.name}")
            self.live[trial.number] = trial, run
            runs[run.name] = run
        if runs:
            say = self.say if self.resources.kind == "debug" else _quiet
            launch(self.sweep, self.grid, list(runs.values()), self.resources, say)

    def _update(self, row: RunStatus) -> None:
        """Tell optuna about the trials of a run: its scores so far, or its end."""
        scores = read_scores(row.run.folder, self.metric)
        for trial, run in list(self.live.values()):
            if run.name != row.run.name:
                continue
            if row.state == "done" and run.steps in scores:
                self._tell(trial, "COMPLETE", value=scores[run.steps])
            elif row.state in ("done", "failed", "stopped"):
                self._tell(trial, "FAIL", f"{row.state}: {row.why or f'no score {self.metric}'}")
            else:
                reported = self.study.trials[trial.number].intermediate_values
                for step in scores.keys() - reported.keys():
                    trial.report(scores[step], step)
                if scores and trial.should_prune():
                    cancel(self.sweep, [run], _quiet)
                    last = max(scores)
                    self._tell(trial, "PRUNED", f"at step {last}, {scores[last]:.4g}")

    def _tell(self, trial: Any, state: str, why: str = "", value: float | None = None) -> None:
        """End a trial."""
        self.study.tell(trial.number, value, state=trial_state(state))
        self.live.pop(trial.number, None)
        result = why if value is None else f"{self.metric} {value:.4g}"
        self.say(f"trial {trial.number}  {state.lower()}  {result}")


def _quiet(_: str) -> None: ...
