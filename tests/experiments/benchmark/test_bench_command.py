"""The benchmark: its keys, its arithmetic, and one small run of all of it. No assertion about time."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from analysis.tables import make
from experiments import bench
from experiments.benchmark import step_times
from experiments.benchmark.bench_options import BenchOptions, parse
from experiments.benchmark.step_times import Case, interleave, kept_bytes, make_step, ratio
from experiments.runtime.command import run_command
from experiments.training.cuda_graphs import EAGER
from routing import Route

CPU = torch.device("cpu")
SMALL = ("size=T/2", "tokens=16", "depth=4", "route=1-2", "batch=2", "rounds=2")


# --- keys


def test_words_become_options():
    words = ["backbone=dit,rwkv", "rate=0.5,0.75", "depth=3", "plain=false", "threads=null"]
    expected = BenchOptions(backbone=("dit", "rwkv"), rate=(0.5, 0.75), depth=3, plain=False, threads=None)
    assert parse(words, BenchOptions) == expected
    # To YAML 010 is eight, and 5e-1 a word.
    assert parse(["rate=5e-1", "batch=010", "depth=none"], BenchOptions) == BenchOptions(rate=(0.5,), batch=10)


# --- arithmetic


def test_ratios_are_medians_within_rounds():
    timed = np.array([[2.0, 30.0, 4.0], [1.0, 10.0, 4.0]])
    assert ratio(timed[0], timed[1]) == 2.0
    assert ratio(10.0 / timed[1], np.array([10.0, 1.0, 5.0])) == 1.0


def test_variants_run_equally_often_in_rotating_order(monkeypatch):
    monkeypatch.setattr(step_times, "peak", lambda *a: (lambda: None, 1))
    seen = []
    runs = [lambda i=i: seen.append(i) for i in range(3)]
    seconds, peaks = interleave(runs, BenchOptions(rounds=3), CPU)
    assert seen == [0, 0, 1, 1, 2, 2, 0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert seconds.shape == (3, 3) and peaks.shape == (3,) and (seconds > 0).all()
    seen.clear()
    interleave(runs[:1], BenchOptions(rounds=1, graphs=True), CPU)
    assert len(seen) == EAGER + 1 + 1  # no recording is timed


def test_kept_bytes_counts_each_storage_once_and_no_parameter():
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    assert kept_bytes(lambda: layer(x), layer) == 4 * 8 * 4
    assert kept_bytes(lambda: layer(x) * layer(x), layer) == 3 * 4 * 8 * 4


# --- the comparison


def test_the_plain_model_is_a_dit_of_the_same_size_that_routes_the_same_share():
    o = BenchOptions(depth=4, batch=2)
    for route, tokens in (("1-2@0.75", [16, 4, 4, 16]), ("0-1@0.5+2-2@0.75", [8, 8, 4, 16])):
        case = Case("plain", "T/2", 16, Route.parse(route), 0.75)
        step, seen = make_step(case, o, CPU), []
        for block in step.model.blocks:
            block.register_forward_hook(lambda m, a, y, seen=seen: seen.append(y.shape[1]))
        step.loss()
        assert seen == tokens == [*case.cost(4).tokens]
    ours = make_step(Case("dit", "T/2", 16, Route(()), 0.0), o, CPU)
    assert sum(p.numel() for p in ours.params) == sum(p.numel() for p in step.params)


@pytest.mark.parametrize("name", ["dit", "plain"])
def test_a_step_moves_every_weight_and_the_average(name):
    step = make_step(Case(name, "T/2", 16, Route.parse("1-2"), 0.5), BenchOptions(depth=4, batch=2), CPU)
    before = [p.detach().clone() for p in step.params]
    step(), step()
    assert not any(torch.equal(p, b) for p, b in zip(step.params, before, strict=True))
    # An average of 1e-4 of a step of 1e-4 is below float32's grain where weights are near 1.
    assert sum(not torch.equal(a, b) for a, b in zip(step.ema, before, strict=True)) > len(before) / 2


def test_the_plain_step_is_a_variant_of_dit_alone_and_compared_within_rounds(monkeypatch):
    seconds = np.array([[2.0, 4.0], [1.0, 2.0], [3.0, 12.0], [4.0, 8.0]])
    made = []

    def make(case, o, device):
        made.append((case.backbone, o.compile))
        step = Mock()
        step.model.describe.return_value = []  # of its kernels
        return step

    monkeypatch.setattr(step_times, "Step", make)
    monkeypatch.setattr(step_times, "make_step", make)
    monkeypatch.setattr(step_times, "interleave", lambda runs, o, device: (seconds[: len(runs)], None))
    variants = ("compiled", "plain", "plain+compiled")
    o = BenchOptions(backbone=("dit", "mamba"), depth=4, route="none", variants=variants)
    dit, mamba = step_times.compare(o, "T/2", 16, CPU)
    assert made == [
        ("dit", "none"), ("dit", "blocks"), ("plain", "none"), ("plain", "blocks"),
        ("mamba", "none"), ("mamba", "blocks"),
    ]  # fmt: skip
    assert mamba["faster"] == {"compiled": 2.0} and mamba["over_plain"] == {}
    # Theirs over ours in each round: 3/2 and 12/4, 4/2 and 8/4, 4/1 and 8/2.
    assert dit["over_plain"] == {"eager": 2.25, "eager, theirs compiled": 2.0, "both compiled": 4.0}


# --- a small run of everything


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_the_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step_times, "peak", lambda *a: (lambda: torch.mm(torch.ones(8, 8), torch.ones(8, 8)), 1024))
    out = tmp_path / "deep" / "bench.json"
    assert run_command(bench.main, ["device=cpu", *SMALL, f"out={out}"]) == 0
    text = capsys.readouterr().out
    assert "of allowed" in text and "ours over plain dit, route 1-2" in text and str(out) in text
    figures = json.loads(out.read_text())
    assert len(figures["steps"]) == 8 and figures["environment"]["torch"] == torch.__version__
    for row in figures["steps"]:
        assert row["seconds"] > 0 and row["memory_bytes"] > 0 and len(row["rounds"]) == 2
        assert bool(row["kernels"]) == (row["backbone"] != "plain")
        assert ("speedup" in row) == (row["route"] != "none")
    table = make("benchmark", out.parent)
    assert {"dit-T/2, 16 tokens, dense"} < {row.entries[0].text for row in table.rows}
    assert len(table.notes) == 1  # none on a file that cannot be read


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["true", "false"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_command_on_a_gpu(tmp_path, graphs, precision):
    words = ["device=cuda", f"graphs={graphs}", f"precision={precision}", f"out={tmp_path / 'f.json'}"]
    assert run_command(bench.main, [*SMALL, *words]) == 0
