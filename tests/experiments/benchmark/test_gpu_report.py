"""`make gpu`: refuses without a GPU; with a (fake) one it writes a whole page, failures included."""

import time

import pytest
import torch

from experiments.benchmark import gpu_report
from experiments.benchmark.bench_options import BenchOptions, parse
from experiments.config.compose import load
from experiments.runtime.command import run_command

FAKE = [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30, "capability": "9.0"}]


def test_without_a_gpu_and_with_wrong_words_it_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cases = {"": "sees no CUDA device", "sizes=S/2": "did you mean size", "part=4": "part=4", "nonsense": "key=value"}
    for word, message in cases.items():
        assert run_command(gpu_report.main, [word] if word else []) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


ENVIRONMENT = {"packages": {"torch": "2.15"}, "python": "3.11", "git": "abc"}
PASSED = {"rc": 0, "stopped": False, "seconds": 3.0, "output": ["of allowed 95%"]}


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A listed device, a commit, and commands that pass; returns the commands that were run."""
    commands = []

    def run(words, seconds):
        commands.append(list(words))
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / "steps.json").write_text('{"steps": []}')
        return dict(PASSED)

    monkeypatch.setattr(gpu_report, "devices", lambda: FAKE)
    monkeypatch.setattr(gpu_report, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(gpu_report, "run", run)
    return commands


def call(tmp_path, *words):
    code = run_command(gpu_report.main, [f"out={tmp_path}", *words])
    page = (tmp_path / "nvidia-h100-80gb-hbm3.md").read_text()
    missing = page.split("## Never run to the end")[1].split("\n## ")[0]
    return code, page, missing


def test_the_page_has_every_part_and_what_was_never_run(fake, tmp_path, monkeypatch):
    counts = []
    for part in gpu_report.PARTS:
        code, page, missing = call(tmp_path, f"part={part}")
        assert code == 0
        counts.append((len(fake), *(missing.count(f"gpu-{other}") for other in gpu_report.PARTS)))
    assert counts == [(7, 0, 9, 12), (7 + 9, 0, 0, 12), (7 + 9 + 12, 0, 0, 0)]
    assert all(f"## {title}" in page for title in gpu_report.PARTS.values()), "those of other calls are kept"
    assert missing.strip() == "- CUDA graphs with several processes: the tests need two GPUs"
    monkeypatch.setattr(gpu_report, "devices", lambda: FAKE * 2)
    assert call(tmp_path, "part=1")[2].strip() == ""


def test_every_planned_command_is_accepted_and_the_study_is_paired_by_seed():
    words = [m.words for part in gpu_report.PARTS for m in gpu_report.plan(part, gpu_report.ReportOptions())]
    studied = []
    for script, *arguments in words:
        if script == "experiments/bench.py":
            parse([*arguments, "batch=1"], BenchOptions)
        elif script == "experiments/run.py":
            config = load(arguments)
            studied.append((config.train.steps, config.seed, config.route))
    pairs = [(20_000, seed, route) for seed in range(5) for route in ("none", "2-8")]
    assert studied == [(50, 0, "none"), (50, 0, "2-8"), *pairs]


def test_an_interrupted_part_leaves_a_whole_page_and_goes_on(fake, tmp_path, monkeypatch):
    run, measurements = gpu_report.run, gpu_report.plan(1, gpu_report.ReportOptions(out=str(tmp_path)))

    def interrupted(words, seconds):
        if len(fake) == 2:
            raise KeyboardInterrupt
        return run(words, seconds)

    monkeypatch.setattr(gpu_report, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu_report.main([f"out={tmp_path}", "part=1"])
    page = (tmp_path / "nvidia-h100-80gb-hbm3.md").read_text()
    assert page.count("passed, 3 s") == 2 and page.count("was interrupted") == 1
    for measurement in measurements[2:]:
        assert f"- {measurement.title} (`make gpu-1`): `python {' '.join(measurement.words)}`" in page
    assert page.count("(`make gpu-1`)") == 5
    monkeypatch.setattr(gpu_report, "run", run)
    code, page, missing = call(tmp_path, "part=1")
    assert code == 0 and len(fake) == 7, "what had passed is not measured again"
    assert "gpu-1" not in missing and "was interrupted" not in page and page.count("passed, 3 s") == 7


def test_failures_and_what_was_stopped_are_listed(fake, tmp_path, monkeypatch):
    results = iter([PASSED | {"rc": 1, "output": ["bad"]}, PASSED | {"rc": 143, "stopped": True, "seconds": 560.0}])
    monkeypatch.setattr(gpu_report, "run", lambda words, seconds: next(results, PASSED))
    code, page, missing = call(tmp_path, "part=3", "pairs=1")
    assert code == 1
    assert "failed (exit code 1), 3 s" in page and "bad" in page and "was stopped by the time limit after 560 s" in page
    assert missing.count("gpu-3") == 1 and "route=2-8 train.steps=50" in missing


def test_a_part_begins_nothing_after_its_time(fake, tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 200))
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: next(clock))
    seconds = []
    monkeypatch.setattr(gpu_report, "run", lambda words, limit: seconds.append(limit) or dict(PASSED))
    code, page, missing = call(tmp_path, "part=3")
    # The part ends at 580 s: a command begins at 200 s and gets what is left at 400 s.
    assert code == 1 and seconds == [180.0] and missing.count("gpu-3") == 11


def test_a_command_is_stopped_in_time_and_its_children_too(monkeypatch):
    monkeypatch.setattr(gpu_report, "STOP_S", 0.5)
    script = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('began', flush=True);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    )
    start = time.monotonic()
    result = gpu_report.run(["-c", script], 3)
    assert result["stopped"] and result["rc"] == -9 and result["output"] == ["began"]
    # A child that outlives its command keeps the pipes open.
    script = "import subprocess, sys; print(1); subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    result = gpu_report.run(["-c", script], 3)
    assert (result["rc"], result["stopped"], result["output"]) == (0, False, ["1"])
    assert time.monotonic() - start < 30


def test_the_batch_is_halved_until_it_fits(monkeypatch, tmp_path):
    asked, out = [], tmp_path / "steps.json"
    out.write_text('{"steps": [1]}')

    def run(words, seconds):
        asked.append(int(words[-2].removeprefix("batch=")))
        if asked[-1] > 8:
            return {"rc": 1, "output": ["", "torch.OutOfMemoryError: CUDA out of memory."]}
        return {"rc": 0, "output": []}

    monkeypatch.setattr(gpu_report, "run", run)
    measurement = gpu_report.GpuMeasurement("steps", ("bench",), "XL/2")
    result = gpu_report.time_steps(measurement, time.monotonic() + 9, out)
    assert result == {"rc": 0, "output": [], "rows": [1], "words": ["bench", "batch=8"]}
    assert asked == [32, 16, 8]
