"""Search: optuna proposes values for a grid's `search` section, runs answer, bad ones are pruned.

One coordinator asks and tells. The study is optuna's journal in the sweep's folder, and the run of
a trial is the folder that its configuration names: after a kill of the coordinator the same command
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
from experiments.runtime.parsing import whole
from routing.errors import UserError, one_of
from sweeps import SweepError
from sweeps.jobs.cluster_resources import Resources
from sweeps.jobs.sweep_folder import Sweep
from sweeps.launch import cancel, launch, retry
from sweeps.planning.grid import Grid
from sweeps.planning.overrides import show
from sweeps.planning.planned_runs import Plan, PlannedRun
from sweeps.run_status import RunStatus, statuses

# Trials that end unpruned before the median of the others at the same step prunes one.
STARTUP = 4


def optuna() -> Any:
    """Return the package, an optional one; raise `SweepError` where it is not installed."""
    try:
        import optuna as package
    except ImportError:
        raise SweepError("a search needs optuna: pip install 'optuna>=4'") from None
    package.logging.set_verbosity(package.logging.WARNING)
    return package


def _place(sweep: Sweep) -> dict[str, Any]:
    """Return the name and the storage of a sweep's study."""
    storages = optuna().storages
    file = storages.journal.JournalFileBackend(str(sweep.path / "search" / "journal.log"))
    return {"study_name": sweep.name, "storage": storages.JournalStorage(file)}


class Search:
    """A grid's `search` section, checked, and its trials.

    Args:
        found: The grid.
        planned: Plans it with values in place of that section.
        user: What the user typed, by key.
        trials: How many there are in the end, those of earlier starts included.

    Raises:
        SweepError: A key, range or metric that is none, or more than one run for a trial.
    """

    def __init__(
        self, found: Grid, planned: Callable[[Grid], Plan], user: Mapping[str, Any],
        trials: int | None = None,
    ) -> None:  # fmt: skip
        raw, where = found.raw["search"], f"grid {found.name}: search"
        wanted = raw.get("trials", 20) if trials is None else trials
        self.trials, over = whole(wanted, f"{where}: trials=", SweepError), raw.get("over")
        if self.trials < 1 or not over:
            raise SweepError(f"{where}: expected trials of at least 1 and over: {{key: values}}")
        if typed := sorted(set(over) & set(user)):
            raise SweepError(f"{where}: {typed[0]} is searched over; leave the word out")
        # Optuna's distributions by name; the plan at one corner of their space.
        self.space = {str(k): _distribution(f"{where} over {k}", v) for k, v in over.items()}
        self.found, self.planned, self.corner = found, planned, planned(found)
        config = next(iter(self.corner.configs.values()), None)
        if config is None or len(self.corner.runs) + len(self.corner.waiting) != 1:
            raise SweepError(f"{where}: a trial is one run; give one seed, no axes and no stages")
        self.metric = str(raw.get("metric", "fd"))
        known = tuple(config.eval.get("metrics", ()))
        one_of(f"{where}: metric", self.metric, known, SweepError)
        self.sweep = Sweep(self.corner.root, found.name)
        self.live: dict[int, tuple[Any, PlannedRun]] = {}

    def work(self, place: Resources, say: Callable[[str], None] = print) -> int:
        """Run trials until there are as many as wanted; return 1 if none has a score.

        `throttle` (Slurm) or `workers` (a pool) of `place` is how many run at once. `UserError` if
        another coordinator works, or the space is not what the study has.
        """
        self.place, self.say, package = place, say, optuna()
        room = {"slurm": place.throttle, "local": place.workers}.get(place.kind, 1)
        with locked(self.sweep.path / "search"):
            self.study = package.create_study(
                direction={"lower": "minimize", "higher": "maximize"}[METRICS[self.metric].better],
                sampler=package.samplers.TPESampler(constant_liar=True),
                pruner=package.pruners.MedianPruner(n_startup_trials=STARTUP),
                load_if_exists=True, **_place(self.sweep),
            )  # fmt: skip
            self.study.set_user_attr("metric", self.metric)
            old = [
                package.trial.Trial(self.study, trial._trial_id)
                for trial in self.study.trials
                if not trial.state.is_finished()
            ]
            for trial in old:
                keys, mine = trial.params.keys(), self.space.keys()
                # A trial that has a run had all its values; one that was cut off had the first.
                if keys - mine or ("run" in trial.user_attrs and keys != mine):
                    raise self._another(f"trial {trial.number} has {', '.join(keys)}")
            if old:
                say(f"{len(old)} trials of an earlier start go on")
                self._start(old)
                # What ended while nobody looked.
                runs = [run for _, run in self.live.values()]
                retry(self.sweep, runs, place, _quiet, self.found)
            while True:
                # As many as there is room for.
                new = min(room - len(self.live), self.trials - len(self.study.trials))
                try:
                    asked = [self.study.ask(self.space) for _ in range(new)]
                except ValueError as error:
                    raise self._another(str(error)) from None
                self._start(asked)
                if not self.live and new <= 0:
                    break
                rows, trouble = statuses(self.sweep, [run for _, run in self.live.values()])
                by_name = {} if trouble else {row.run.name: row for row in rows}
                for number, (trial, run) in list(self.live.items()):
                    if run.name in by_name and self._settled(trial, by_name[run.name]):
                        del self.live[number]
                if self.live:
                    time.sleep(10.0 if place.kind == "slurm" else 1.0)
        for line in summary(self.sweep)[-2:]:
            say(line)
        return int(not any(t.value is not None for t in self.study.trials))

    def _another(self, why: str) -> SweepError:
        return SweepError(
            f"grid {self.found.name}: its search is another than its study has ({why}); "
            "copy the file under another name"
        )

    def _start(self, trials: Sequence[Any]) -> None:
        """Plan and launch trials' runs; values that one had before a kill stay."""
        started = {}
        for trial in trials:
            values = _values(trial)
            try:
                if values.keys() != self.space.keys():
                    raise SweepError("it was cut off before it had its values")
                (run,) = self.planned(self.found.at(values)).runs
            except UserError as error:  # a point that cannot be run
                self._end(trial, "FAIL", str(error))
                continue
            trial.set_user_attr("run", run.name)
            self.say(f"trial {trial.number}  {_words(values)}  {run.name}")
            self.live[trial.number] = trial, run
            started[run.name] = run
        if started:
            made = Plan(self.found, self.corner.scale, self.sweep.root, list(started.values()))
            launch(made, self.place, self.say if self.place.kind == "debug" else _quiet)

    def _settled(self, trial: Any, row: RunStatus) -> bool:
        """Tell what is known of a trial; return whether it is over."""
        lines = read_jsonl(Path(row.run.folder) / "scores.jsonl")
        # Of several features, the first that the run names.
        found = {
            line["step"]: line["value"]
            for line in reversed([x for x in lines if is_score(x) and x.get("key") == self.metric])
            if type(line.get("step")) is int and math.isfinite(line["value"])
        }
        if row.state == "done" and row.run.steps in found:
            self._end(trial, "COMPLETE", "", found[row.run.steps])
        elif row.state in ("done", "failed", "stopped"):
            self._end(trial, "FAIL", f"{row.state}: {row.why or f'no score {self.metric}'}")
        else:
            for step in found.keys() - self.study.trials[trial.number].intermediate_values.keys():
                trial.report(found[step], step)
            if not found or not trial.should_prune():
                return False
            cancel(self.sweep, [row.run], _quiet)
            self._end(trial, "PRUNED", f"at step {max(found)}, {found[max(found)]:.4g}")
        return True

    def _end(self, trial: Any, state: str, why: str, value: float | None = None) -> None:
        self.study.tell(trial.number, value, state=optuna().trial.TrialState[state])
        said = f"{self.metric} {value:.4g}" if value is not None else why
        self.say(f"trial {trial.number}  {state.lower()}  {said}")


def _distribution(where: str, space: Any) -> Any:
    known = optuna().distributions
    try:
        if isinstance(space, list):
            return known.CategoricalDistribution(space)
        if not isinstance(space, dict) or not set(space) <= {"low", "high", "step", "log"}:
            raise ValueError("expected a list of values, or low, high, and step or log")
        integers = type(space["low"]) is int and type(space["high"]) is int
        return (known.IntDistribution if integers else known.FloatDistribution)(**space)
    except (ValueError, TypeError, KeyError) as error:
        raise SweepError(f"{where}: {space!r} is no range ({error})") from None


def _quiet(_: str) -> None: ...


def _values(trial: Any) -> dict[str, Any]:
    """A trial's values: three digits of a range, all of one with steps or of a list's."""
    digits = {k: 3 if getattr(d, "step", 0) is None else 15 for k, d in trial.distributions.items()}
    return {
        key: float(f"{value:.{digits[key]}g}") if isinstance(value, float) else value
        for key, value in trial.params.items()
    }


def _words(values: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={show(v)}" for k, v in values.items())


def summary(sweep: Sweep) -> list[str]:
    """Return a line per trial of a search, their number by state, and the best; [] if none."""
    if not (sweep.path / "search" / "journal.log").is_file():
        return []
    try:
        study = optuna().load_study(**_place(sweep))
    except KeyError:  # cut off before there was one
        return []
    trials, metric = study.trials, study.user_attrs.get("metric", "score")
    scored = [t for t in trials if t.state.name == "COMPLETE"]
    lines = {
        t.number: f"trial {t.number}  {t.state.name.lower():<9}"
        f"{'' if t.value is None else f'{t.value:.4g}':<9}{_words(_values(t))}  "
        f"{t.user_attrs.get('run', '')}"
        for t in trials
    }
    counts = Counter(t.state.name.lower() for t in trials)
    said = [*lines.values(), "search: " + ", ".join(f"{n} {name}" for name, n in counts.items())]
    return [*said, f"best of {metric}: {lines[study.best_trial.number]}"] if scored else said
