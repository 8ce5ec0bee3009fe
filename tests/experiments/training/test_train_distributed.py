"""One process under accelerate, two gloo ranks under torchrun: the same numbers as one plain process."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from small import ROOT, overrides, small, two_ranks

from experiments.runtime import records
from experiments.runtime.locks import locked
from experiments.training.session import train

pytestmark = pytest.mark.slow
RUN = str(ROOT / "experiments" / "run.py")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(*arguments):
    return subprocess.run(two_ranks(RUN, *arguments), capture_output=True, text=True, timeout=400, env=ENV)


def losses(runs):
    (folder,) = runs.iterdir()
    return [(line["loss"], line["grad_norm"]) for line in records.read_jsonl(folder / "metrics.jsonl")]


def scores(runs):
    (folder,) = runs.iterdir()
    return {line["metric"]: line["value"] for line in records.read_jsonl(folder / "scores.jsonl")}


def test_two_ranks_equal_one(tmp_path):
    """Losses, gradient norms and scores; with micro-batches."""
    words = ["route=1-2", "train.micro_batch=2", "train.final_samples=true", f"paths.cache={tmp_path / 'cache'}"]
    words += ["eval=digits", "eval.samples=80", "eval.metrics=[fd,accuracy]"]
    one, two = tmp_path / "one", tmp_path / "two"
    train(small(one, *words), quiet=True)
    done = torchrun(*overrides(two, *words))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parameters") == 1, "only the first rank speaks"
    for (a, x), (b, y) in zip(losses(one), losses(two), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
        assert x == pytest.approx(y, rel=1e-4)
    assert scores(one) == pytest.approx(scores(two), rel=1e-2)


def test_two_ranks_equal_one_with_x_prediction_muon_and_sra(tmp_path):
    words = ["experiment=jit", "backbone=mamba", "route=1-2", "sampler.steps=2"]
    words += ["train.optimizer=muon", "train.encoder=ema"]
    train(small(tmp_path / "one", *words), quiet=True)
    done = torchrun(*overrides(tmp_path / "two", *words))
    assert done.returncode == 0, done.stderr
    for (a, _), (b, _) in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, rel=1e-3)  # Muon rounds to bfloat16


def test_two_killed_ranks_go_on_where_they_were(tmp_path):
    more = ("route=1-2", "train.steps=60", "train.save_every=5")
    straight = torchrun(*overrides(tmp_path / "straight", *more))
    assert straight.returncode == 0, straight.stderr
    call, quiet = two_ranks(RUN, *overrides(tmp_path / "killed", *more)), subprocess.DEVNULL
    process = subprocess.Popen(call, stdout=quiet, stderr=quiet, env=ENV, start_new_session=True)
    while not list((tmp_path / "killed").glob("*/checkpoints/step-0000001*")):
        assert process.poll() is None
        time.sleep(0.02)
    # The launcher's workers have process groups of their own: each is killed for itself.
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        each.kill()
    process.wait()
    assert not list((tmp_path / "killed").glob("*/summary.json")), "killed before its end"
    again = torchrun(*overrides(tmp_path / "killed", *more))
    assert again.returncode == 0 and "resumed at step" in again.stdout, again.stderr
    a, b = (next(p.iterdir()) / "model.safetensors" for p in (tmp_path / "straight", tmp_path / "killed"))
    # The metadata name the folders, which differ; the weights may not.
    a, b = load_file(a), load_file(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_multirun_trains_each_run_on_two_ranks_and_ends_with_one_that_failed_on_one(tmp_path):
    words = overrides(tmp_path, "log=tensorboard", "train.steps=2")
    done = torchrun("-m", *words, "seed=0,1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("-m: 2 of 2 runs are done") == 1, "said once, by the first rank"
    with locked(small(tmp_path).folder):  # the first rank alone is refused; the other one waits for it
        done = torchrun("-m", *overrides(tmp_path, "log=tensorboard", "train.steps=4"), "seed=0,1")
    assert done.returncode != 0 and "is being written by process" in done.stderr
    assert "0 of 2 runs are done" in done.stdout, "the next run did not begin"


def test_one_process_under_accelerate_launch(tmp_path):
    accelerate = shutil.which("accelerate", path=str(Path(sys.executable).parent))
    call = [accelerate, "launch", "--cpu", "--num_processes", "1", RUN, *overrides(tmp_path / "launched", "route=1-2")]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, env=ENV)
    assert done.returncode == 0, done.stderr
    train(small(tmp_path / "plain", "route=1-2"), quiet=True)
    assert losses(tmp_path / "launched") == losses(tmp_path / "plain")
