"""`train.graphs`: what a graph replays learns what the plain step learns.

Off the GPU "replaying" runs the recorded body again: on the same buffers, with the same route.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from experiments.components import make_accelerator
from experiments.config.compose import load
from experiments.runtime import run_folder
from experiments.training import cuda_graphs
from experiments.training.build import build_step, create_step
from experiments.training.cuda_graphs import EAGER, EAGER_WITH_DDP, GraphedTrainingStep
from experiments.training.optimizer import move_rates
from experiments.training.step import TrainingStep
from routing.errors import UserError

TINY = ["data=digits", "backbone.depth=4", "backbone.width=32", "train.batch=8"]
TINY += ["train.steps=12", "train.warmup=3", "train.schedule=cosine"]


def built(words, graphs, say=print):
    config = load([*TINY, *words, f"train.graphs={str(graphs).lower()}"])
    return build_step(config, make_accelerator(config), say=say)


def fail_to_record(body, stream):
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def take_steps(step, count):
    for _ in range(count):
        step.run()
        step.state.step += 1
    return step


def trained(words, steps, graphs):
    return take_steps(built(words, graphs), steps)


@pytest.fixture
def stand_in(monkeypatch):
    """Off the GPU a replay runs the recorded body again; returns the bodies that were recorded."""
    recorded = []
    monkeypatch.setattr(cuda_graphs, "record", lambda body, stream: recorded.append(body) or body)
    monkeypatch.setattr(cuda_graphs, "create_side_stream", lambda: None)
    monkeypatch.setattr(cuda_graphs, "on_side_stream", contextlib.nullcontext)
    return recorded


def assert_same_weights(plain, graphed, atol=1e-6):
    for a, b in zip(plain.state.params + plain.state.ema, graphed.state.params + graphed.state.ema, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=atol)


CASES = {
    "dense": ["backbone=dit"],
    "routed, then dense": ["backbone=dit", "route=1-2", "routing.off_after=0.5"],
    "mamba, unsorted": ["backbone=mamba", "route=1-2", "routing.selection=unsorted"],
    "muon": ["backbone=rwkv", "route=1-2", "train.optimizer=muon", "train.weight_decay=0.1"],
    "class tokens and SRA's smooth L1": [
        "experiment=jit", "route=1-2", "train.encoder=ema", "train.ema=0.9", "train.align_loss=smooth_l1",
        "backbone.context_tokens=4", "backbone.context_start=2",
    ],
    "three micro-batches": ["backbone=dit", "route=1-2", "train.micro_batch=3", "routing.shared=true"],
}  # fmt: skip


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_a_replay_learns_what_the_step_learns(words, stand_in):
    plain, graphed = (built(words, graphs) for graphs in (False, True))
    # The rate of a graph is a float32 on the device and a double otherwise. Muon, which rounds to
    # bfloat16, may turn a difference in the last bit into one as large as a step: so the same rate for both.
    move_rates(plain.state.optimizers, plain.device)
    take_steps(plain, 12), take_steps(graphed, 12)
    assert len(stand_in) == (2 if "routing.off_after=0.5" in words else 1)
    assert_same_weights(plain, graphed)
    torch.testing.assert_close(plain.state.tally.values, graphed.state.tally.values, rtol=1e-4, atol=1e-6)


def test_a_graph_goes_on_after_going_back_to_a_checkpoint(tmp_path, stand_in):
    """A graph refers to the tensors it was recorded with: loading a checkpoint must write into them."""
    step = trained(CASES["dense"], 4, True)
    state, graph = step.state, step.graph
    recorded = [id(moment) for parameter in state.params for moment in state.moments(parameter).values()]
    state.save(tmp_path, step.config)
    trained_once, trained_twice = [], []
    for parameters in (trained_once, trained_twice):
        state.load(run_folder.step_folder(tmp_path, 4), step.config)
        step.run()
        state.step += 1
        parameters += [parameter.detach().clone() for parameter in state.params]
    assert step.graph is graph and len(stand_in) == 1
    assert [id(moment) for parameter in state.params for moment in state.moments(parameter).values()] == recorded
    for a, b in zip(trained_once, trained_twice, strict=True):
        assert torch.equal(a, b)


def test_moments_that_a_checkpoint_lacks_are_zero_after_loading_it(tmp_path):
    """As before its first gradient: a parameter that a later branch trained starts afresh."""
    step = trained(CASES["dense"], 1, False)
    state, parameter = step.state, step.state.params[0]
    moments = dict(state.moments(parameter))
    state.moments(parameter).clear()
    state.save(tmp_path, step.config)
    state.moments(parameter).update(moments)
    assert any(moment.any() for moment in moments.values())
    state.load(run_folder.step_folder(tmp_path, 1), step.config)
    assert not any(moment.any() for moment in state.moments(parameter).values())


@pytest.mark.gpu
@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_a_graph_on_a_gpu_learns_what_the_step_learns(words):
    plain, graphed = (trained(words, 12, graphs) for graphs in (False, True))
    assert_same_weights(plain, graphed, atol=1e-5)


def test_an_evaluation_between_replays_changes_nothing(stand_in):
    """The EMA weights are swapped in and out in place, and the graph gives its memory back."""
    plain, graphed = (trained(CASES["routed, then dense"], 5, graphs) for graphs in (False, True))
    for step in (plain, graphed):
        step.release()
        with step.state.ema_weights() as model, torch.no_grad():
            model(torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    assert graphed.graph is None
    take_steps(plain, 7), take_steps(graphed, 7)
    # 5 routed steps, an evaluation, one routed step and 6 dense ones: too few to record the first route again.
    assert len(stand_in) == 2
    assert_same_weights(plain, graphed)


def test_a_step_that_cannot_be_recorded_runs_without_and_says_so_once(monkeypatch, stand_in):
    lines = []
    plain, graphed = built(CASES["dense"], False), built(CASES["dense"], True, lines.append)

    def fail(body, stream):
        for parameter in graphed.state.params:  # a recording leaves gradients without numbers
            parameter.grad = torch.full_like(parameter, 1e3)
        fail_to_record(body, stream)

    monkeypatch.setattr(cuda_graphs, "record", fail)
    take_steps(plain, EAGER + 5), take_steps(graphed, EAGER + 5)
    assert lines == [
        "CUDA graphs off: this step cannot be recorded (operation not permitted when stream is capturing more)"
    ]
    assert graphed.graph is None and not graphed.recordable
    assert_same_weights(plain, graphed)


def test_a_recording_that_fails_with_several_processes_is_one_sentence(monkeypatch, stand_in):
    """DDP cannot go on after it: it would wait for the gradients of the recording."""
    lines = []
    step = built(CASES["dense"], True, lines.append)
    step.distributed = True
    monkeypatch.setattr(cuda_graphs, "record", fail_to_record)
    take_steps(step, EAGER_WITH_DDP)
    with pytest.raises(
        UserError, match=r"cannot be recorded \(operation not permitted .*more\); type train.graphs=false"
    ):
        step.run()
    assert lines == []


@pytest.mark.parametrize(
    ("device", "processes", "words", "is_graphed", "line"),
    [
        ("cpu", 1, [], False, None),
        ("cuda", 1, [], True, None),
        ("cuda", 1, ["route=1-2/0.5:none"], True, None),
        ("cuda", 1, ["route=1-2", "routing.schedule=steps:1@0+0.5@0.3+1@0.6"], True, None),
        ("cuda", 1, ["train.graphs=false"], False, None),
        ("cuda", 2, [], False, "2 processes"),
        ("cuda", 2, ["train.graphs=true"], True, "not been tested on several GPUs"),
        ("cuda", 1, ["route=1-2", "routing.random_end=true"], False, "routing.random_end=true"),
        ("cuda", 1, ["route=1-2", "routing.schedule=linear:1:0"], False, "more than 8 routes"),
        ("cuda", 1, ["route=1-2", "routing.schedule=linear:1:0", "train.graphs=true"], False, "more than 8 routes"),
    ],
)
def test_which_runs_use_graphs(device, processes, words, is_graphed, line, monkeypatch, stand_in):
    monkeypatch.setattr(TrainingStep, "__init__", lambda self, *args: vars(self).update(state=args[3], device=device))
    config = load([*TINY, "train.steps=1000", *words])
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
    lines = []
    step = create_step(config, accelerator, None, SimpleNamespace(optimizers=[]), "fp32", lines.append)
    assert isinstance(step, GraphedTrainingStep) == is_graphed
    assert len(lines) == (line is not None) and all(line in text for text in lines)
