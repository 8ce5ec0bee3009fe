"""The Optuna study of a search, stored in the sweep's folder."""

import contextlib
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.options.evaluation import METRICS
from experiments.runtime.locks import locked
from experiments.runtime.records import is_score, read_jsonl
from sweeps import SweepError
from sweeps.store.folder import Sweep
from sweeps.store.overrides import format_overrides

# Trials that end unpruned before one is pruned for being worse than their median at its step.
STARTUP_TRIALS = 4


def import_optuna() -> Any:
    """Return optuna, an optional package; raise `SweepError` where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise SweepError("a search needs optuna: pip install 'optuna>=4'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _journal(sweep: Sweep) -> Path:
    return sweep.path / "search" / "journal.log"


def study_location(sweep: Sweep) -> dict[str, Any]:
    """Return the name and the storage of a sweep's study."""
    storages = import_optuna().storages
    file = storages.journal.JournalFileBackend(str(_journal(sweep)))
    return {"study_name": sweep.name, "storage": storages.JournalStorage(file)}


def _drop_damaged_end(journal: Path) -> None:
    """Cut a journal before its first damaged line, which optuna could not read.

    A coordinator that was killed, or a full disk, leaves half a line or NULs at the end.
    """
    content = journal.read_bytes() if journal.is_file() else b""
    end = 0
    for line in io.BytesIO(content):
        try:
            is_intact = line.endswith(b"\n") and isinstance(json.loads(line.decode()), dict)
        except ValueError:
            is_intact = False
        if not is_intact:
            break
        end += len(line)
    if end < len(content):
        print(f"{journal} was damaged: the search goes on from the intact lines before that")
        os.truncate(journal, end)


@contextlib.contextmanager
def open_study(sweep: Sweep, metric: str, space: Mapping[str, Any]) -> Iterator[Any]:
    """Create or load the study of a sweep.

    Raises:
        UserError: Another coordinator has it, or its trials are from another space.
    """
    optuna = import_optuna()
    with locked(sweep.path / "search"):
        _drop_damaged_end(_journal(sweep))
        study = optuna.create_study(
            direction={"lower": "minimize", "higher": "maximize"}[METRICS[metric].better],
            sampler=optuna.samplers.TPESampler(constant_liar=True),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS),
            load_if_exists=True,
            **study_location(sweep),
        )
        for trial in study.trials:
            # A trial that was cut off has the first of its values.
            has_all = trial.params.keys() == space.keys() or "run" not in trial.user_attrs
            if not (has_all and trial.distributions.items() <= space.items()):
                raise SweepError(
                    f"grid {sweep.name}: its search differs from that of its stored trials (trial "
                    f"{trial.number} has {format_trial(trial)}); copy the file under another name"
                )
        study.set_user_attr("metric", metric)
        yield study


def running_trials(study: Any) -> list[Any]:
    """Return the trials that an earlier coordinator left unfinished."""
    trials = []
    for trial in study.trials:
        if not trial.state.is_finished():
            trials.append(import_optuna().trial.Trial(study, trial._trial_id))
    return trials


def distributions(over: Mapping[str, Any]) -> dict[str, Any]:
    """Return optuna's distributions of the `over` section of a search."""
    optuna, space = import_optuna().distributions, {}
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


def read_scores(folder: str, metric: str) -> dict[int, float]:
    """Return a run's scores by step; of several features those that the run names first."""
    scores: dict[int, float] = {}
    for line in read_jsonl(Path(folder) / "scores.jsonl"):
        is_metric = is_score(line) and line.get("key") == metric and type(line.get("step")) is int
        if is_metric and math.isfinite(line["value"]):
            scores.setdefault(line["step"], line["value"])
    return scores


def trial_values(trial: Any) -> dict[str, Any]:
    """Return a trial's values: three digits of a continuous range, all digits of others."""
    values = dict(trial.params)
    for name, value in values.items():
        if isinstance(value, float):
            continuous = getattr(trial.distributions[name], "step", 0) is None
            values[name] = float(f"{value:.{3 if continuous else 15}g}")
    return values


def format_trial(trial: Any) -> str:
    """Return a trial's values as overrides."""
    return " ".join(format_overrides(trial_values(trial)))


def summary(sweep: Sweep) -> list[str]:
    """Return a line per trial of a search, their number by state, and the best; [] if none."""
    if not _journal(sweep).is_file():
        return []
    try:
        study = import_optuna().load_study(**study_location(sweep))
    except KeyError:  # cut off before there was one
        return []
    except ValueError:
        return [
            f"search: {_journal(sweep)} is damaged; the next launch goes on from what is intact"
        ]
    lines, states = [], Counter(trial.state.name.lower() for trial in study.trials)
    for trial in study.trials:
        value = "" if trial.value is None else f"{trial.value:.4g}"
        text = f"{trial.state.name.lower():<9}{value:<9}{format_trial(trial)}"
        lines.append(f"trial {trial.number}  {text}  {trial.user_attrs.get('run', '')}")
    lines.append("search: " + ", ".join(f"{count} {state}" for state, count in states.items()))
    if states["complete"]:
        metric = study.user_attrs.get("metric", "score")
        lines.append(f"best of {metric}: {lines[study.best_trial.number]}")
    return lines
