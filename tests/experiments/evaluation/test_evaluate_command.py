"""python experiments/evaluate.py on runs, exported files, folders, archives, and two processes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from evaluation_tools import export_weights
from PIL import Image
from small import ROOT, small, two_ranks

from experiments.data import create
from experiments.evaluate import main
from experiments.evaluation.images import whole_split
from experiments.runtime.command import run_command

SCRIPT = str(ROOT / "experiments" / "evaluate.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with exported weights, as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = small(folder.parent, "eval=digits", "eval.samples=70", "eval.batch=35", "route=1-2")
    folder.mkdir()
    (folder / "config.yaml").write_text("marker: 1\n")
    (folder / "scores.jsonl").write_text("")
    (folder / "summary.json").write_text("{}")
    export_weights(folder / "model.safetensors", config)
    return folder


def command(*arguments):
    return run_command(main, [str(a) for a in arguments])


def records(folder):
    return [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]


def test_a_run_is_scored_without_touching_its_record(run, tmp_path, capsys):
    before = {p: p.read_bytes() for p in run.iterdir() if p.is_file()}
    samples = tmp_path / "samples.npz"
    asked = ("--metrics", "fd", "accuracy", "--guidance", "none", "--steps", 3)
    assert command(run, *asked, "--write-samples", samples) == 0
    assert {p: p.read_bytes() for p in run.iterdir() if p.is_file()} == before
    (record,) = records(run / "evaluations")
    assert record["step"] == 7
    assert record["sampler"]["steps"] == 3
    assert [s["metric"] for s in record["scores"]] == [
        "FD-70 (digits-classifier)",
        "accuracy-70 (digits-classifier)",
        "FD-70 (autoencoder)",
    ]
    assert record["scores"][0]["guidance"] == "none scale=1.0"
    assert "FD-70 (digits-classifier)" in capsys.readouterr().out
    # The pieces that resuming needs are gone, and the same command makes nothing again.
    assert not list((run / "evaluations").rglob("*.npz"))
    assert command(run, *asked) == 0
    assert "scored before" in capsys.readouterr().out
    assert records(run / "evaluations") == [record]
    # Where the record was deleted it writes the same.
    next((run / "evaluations").glob("*.json")).unlink()
    assert command(run, *asked) == 0
    (again,) = records(run / "evaluations")
    assert again["scores"] == record["scores"]
    # The batch of samples scores the same as the samples did.
    assert command(samples, "--data", "digits", "--metrics", "fd,accuracy", "--out", tmp_path / "e") == 0
    (elsewhere,) = records(tmp_path / "e")
    for ours, theirs in zip(record["scores"], elsewhere["scores"], strict=True):
        assert ours["value"] == pytest.approx(theirs["value"], rel=1e-6)
        assert theirs["source"] == str(samples)


def test_the_exported_file_alone_is_scored_under_several_guidances(run, tmp_path):
    few = ("--metrics", "accuracy", "--samples", 4, "--keep-samples", "--out", tmp_path)
    changes = ("guidance.high=9", "sampler.steps=1")
    choices = (",low=0.1", "cfg,scale=2", "routed,strong=0,weak=0.75")
    assert command(run / "model.safetensors", *changes, *few, "--guidance", *choices) == 0
    guidance = [record["guidance"] for record in records(tmp_path)]
    # Without a name, the run's own guidance keeps its other options.
    assert sorted((g["name"], g["scale"], g["low"], g["high"]) for g in guidance) == [
        ("cfg", 1.5, 0.1, 9),
        ("cfg", 2, 0, 9),
        ("routed", 1.5, 0, 9),
    ]
    assert records(tmp_path)[0]["sampler"]["steps"] == 1
    assert len(list((tmp_path / "samples").rglob("*.npz"))) == 3


def test_a_reference_is_written_and_compared_with(run, tmp_path):
    real = tmp_path / "real.npz"
    assert command(run, "--write-reference", real) == 0
    with np.load(real, allow_pickle=False) as file:
        assert set(file.files) == {"mu", "sigma", "rows", "n", "features", "name"}
        assert file["n"] == 360
    for n, reference in enumerate(((), ("--reference", real))):
        assert command(run, "--metrics", "fd", "--out", tmp_path / str(n), *reference) == 0
    # The file holds what the first features see; the second ones see the held-out split.
    held, file = ([s["value"] for s in records(tmp_path / n)[0]["scores"]] for n in "01")
    assert held == file and len(held) == 2
    # Another file of this name is another reference.
    assert command(run, "--write-reference", real, "--split", "train") == 0
    assert command(run, "--metrics", "fd", "--out", tmp_path / "1", "--reference", real) == 0
    assert len(records(tmp_path / "1")) == 2


def test_pictures_are_scored(run, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels, _ = whole_split(create({"name": "digits"}), "test")
    for i, image in enumerate(pixels[:90]):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{i:04d}.png")
    asked = (folder, "--data", "digits", "--metrics", "fd", "--out", tmp_path / "e")
    assert command(*asked) == 0
    assert records(tmp_path / "e")[0]["scores"][0]["value"] < 10


@pytest.mark.slow
def test_two_processes_score_as_one(run, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    metrics = ["fd,accuracy,precision,recall,kid,memorisation,memorisation_pixels"]
    for n, launcher in enumerate(([sys.executable], two_ranks())):
        cache = tmp_path / f"cache{n}"
        subprocess.run(
            [*launcher, SCRIPT, str(run), "--metrics", *metrics,
             "--out", str(tmp_path / str(n)), "--cache", str(cache),
             # Asked for again it is there: no process scores what another one has just written.
             "--guidance", "cfg", "cfg"],
            check=True, env=environment, cwd=tmp_path, timeout=570,
        )  # fmt: skip
    one, two = (records(tmp_path / str(n))[0]["scores"] for n in range(2))
    assert [s["metric"] for s in one] == [s["metric"] for s in two]
    unlabelled = [s for s in one if "autoencoder" in s["metric"]]
    assert unlabelled and len(one) == 9 + len(unlabelled)
    for a, b in zip(one, two, strict=True):
        assert a["value"] == pytest.approx(b["value"], rel=1e-6, abs=1e-9), a["metric"]
        assert a["features"] == b["features"]


@pytest.mark.slow
def test_other_data_are_scored_anew(run, tmp_path):
    for changes in ((), ("data.sigma_data=1",)):
        assert command(run, *changes, "--metrics", "accuracy", "--samples", 4, "--out", tmp_path) == 0
    assert len(records(tmp_path)) == 2
