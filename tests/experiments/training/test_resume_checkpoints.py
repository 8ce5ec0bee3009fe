"""Checkpoint folders: whole or absent, verified, kept as asked, refused by name of what differs; run folders that vanish."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from small import small
from training_runs import equal_tensors, make_run

from backbones.weights import save_tensors
from experiments.evaluation import trained_model
from experiments.runtime import checkpoint_files, run_folder, signals
from experiments.runtime.checkpoint_files import CheckpointError
from experiments.runtime.command import run_command
from experiments.training import run_evaluation as evaluation
from experiments.training.session import train
from experiments.training.step import TrainingStep


def write(folder, step, **options):
    return checkpoint_files.write(folder, step, {"model.w": torch.full((3,), float(step))}, {"step": step}, **options)


def steps(folder):
    return [step for step, _ in run_folder.listed(folder)]


def test_last_k_every_n_and_the_one_before_a_bad_streak_are_kept(tmp_path):
    for step in range(1, 9):
        write(tmp_path, step, keep=2, keep_every=3)
    assert steps(tmp_path) == [3, 6, 7, 8]
    for step, streak in ((9, 0), (10, 1), (11, 2)):
        write(tmp_path, step, keep=1, streak=streak)
    assert steps(tmp_path) == [9, 11]
    write(tmp_path, 12, keep=1)
    assert steps(tmp_path) == [12]


@pytest.mark.parametrize("done", [1, 2])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_one_or_the_other(done, tmp_path, monkeypatch):
    write(tmp_path, 3, keep=1)
    calls, honest = [], os.replace

    def killed(*names):
        calls.append(names)
        if len(calls) > done:
            raise KeyboardInterrupt
        honest(*names)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.os, "replace", killed)
        patch.setattr(checkpoint_files, "fsync_dir", lambda path: calls[9] if done == 2 else None)
        with pytest.raises((KeyboardInterrupt, IndexError)):
            write(tmp_path, 3, keep=1)
    assert checkpoint_files.newest(tmp_path) == tmp_path / "checkpoints" / "step-00000003"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("damage", ["flip", "remove", "manifest"])
def test_a_damaged_checkpoint_is_set_aside_with_a_message_and_the_one_before_taken(tmp_path, damage):
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    target = path / "state.safetensors"
    if damage == "flip":
        data = bytearray(target.read_bytes())
        data[-1] ^= 1
        target.write_bytes(data)
    elif damage == "remove":
        target.unlink()
    else:
        (path / "manifest.json").write_text("{")
    said = []
    assert checkpoint_files.newest(tmp_path, said.append).name == "step-00000001"
    assert len(said) == 1 and "step-00000002 is damaged" in said[0]
    assert (tmp_path / "checkpoints" / "damaged-step-00000002").is_dir()


@pytest.mark.parametrize(
    "words",
    [
        ["train.optimizer=muon", "train.muon_lr=0.003"],
        ["train.encoder=ema", "objective=flow", "backbone.align={block: 1, channels: 32, hidden: 16}"],
    ],
    ids=["Muon", "SRA"],
)
def test_a_resumed_run_is_the_same_bit_for_bit(words, tmp_path):
    words = ["backbone=mamba", "route=1-2", "train.micro_batch=4", *words]
    straight = make_run(small(tmp_path / "straight", *words))
    straight.fit()
    make_run(small(tmp_path / "stopped", *words)).fit(3)
    resumed = make_run(small(tmp_path / "stopped", *words))
    assert resumed.resume() and resumed.state.step == 3
    resumed.fit()
    states = [checkpoint_files.read(run_folder.step_folder(run.folder, 6))[0] for run in (straight, resumed)]
    assert equal_tensors(*states) and any("optim.momentum_buffer" in key for key in states[0]) is ("muon" in words[3])


def test_a_checkpoint_restores_every_counter(tmp_path):
    counters = {"step": 3, "rollbacks": 2, "seconds": 4.5, "macs": 6e9, "mean_loss": 0.7, "spikes": 8}
    saved, loaded = (make_run(small(tmp_path)) for _ in range(2))
    vars(saved.state).update(counters)
    saved.state.tally.values.copy_(torch.arange(1.0, 6.0))
    saved.folder.mkdir()
    saved.save()
    assert loaded.resume()
    assert {name: getattr(loaded.state, name) for name in counters} == counters
    assert torch.equal(loaded.state.tally.values, saved.state.tally.values)


@pytest.fixture
def little_disk(tmp_path):
    """A file system of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_full_disk_leaves_the_checkpoint_before_intact(little_disk):
    write(little_disk, 1)
    big = {"model.w": torch.zeros(10**6)}
    with pytest.raises(CheckpointError, match=r"step 2 .*[Nn]o space left.*step 1 is intact: free some space"):
        checkpoint_files.write(little_disk, 2, big, {"step": 2})
    assert steps(little_disk) == [1] and checkpoint_files.verify(run_folder.step_folder(little_disk, 1)) is None
    assert not list((little_disk / "checkpoints").glob(".step*"))


def test_another_configs_checkpoint_is_refused_by_what_differs(tmp_path):
    first = train(small(tmp_path), quiet=True)
    other = small(tmp_path, "train.lr=0.5")
    shutil.copytree(first / "checkpoints", other.folder / "checkpoints")
    with pytest.raises(CheckpointError, match=r"train\.lr \(saved 0\.002, asked 0\.5\)"):
        train(other, quiet=True)


def test_load_model_says_what_is_there(tmp_path):
    folder = train(small(tmp_path, "train.keep=5"), quiet=True)
    assert trained_model.load_model(folder, step=3).step == 3
    raw, ema = (trained_model.load_model(folder, weights=w).model.state_dict() for w in ("raw", "ema"))
    assert any(not torch.equal(raw[k], ema[k]) for k in raw)
    for path, step, expected in ((folder, 4, "there are 3, 6"), (folder / "model.safetensors", 3, "run folder")):
        with pytest.raises(CheckpointError, match=expected):
            trained_model.load_model(path, step=step)


@pytest.mark.parametrize(
    ("name", "code"), [("manifest.json", errno.ESTALE), ("state.json", errno.EIO), ("state.safetensors", errno.EACCES)]
)
def test_a_checkpoint_that_cannot_be_read_is_left_alone(tmp_path, monkeypatch, name, code):
    """One failed read (ESTALE on NFS, another user's private file) says nothing of the contents."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    before = sorted(tmp_path.rglob("*"))
    honest = Path.open

    def failing(path, *mode, **options):
        if path.name == name and "00000002" in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return honest(path, *mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing)
        expected = rf"step-00000002/{name} cannot be read or moved \({os.strerror(code)}\)"
        for call in (checkpoint_files.newest, trained_model.load_model):
            with pytest.raises(CheckpointError, match=expected):
                call(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert checkpoint_files.newest(tmp_path).name == "step-00000002"


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_not_a_new_run(tmp_path, monkeypatch):
    write(tmp_path, 1)

    def failing(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(run_folder.os, "scandir", failing)
    for call in (checkpoint_files.newest, trained_model.load_model):
        with pytest.raises(CheckpointError, match=r"checkpoints cannot be read or moved \(Permission den"):
            call(tmp_path)
    assert run_folder.saved_step(tmp_path) == 0  # a report goes on with the other runs


def test_a_checkpoint_that_lacks_what_the_run_saves_is_one_sentence(tmp_path):
    """Its manifest fits: written by another version, or edited."""
    path = train(small(tmp_path), quiet=True) / "checkpoints" / "step-00000006"
    save_tensors(path / "state.safetensors", {"x": torch.zeros(2)})
    manifest = {"format": checkpoint_files.FORMAT, "files": checkpoint_files.describe_files(path)}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="step-00000006 does not hold what this run saves"):
        train(small(tmp_path, "train.steps=8"), quiet=True)
    assert path.is_dir()


def test_a_pipe_is_not_read_as_a_checkpoint(tmp_path):
    path = write(tmp_path, 1) / "state.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"state\.safetensors cannot be .*no regular file"):
        checkpoint_files.newest(tmp_path)


def _rename(folder):
    folder.rename(folder.with_name("renamed"))


def _replace(folder):
    """Another start of the same run, in a folder of the same name."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.yaml").write_text("")
    (folder / "lock").write_text('{"pid": 1, "host": "elsewhere"}')


@pytest.mark.parametrize(
    ("change", "moment"),
    [(_rename, "step"), (shutil.rmtree, "last evaluation"), (_replace, "save"), (_rename, "signal")],
)
def test_a_run_folder_that_is_gone_ends_the_run_with_an_error_and_is_not_made_again(
    change, moment, tmp_path, monkeypatch, capsys
):
    config = small(tmp_path, "train.sample_every=3", "train.log_every=1")
    target, name, at = {
        "step": (TrainingStep, "run", 1),
        "signal": (TrainingStep, "run", 1),
        "last evaluation": (evaluation.Evaluation, "_samples", 2),
        "save": (checkpoint_files, "save_tensors", 1),
    }[moment]
    honest, calls = getattr(target, name), []

    def spoil(*arguments, **options):
        calls.append(name)
        if len(calls) == at:
            change(config.folder)
            if moment == "signal":
                monkeypatch.setattr(signals.STATE, "reason", "SIGTERM")
        return honest(*arguments, **options)

    monkeypatch.setattr(target, name, spoil)
    assert run_command(lambda _: train(config, quiet=True) and 0, []) == 2
    error = capsys.readouterr().err
    assert "was deleted, renamed or replaced while" in error and error.count("\n") == 1
    left = {path.name for path in config.folder.glob("*")}
    assert left <= ({"config.yaml", "lock"} if change is _replace else set())
