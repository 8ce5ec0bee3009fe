"""`train.graphs`: what a graph replays learns what the plain step learns.

Off the GPU "replaying" runs the recorded body again: on the same buffers, with the same route.
"""

import pytest
import torch

from experiments.components import make_accelerator
from experiments.config.compose import load
from experiments.options.roles import ConfigError
from experiments.runtime import run_folder
from experiments.training import cuda_graphs
from experiments.training.build import build_step
from routing.errors import UserError

TINY = ["data=digits", "backbone.depth=4", "train.batch=8", "train.steps=12", "train.warmup=3", "train.schedule=cosine"]


def trained(words, steps, graphs):
    config = load([*TINY, *words])
    accelerator = make_accelerator(config)
    if graphs:
        config = load([*TINY, *words, "train.graphs=true"])
    step = build_step(config, accelerator)
    for _ in range(steps):
        step.run()
        step.state.step += 1
    return step


CASES = {
    "dense": ["backbone=dit"],
    "routed, then dense": ["backbone=dit", "route=1-2", "routing.off_after=0.5"],
    "mamba, unsorted": ["backbone=mamba", "route=1-2", "routing.selection=unsorted"],
    "muon": ["backbone=rwkv", "route=1-2", "train.optimizer=muon", "train.weight_decay=0.1"],
    "x-prediction and SRA": ["experiment=jit", "backbone=mamba", "route=1-2", "train.encoder=ema", "train.ema=0.9"],
    "rwkv, shared": ["backbone=rwkv", "route=1-2", "routing.shared=true"],
}


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_a_replay_learns_what_the_step_learns(words, monkeypatch):
    recorded = []
    monkeypatch.setattr(cuda_graphs, "record", lambda body: recorded.append(body) or body)
    monkeypatch.setattr(cuda_graphs, "run_on_side_stream", lambda body: body())
    plain, graphed = (trained(words, 12, graphs) for graphs in (False, True))
    assert len(recorded) == (2 if "routing.off_after=0.5" in words else 1)
    for a, b in zip(plain.state.params + plain.state.ema, graphed.state.params + graphed.state.ema, strict=True):
        # The rate is a float32 on the device, and a double in the plain step.
        # Muon rounds its update to bfloat16: a difference in the last bit may grow to 1/256 of a step.
        # Muon orthogonalises in bf16, which rounds differently in another order of operations.
        atol = 1e-3 if "train.optimizer=muon" in words else 1e-6
        torch.testing.assert_close(a, b, rtol=1e-4, atol=atol)
    torch.testing.assert_close(plain.state.tally, graphed.state.tally, rtol=1e-4, atol=1e-6)


def test_a_graph_goes_on_after_going_back_to_a_checkpoint(tmp_path, monkeypatch):
    """A graph refers to the tensors it was recorded with: loading a checkpoint must write into them."""
    monkeypatch.setattr(cuda_graphs, "record", lambda body: body)
    monkeypatch.setattr(cuda_graphs, "run_on_side_stream", lambda body: body())
    step = trained(CASES["dense"], 4, True)
    state, graphs = step.state, dict(step.graphs)
    recorded = [id(moment) for parameter in state.params for moment in state.optimizer.moments(parameter).values()]
    state.save(tmp_path, step.config)
    trained_once, trained_twice = [], []
    for parameters in (trained_once, trained_twice):
        state.load(run_folder.step_folder(tmp_path, 4), step.config.hashed())
        step.run()
        state.step += 1
        parameters += [parameter.detach().clone() for parameter in state.params]
    assert step.graphs == graphs and len(graphs) == 1
    assert [id(moment) for parameter in state.params for moment in state.optimizer.moments(parameter).values()] == recorded
    for a, b in zip(trained_once, trained_twice, strict=True):
        assert torch.equal(a, b)


def test_moments_that_a_checkpoint_lacks_are_zero_after_loading_it(tmp_path):
    """As before its first gradient: a parameter that a later branch trained starts afresh."""
    step = trained(CASES["dense"], 1, False)
    state, parameter = step.state, step.state.params[0]
    moments = dict(state.optimizer.moments(parameter))
    state.optimizer.moments(parameter).clear()
    state.save(tmp_path, step.config)
    state.optimizer.moments(parameter).update(moments)
    assert any(moment.any() for moment in moments.values())
    state.load(run_folder.step_folder(tmp_path, 1), step.config.hashed())
    assert not any(moment.any() for moment in state.optimizer.moments(parameter).values())


@pytest.mark.gpu
@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_a_graph_on_a_gpu_learns_what_the_step_learns(words):
    plain, graphed = (trained(words, 12, graphs) for graphs in (False, True))
    for a, b in zip(plain.state.params, graphed.state.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_has_no_graph_is_refused():
    for word in ("train.micro_batch=4", "routing.random_end=true"):
        with pytest.raises(ConfigError, match="expected train.micro_batch=null and routing.random_end=false"):
            load([*TINY, "route=1-2", "train.graphs=true", word])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="train.graphs=true: expected one process on a GPU"):
            make_accelerator(load([*TINY, "train.graphs=true"]))
