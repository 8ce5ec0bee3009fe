"""Optional trackers: what they are told, and what happens where they refuse."""

import sys
from importlib.machinery import ModuleSpec
from unittest.mock import Mock

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType
from small import small

from experiments.runtime import records
from experiments.training.session import train
from routing.errors import UserError

SCORED = ("eval=digits", "eval.samples=16", "eval.metrics=[accuracy]")
SCORE = "accuracy-16 (digits-classifier)"


def install(monkeypatch, name):
    """Make a mock the package of a service, which notes what accelerate's own tracker calls."""
    service = Mock(__spec__=ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, name, service)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType(name)])
    return service


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_hears_name_config_losses_and_scores(name, tmp_path, monkeypatch):
    service = install(monkeypatch, name)
    folder = train(small(tmp_path, f"log={name}", *SCORED), quiet=True)
    options, run = service.init.call_args.kwargs, service.init.return_value
    assert (options["project"], options["name"]) == ("tread-suite", folder.name)
    assert service.config.update.call_args.args[0]["route"] == "none"
    logged = [(call.kwargs["step"], call.args[0]) for call in run.log.call_args_list]
    lines = records.read_jsonl(folder / "metrics.jsonl")
    assert [(s, v["loss"]) for s, v in logged if "loss" in v] == [(line["step"], line["loss"]) for line in lines]
    assert logged[-1] == (6, {SCORE: records.read_jsonl(folder / "scores.jsonl")[0]["value"]})
    run.finish.assert_called_once_with()


def test_a_service_that_refuses_is_one_sentence(tmp_path, monkeypatch):
    install(monkeypatch, "wandb").init.side_effect = RuntimeError("no key\nlog in first")
    with pytest.raises(UserError, match=r"log=wandb did not start \(no key log in first\); .* type log=none"):
        train(small(tmp_path, "log=wandb"), quiet=True)


def test_tensorboard_holds_the_numbers_of_the_run_folder(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train(small(tmp_path, "log=tensorboard", *SCORED), quiet=True)
    (events,) = {path.parent for path in folder.glob("tread-suite/events.*")}
    accumulator = EventAccumulator(str(events)).Reload()
    lines = records.read_jsonl(folder / "metrics.jsonl")
    logged = [(event.step, event.value) for event in accumulator.Scalars("loss")]
    assert logged == [(line["step"], pytest.approx(line["loss"])) for line in lines]
    (score,) = accumulator.Scalars(SCORE)
    assert score.step == 6
    # The files are the record: the same run again asks for no tracker.
    assert train(small(tmp_path, *SCORED), quiet=True) == folder
