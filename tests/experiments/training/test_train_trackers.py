"""Optional trackers: what they are told, and what happens without them or where they refuse."""

import json
import os

import pytest
from small import overrides, run

from experiments.runtime import records
from experiments.training.session import train

# What accelerate calls of W&B and of trackio, written down instead of sent.
SERVICE = """
import json, os

class Run:
    def log(self, values, step=None, **rest):
        note("log", values=values, step=step)
    def finish(self):
        note("finish")

class Config:
    def update(self, values, **rest):
        note("config", values=dict(values))

config = Config()

def note(what, **fields):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps({"what": what, **fields}) + "\\n")

def init(**options):
    if os.environ.get("REFUSES"):
        raise RuntimeError("no key\\nlog in first")
    note("init", **options)
    return Run()
"""


@pytest.fixture
def service(tmp_path):
    """Return an environment in which both services are installed, and the file of what they hear."""
    for name in ("wandb", "trackio"):
        package, about = tmp_path / "site" / name, tmp_path / f"site/{name}-1.0.dist-info"
        package.mkdir(parents=True)
        about.mkdir()
        (package / "__init__.py").write_text(SERVICE)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    told = tmp_path / "told.jsonl"
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "TOLD": str(told), "OMP_NUM_THREADS": "1"}, told


SCORED = ("eval=digits", "eval.samples=16", "eval.metrics=[accuracy]")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_hears_name_config_losses_and_scores(name, service, tmp_path):
    env, told = service
    done = run(*overrides(tmp_path / "runs", f"log={name}", *SCORED), env=env)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    heard = [json.loads(line) for line in told.read_text().splitlines()]
    assert [heard[0]["what"], heard[1]["what"]] == ["init", "config"]
    assert heard[-1]["what"] == "finish"
    assert (heard[0]["project"], heard[0]["name"]) == ("tread-suite", folder.name)
    assert heard[1]["values"]["route"] == "none"
    logged = [(h["step"], h["values"]) for h in heard if h["what"] == "log"]
    lines = records.read_jsonl(folder / "metrics.jsonl")
    assert [(s, v["loss"]) for s, v in logged if "loss" in v] == [(line["step"], line["loss"]) for line in lines]
    score = {"accuracy-16 (digits-classifier)": records.read_jsonl(folder / "scores.jsonl")[0]["value"]}
    assert logged[-1] == (6, score)


@pytest.mark.slow
def test_a_service_that_refuses_is_one_sentence(service, tmp_path):
    env, _ = service
    done = run(*overrides(tmp_path / "runs", "log=wandb"), env={**env, "REFUSES": "1"})
    assert done.returncode == 2
    assert "log=wandb did not start (no key log in first)" in done.stderr
    assert "type log=none" in done.stderr and "Traceback" not in done.stderr


def test_tensorboard_holds_the_numbers_of_the_run_folder(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from experiments.config.compose import load

    folder = train(load(overrides(tmp_path / "runs", "log=tensorboard", *SCORED)), quiet=True)
    (events,) = {path.parent for path in folder.glob("tread-suite/events.*")}
    found = EventAccumulator(str(events)).Reload()
    written = records.read_jsonl(folder / "metrics.jsonl")
    got = [(event.step, event.value) for event in found.Scalars("loss")]
    assert got == [(line["step"], pytest.approx(line["loss"])) for line in written]
    (score,) = found.Scalars("accuracy-16 (digits-classifier)")
    assert score.step == 6
    # The files are the record: the same run again asks for no tracker.
    assert train(load(overrides(tmp_path / "runs", *SCORED)), quiet=True) == folder
