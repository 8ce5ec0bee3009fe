"""`make gpu`: refuses without a GPU; with a (fake) one it writes a whole page, failures included."""

import json

import pytest
import torch

from experiments.benchmark import gpu_report
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
    """The listing is fake, and the machine a CPU: a variant fails, and the page says so."""
    monkeypatch.setattr(gpu_report, "devices", lambda: FAKE)
    monkeypatch.setattr(gpu_report, "_SAMPLES", ((10**6, 2),))
    tiny = ["data=digits", "route=1-1", "eval=none", "backbone.depth=3", "train.batch=4", "sampler.steps=1"]
    monkeypatch.setattr(gpu_report, "_TRAINING", ["experiments/run.py", *tiny])
    monkeypatch.setattr(gpu_report, "BACKBONES", ("dit", "rwkv"))
    monkeypatch.setattr(gpu_report, "_STEPS", ["experiments/bench.py", "parts=steps", "device=cpu", "rounds=1"])
    monkeypatch.setattr(
        gpu_report,
        "_VARIANTS",
        {
            "plain": ["depth=3", "route=1-1", "tokens=16", "plain=false"],
            "broken": ["depth=3", "route=9-9", "tokens=16", "plain=false"],
        },
    )
    code = run_command(gpu_report.main, [f"out={tmp_path}", "size=T/2", "steps=2", "tests=false"])
    said = capsys.readouterr().out
    page = (tmp_path / "nvidia-h100-80gb-hbm3.md").read_text()
    found = json.loads((tmp_path / "nvidia-h100-80gb-hbm3.json").read_text())
    assert code == 1 and "written:" in said
    assert "80 GiB, compute capability 9.0" in page
    parts = {title: [p for p in found["parts"] if p["title"] == title] for title in dict.fromkeys(p["title"] for p in found["parts"])}
    plain, broken, training = parts.values()
    assert [row["backbone"] for part in plain for row in part["rows"]] == ["dit", "dit", "rwkv", "rwkv"]
    assert "of allowed" in page and "rwkv-T/2" in page
    assert all(part["rc"] == 2 and "route 9-9" in part["output"][-1] for part in broken)
    assert "failed (exit code 2)" in page
    assert all(part["rc"] == 0 and "images per second" in "".join(part["output"]) for part in training)


def test_the_batch_is_halved_until_it_fits(monkeypatch, tmp_path):
    asked, out = [], tmp_path / "steps.json"
    out.write_text('{"steps": [1]}')

    def run(title, words):
        batch = next(int(word.removeprefix("batch=")) for word in words if word.startswith("batch="))
        asked.append(batch)
        return {"rc": int(batch > 8), "output": ["", "torch.OutOfMemoryError: CUDA out of memory."] if batch > 8 else []}

    monkeypatch.setattr(gpu_report, "run", run)
    assert gpu_report.time_steps("steps", [], "XL/2", out) == {"rc": 0, "output": [], "rows": [1]}
    assert asked == [32, 16, 8]
