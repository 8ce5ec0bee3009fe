"""Every published run keeps its name: the hash of its configuration is the one that its folder has.

REGENERATE=1 python -m pytest tests/experiments/config/test_pinned_names.py collects the configurations anew from the
records in results/ and from the bundled models. The names in the fixture are those that the runs wrote themselves;
only runs with `init=` need a stand-in, since their names depend on weights that are not published.
"""

from __future__ import annotations

import gzip
import json
import os
import tarfile

import pytest
import yaml
from safetensors import safe_open
from safetensors.numpy import save_file
from suite import DATA, RESULTS, config_from_values

FIXTURE = DATA / "published_configs.jsonl.gz"
# Every `init=` of the fixture resolves to this file in the tests, so that the rest of the hash is pinned.
STAND_IN = "stand-in.safetensors"


def config_and_name(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[dict, str]:
    folder = member.name.rpartition("/")[0]
    summary = json.loads(archive.extractfile(f"{folder}/summary.json").read())
    config = yaml.load(archive.extractfile(member).read(), yaml.CSafeLoader)
    return config, summary["name"]


def published() -> list[dict]:
    """Return the configuration and the name of every published run and bundled model."""
    runs = []
    for path in sorted(RESULTS.glob("*.tar.gz")):
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                if member.name.endswith("/config.yaml"):
                    config, name = config_and_name(archive, member)
                    runs.append({"source": path.name, "name": name, "config": config})
    for path in sorted((RESULTS / "models").glob("*.safetensors")):
        with safe_open(path, "numpy") as weights:
            config = json.loads(weights.metadata()["config"])
        runs.append({"source": path.name, "name": None, "config": config})
    return runs


def with_stand_in(config: dict, folder) -> dict:
    return config if config["init"] is None else {**config, "init": str(folder / STAND_IN)}


def is_removed(run: dict) -> bool:
    """Runs on data that were removed keep their names as records; no configuration leads to them any more."""
    return run["config"]["data"]["name"] == "icons"


def regenerate(folder) -> None:
    rows = []
    for run in published():
        if is_removed(run):
            rows.append(run)
            continue
        current = config_from_values(with_stand_in(run["config"], folder)).name
        if run["name"] is None or run["config"]["init"] is not None:
            run["recomputed"] = current
        rows.append(run)
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    FIXTURE.write_bytes(gzip.compress(text.encode(), mtime=0))


@pytest.fixture(scope="module")
def parent_folder(tmp_path_factory):
    import numpy as np

    folder = tmp_path_factory.mktemp("parent")
    save_file({"weight": np.arange(4, dtype=np.float32)}, folder / STAND_IN)
    return folder


@pytest.fixture(scope="module")
def runs(parent_folder):
    if os.environ.get("REGENERATE"):
        regenerate(parent_folder)
    lines = gzip.decompress(FIXTURE.read_bytes()).decode().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if not is_removed(row)]


def test_the_fixture_holds_every_published_run(runs):
    sources = {run["source"] for run in runs}
    archives = {path.name for path in RESULTS.glob("*.tar.gz")}
    archives.remove("speed.tar.gz")  # timings, not runs
    assert sources == archives | {p.name for p in (RESULTS / "models").glob("*.safetensors")}
    assert len(runs) == 526 - 4  # on icons
    assert sum("recomputed" in run for run in runs) == 36


def test_every_published_run_keeps_its_name_and_its_hash(runs, parent_folder):
    differences = []
    for run in runs:
        config = config_from_values(with_stand_in(run["config"], parent_folder))
        expected = run.get("recomputed", run["name"])
        if config.name != expected or not config.name.endswith(f"-{config.hash}"):
            differences.append((run["source"], expected, config.name))
    assert differences == []


def test_a_name_that_depends_on_unpublished_weights_is_right_up_to_its_hash(runs):
    started_from_weights = [run for run in runs if run["name"] and "recomputed" in run]
    assert len(started_from_weights) == 30
    for run in started_from_weights:
        assert run["recomputed"].rpartition("-")[0] == run["name"].rpartition("-")[0]


def test_a_saved_configuration_is_read_back_to_the_same_values_and_name(runs, parent_folder):
    # Later versions write more keys; what one of them writes has to stay the run that it was.
    for run in runs[::20]:
        config = config_from_values(with_stand_in(run["config"], parent_folder))
        again = config_from_values(config.to_dict())
        assert again == config and again.name == config.name


@pytest.fixture
def published_run(runs):
    return next(run for run in runs if str(run["name"]).startswith("dit-T4-fashion_2-8_"))


def changed(run: dict, key: str, value: object):
    """Return the configuration of a run with another value of one key."""
    config = json.loads(json.dumps(run["config"]))
    group, name = key.split(".")
    config[group][name] = value
    return config_from_values(config)


def test_another_value_is_another_run(published_run):
    values = {
        "train.lr": 0.1234, "train.batch": 17, "train.ema": 0.5, "train.clip": 3.0, "routing.selection": "rows", "guidance.scale": 1.75,
        "sampler.steps": 7, "objective.p_std": 1.3, "backbone.depth": 11,
    }  # fmt: skip
    for key, value in values.items():
        assert changed(published_run, key, value).hash not in published_run["name"], key


def test_where_and_how_a_run_computes_is_no_part_of_its_name(published_run):
    values = {
        "train.steps": 12_345, "train.log_every": 3, "train.micro_batch": 2, "train.threads": 2,
        "train.compile": "blocks", "train.tf32": False,
        "paths.runs": "elsewhere", "data.path": "elsewhere",
    }  # fmt: skip
    for key, value in values.items():
        assert changed(published_run, key, value).name == published_run["name"], key
