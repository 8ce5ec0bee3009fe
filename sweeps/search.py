"""Search: optuna proposes values for a grid's `search` section, and bad trials are pruned.

One coordinator asks and tells. The study is optuna's journal in the sweep's folder, and a trial's
run is the folder that its configuration names: after the coordinator was killed the same command
finds every trial's run again, so that none is lost and none is trained twice.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.options.evaluation import METRICS
from experiments.runtime.console import is_score, read_jsonl
from experiments.runtime.files import locked
from routing.errors import UserError
from sweeps import SweepError
from sweeps.folder import Sweep
from sweeps.grid import Grid
from sweeps.overrides import format_overrides
from sweeps.planned_run import PlannedRun
from sweeps.resources import Resources
from sweeps.run_status import RunStatus
from sweeps.status import statuses
from sweeps.submit import cancel, launch, retry

# Trials that end unpruned before one is pruned for being worse than their median at its step.
STARTUP_TRIALS = 4
Print = Callable[[str], None]


def import_optuna() -> Any:
    """Return optuna, an optional package; raise `SweepError` where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise SweepError("a search needs optuna: pip install 'optuna>=4'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def study_location(sweep: Sweep) -> dict[str, Any]:
    """Return the name and the storage of a sweep's study."""
    storages = import_optuna().storages
    file = storages.journal.JournalFileBackend(str(sweep.path / "search" / "journal.log"))
    return {"study_name": sweep.name, "storage": storages.JournalStorage(file)}


def distributions(over: Mapping[str, Any]) -> dict[str, Any]:
    """Return optuna's distributions of the `over` section of a search."""
    optuna = import_optuna().distributions
    space = {}
    for name, values in over.items():
        try:
            if isinstance(values, list):
                space[name] = optuna.CategoricalDistribution(values)
            elif type(values["low"]) is int and type(values["high"]) is int:
                space[name] = optuna.IntDistribution(**values)
            else:
                space[name] = optuna.FloatDistribution(**values)
        except (ValueError, TypeError) as error:
            raise SweepError(f"search.over.{name}={values}: not a range ({error})") from None
    return space


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
        with locked(self.sweep.path / "search"):
            self._open_study()
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

    def _open_study(self) -> None:
        optuna = import_optuna()
        better = METRICS[self.metric].better
        self.study = optuna.create_study(
            direction={"lower": "minimize", "higher": "maximize"}[better],
            sampler=optuna.samplers.TPESampler(constant_liar=True),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS),
            load_if_exists=True,
            **study_location(self.sweep),
        )
        self.study.set_user_attr("metric", self.metric)

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
            trials.append(import_optuna().trial.Trial(self.study, trial._trial_id))
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

    def _other_space(self, reason: str) -> SweepError:
        return SweepError(
            f"grid {self.grid.name}: its search is another than its study has ({reason}); "
            "copy the file under another name"
        )

    def _start(self, trials: Sequence[Any]) -> None:
        """Plan and launch the runs of trials; values that one had before a kill stay."""
        runs = {}
        for trial in trials:
            values = trial_values(trial)
            try:
                if values.keys() != self.space.keys():
                    raise SweepError("it was cut off before it had its values")
                (run,) = self.plan_runs(self.grid.at(values))
            except UserError as error:  # a point that cannot be run
                self._tell(trial, "FAIL", str(error))
                continue
            trial.set_user_attr("run", run.name)
            self.say(f"trial {trial.number}  {' '.join(format_overrides(values))}  {run.name}")
            self.live[trial.number] = trial, run
            runs[run.name] = run
        if runs:
            say = self.say if self.resources.kind == "debug" else _quiet
            launch(self.sweep, self.grid, list(runs.values()), self.resources, say)

    def _update(self, row: RunStatus) -> None:
        """Tell optuna about the trials of a run: its scores so far, or its end."""
        scores = _scores(row.run, self.metric)
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
        self.study.tell(trial.number, value, state=import_optuna().trial.TrialState[state])
        self.live.pop(trial.number, None)
        result = why if value is None else f"{self.metric} {value:.4g}"
        self.say(f"trial {trial.number}  {state.lower()}  {result}")


def _scores(run: PlannedRun, metric: str) -> dict[int, float]:
    """Return a run's scores by step; of several features those that the run names first."""
    scores: dict[int, float] = {}
    for line in read_jsonl(Path(run.folder) / "scores.jsonl"):
        is_metric = is_score(line) and line.get("key") == metric and type(line.get("step")) is int
        if is_metric and math.isfinite(line["value"]):
            scores.setdefault(line["step"], line["value"])
    return scores


def trial_values(trial: Any) -> dict[str, Any]:
    """Return a trial's values: three digits of a continuous range, all digits of others."""
    values = {}
    for name, value in trial.params.items():
        if isinstance(value, float):
            continuous = getattr(trial.distributions[name], "step", 0) is None
            value = float(f"{value:.{3 if continuous else 15}g}")
        values[name] = value
    return values


def summary(sweep: Sweep) -> list[str]:
    """Return a line per trial of a search, their number by state, and the best; [] if none."""
    if not (sweep.path / "search" / "journal.log").is_file():
        return []
    try:
        study = import_optuna().load_study(**study_location(sweep))
    except KeyError:  # cut off before there was one
        return []
    lines, states = [], Counter[str]()
    for trial in study.trials:
        state = trial.state.name.lower()
        states[state] += 1
        value = "" if trial.value is None else f"{trial.value:.4g}"
        overrides = " ".join(format_overrides(trial_values(trial)))
        run = trial.user_attrs.get("run", "")
        lines.append(f"trial {trial.number}  {state:<9}{value:<9}{overrides}  {run}")
    lines.append("search: " + ", ".join(f"{count} {state}" for state, count in states.items()))
    if states["complete"]:
        metric = study.user_attrs.get("metric", "score")
        lines.append(f"best of {metric}: {lines[study.best_trial.number]}")
    return lines


def _quiet(_: str) -> None: ...
