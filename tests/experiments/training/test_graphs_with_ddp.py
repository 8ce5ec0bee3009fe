"""`train.graphs=true` with several processes: on two gloo ranks, where a replay runs the recorded body, and on two GPUs."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from small import overrides, small, two_ranks
from test_cuda_graphs import CASES, TINY
from test_train_distributed import ENV, losses, torchrun

from experiments import components

SCRIPT = Path(__file__).with_name("graphs_on_ranks.py")
VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
UNTESTED = "train.graphs=true with several processes has not been tested on several GPUs"
RANKS = {
    "routed, then dense": [*CASES["routed, then dense"], "train.steps=24"],
    "two micro-batches": ["backbone=dit", "route=1-2", "train.micro_batch=2", "train.steps=24"],
}


@pytest.mark.slow
@pytest.mark.parametrize("words", RANKS.values(), ids=RANKS)
def test_two_ranks_with_graphs_learn_what_they_learn_without(words, tmp_path):
    call = two_ranks(str(SCRIPT), str(tmp_path), *TINY, *words)
    done = subprocess.run(call, capture_output=True, text=True, timeout=400, env=ENV)
    assert done.returncode == 0, done.stderr
    parameters = [load_file(tmp_path / f"{name}-{rank}.safetensors") for name in ("plain", "graphs") for rank in (0, 1)]
    for other in parameters[1:]:
        for name, value in parameters[0].items():
            torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-6)
    for rank in (0, 1):
        plain, graphs = json.loads((tmp_path / f"{rank}.json").read_text()).values()
        assert (plain["lines"], graphs["lines"]) == ([], [UNTESTED])
        assert plain["events"] == ["build DDP"]
        # DDP is built on the side stream, and each route runs eleven steps on it before its recording.
        built = ["enter", "build DDP", "leave", f"time one iteration of {2**31 - 1}"]
        routes = 2 if "routing.off_after=0.5" in words else 1
        assert graphs["events"] == [*built, *(["enter", "leave"] * 11 + ["record"]) * routes]
        # Gradients are reduced once a step, after the last micro-batch.
        assert graphs["all_reduces"] == plain["all_reduces"] and set(plain["all_reduces"]) == set(range(24))
        assert graphs["tally"] == pytest.approx(plain["tally"], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "processes", "value"), [(["train.graphs=true"], 2, "0"), (["train.graphs=true"], 1, None), ([], 2, None)]
)
def test_nccl_handles_errors_as_pytorch_asks_before_the_group_exists(words, processes, value, tmp_path, monkeypatch):
    values = []

    def create(**options):
        values.append(os.environ.get(VARIABLE))
        return SimpleNamespace(num_processes=processes, device=torch.device("cuda"))

    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(accelerate, "Accelerator", create)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(components, "process_group", lambda: SimpleNamespace(world_size=processes))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda name: None)
    components.make_accelerator(small(tmp_path, *words))
    assert values == [value]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("words", RANKS.values(), ids=RANKS)
def test_two_gpus_with_graphs_learn_what_they_learn_without(words, tmp_path):
    words = [*TINY, *words, "train.log_every=1", "train.precision=fp32", "train.tf32=false", "eval=none"]
    texts = {}
    for graphs in ("false", "true"):
        done = torchrun(*overrides(tmp_path / graphs, *words, f"train.graphs={graphs}"))
        assert done.returncode == 0, done.stderr
        texts[graphs] = done.stdout
    assert UNTESTED in texts["true"] and "CUDA graphs" not in texts["false"]
    assert "CUDA graphs off" not in texts["true"] and ", CUDA graphs" in texts["true"]
    plain, graphed = losses(tmp_path / "false"), losses(tmp_path / "true")
    assert len(plain) == 24
    for (loss, norm), (graphed_loss, graphed_norm) in zip(plain, graphed, strict=True):
        assert graphed_loss == pytest.approx(loss, rel=1e-3)
        assert graphed_norm == pytest.approx(norm, rel=1e-2)
