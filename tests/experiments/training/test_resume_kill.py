"""Real processes, killed with SIGKILL at random moments, end bit for bit where an undisturbed one ends."""

import json
import random
import signal
import subprocess
import time

import pytest
from safetensors.torch import load_file
from small import command, overrides, run

from experiments.runtime import records, run_folder

# Saves, pictures and scores often, so that kills land in the middle of each of them too.
BUSY = (
    "route=1-2", "train.steps=24", "train.save_every=2", "train.sample_every=4", "train.final_samples=true",
    "train.log_every=1", "eval=digits", "eval.every=8", "eval.samples=80", "eval.batch=40", "eval.metrics=[fd,accuracy]",
)  # fmt: skip


def arguments(runs, cache, backbone):
    return overrides(runs, *BUSY, f"backbone={backbone}", f"paths.cache={cache}")


def folder_of(runs):
    (folder,) = runs.iterdir()
    return folder


def start_and_kill(call, runs, after):
    """Start the command, kill it `after` seconds into training; return whether it finished before."""
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        began = time.time()
        while process.poll() is None and not alive_in(runs, process.pid):
            assert time.time() - began < 120, "never started"
            time.sleep(0.02)
        process.wait(timeout=after)
        assert process.returncode == 0, process.stderr.read().decode()
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return False
    finally:
        process.stderr.close()


def alive_in(runs, pid):
    return any(run_folder.read(path).get("pid") == pid for path in runs.glob("*/status.json"))


def results(runs):
    """Everything a run leaves that must not depend on where it was killed."""
    folder = folder_of(runs)
    weights = load_file(folder / "model.safetensors")
    (last,) = sorted((folder / "checkpoints").glob("step-00000024"))
    state = load_file(last / "state.safetensors")
    clock = ("time", "images_per_s", "seconds", "samples_per_s")
    lines = [[{k: v for k, v in e.items() if k not in clock} for e in records.read_jsonl(folder / name)]
             for name in ("metrics.jsonl", "scores.jsonl")]  # fmt: skip
    # Temporary files of killed writers are hidden; `atomic_path` removes them after a day.
    pictures = {p.name: p.read_bytes() for p in sorted((folder / "samples").glob("[!.]*.png"))}
    tensors = [{k: v.numpy().tobytes() for k, v in tensors.items()} for tensors in (weights, state)]
    return {"lines": lines, "pictures": pictures, "tensors": tensors, "gif": (folder / "progress.gif").read_bytes()}


def disturbed_equals_undisturbed(tmp_path, backbone, kills, seed):
    cache = tmp_path / "cache"
    straight = tmp_path / "straight"
    done = run(*arguments(straight, cache, backbone))
    assert done.returncode == 0, done.stderr
    expected, moments = results(straight), random.Random(seed)
    # From where it can be told that it lives: Python's start is no part of what is disturbed.
    length = folder_of(straight).joinpath("summary.json").stat().st_mtime
    length -= folder_of(straight).joinpath("config.yaml").stat().st_mtime
    left, attempt = kills, 0
    while left:
        runs = tmp_path / f"killed-{attempt}"
        attempt += 1
        call = command(*arguments(runs, cache, backbone))
        runs.mkdir()
        while not start_and_kill(call, runs, moments.uniform(0, length * 0.8) if left else 600):
            left -= 1
        found = results(runs)
        for part in expected:
            assert found[part] == expected[part], f"{part} differ after kills (seed {seed}, attempt {attempt})"


@pytest.mark.slow
def test_three_kills(tmp_path):
    disturbed_equals_undisturbed(tmp_path, "mamba", kills=3, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("backbone", ["dit", "mamba", "rwkv"])
def test_fifty_kills(backbone, tmp_path):
    disturbed_equals_undisturbed(tmp_path, backbone, kills=50, seed=2)


@pytest.mark.slow
def test_a_second_process_is_refused_and_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    words = overrides(tmp_path, "train.steps=100000", "train.save_every=100000")
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not alive_in(tmp_path, process.pid):
        time.sleep(0.05)
    second = run(*words)
    assert second.returncode == 2 and len(second.stderr.strip().splitlines()) == 1
    assert f"process {process.pid} on" in second.stderr
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "saved step" in errors and "run the same command again to resume" in errors
    folder = folder_of(tmp_path)
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "stopped" and status["step"] > 0
    assert (folder / "checkpoints" / f"step-{status['step']:08d}" / "manifest.json").is_file()
