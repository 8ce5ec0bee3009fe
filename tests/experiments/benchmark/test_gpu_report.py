"""`make gpu`: refuses without a GPU; with a (fake) one it writes a whole page, failures included."""

import json

import pytest
import torch

from experiments.benchmark import bench_options, gpu_report, step_times
from experiments.runtime.command import run_command

FAKE = [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30, "capability": "9.0"}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_sentence(capsys):
    assert run_command(gpu_report.main, []) == 2
    error = capsys.readouterr().err
    assert "sees no CUDA device" in error and error.count("\n") == 1


@pytest.mark.parametrize("word", ["sizes=S/2", "size=Q/2", "steps=many", "steps=0", "tests=no", "nonsense"])
def test_wrong_words_are_refused_first(word, capsys):
    assert run_command(gpu_report.main, [word]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "CUDA" not in error


@pytest.mark.slow
def test_a_listed_device_gets_its_page(tmp_path, monkeypatch, capsys):
    """The listing is fake, and the machine a CPU: what needs CUDA fails, and the page says so."""
    monkeypatch.setattr(gpu_report, "devices", lambda: FAKE)
    monkeypatch.setattr(gpu_report, "run_tests", lambda: {"rc": 0, "last": "9 passed in 3 s", "failed": []})
    monkeypatch.setattr(gpu_report, "_SAMPLES", ((10**6, 2),))
    tiny = ["data=digits", "route=1-1", "eval=none", "backbone.depth=3", "train.batch=4", "sampler.steps=1"]
    monkeypatch.setattr(gpu_report, "_TRAINING", tiny)
    monkeypatch.setattr(gpu_report, "BACKBONES", ("dit", "rwkv"))
    monkeypatch.setattr(
        gpu_report,
        "_VARIANTS",
        {
            "plain": ["depth=3", "route=1-1", "tokens=16", "plain=false"],
            "broken": ["depth=3", "route=9-9", "tokens=16", "plain=false"],
        },
    )
    monkeypatch.setattr(step_times, "peak", lambda *a: (lambda: torch.mm(torch.ones(8, 8), torch.ones(8, 8)), 1024))
    code = run_command(gpu_report.main, [f"out={tmp_path}", "size=T/2", "steps=2"])
    said = capsys.readouterr().out
    page = (tmp_path / "nvidia-h100-80gb-hbm3.md").read_text()
    found = json.loads((tmp_path / "nvidia-h100-80gb-hbm3.json").read_text())
    assert code == 1 and "written:" in said
    assert "9 passed" in page and "80 GiB, compute capability 9.0" in page
    *plain, broken, _ = found["steps"]
    assert [row["backbone"] for entry in plain for row in entry["rows"]] == ["dit", "dit", "rwkv", "rwkv"]
    assert "of allowed" in page and "rwkv-T/2" in page
    assert "RouteError" in broken["error"] and f"dit failed: {broken['error']}" in page
    assert "loss" in page and found["training"][0]["last"]["step"] == 2


@pytest.mark.slow
def test_the_batch_is_halved_until_it_fits(monkeypatch):
    asked = []

    def measure(o: bench_options.BenchOptions, *_):
        asked.append(o.batch)
        if o.batch > 8:
            raise torch.cuda.OutOfMemoryError
        return [{"backbone": "dit"}]

    monkeypatch.setattr(step_times, "measure", measure)
    found = gpu_report.time_steps("XL/2", "mamba", [], torch.device("cpu"))
    assert asked == [32, 16, 8] and found["batch"] == 8


def test_a_failure_without_a_message_is_written_down_too(monkeypatch):
    def measure(*_):
        raise AssertionError

    monkeypatch.setattr(step_times, "measure", measure)
    found = gpu_report.time_steps("T/2", "dit", [], torch.device("cpu"))
    assert found == {"error": "AssertionError: no message"}
