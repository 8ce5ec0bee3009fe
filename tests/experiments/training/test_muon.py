"""`train.optimizer=muon`: torch.optim.Muon on the blocks' matrices, AdamW on the rest."""

import pytest
import torch
from small import small
from torch import nn
from training_runs import make_run

import backbones
from experiments.training.optimizer import Muon, muon_parameters

MUON = ("route=1-2", "train.optimizer=muon", "train.muon_lr=0.003")


@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
def test_it_is_torchs_muon(shape):
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(4)]
    trained = []
    for cls in (Muon, torch.optim.Muon):
        weight = nn.Parameter(start.clone())
        optimizer = cls([weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        optimizer.found_inf = torch.zeros(())
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        trained.append((weight.detach(), optimizer.state[weight]["momentum_buffer"]))
    torch.testing.assert_close(*(weight for weight, _ in trained), rtol=1e-6, atol=1e-7)
    assert torch.equal(*(momentum for _, momentum in trained))


def test_a_bad_step_changes_neither_weights_nor_momentum():
    for bad_step in (0, 2):
        weight = nn.Parameter(torch.randn(4, 3))
        muon = Muon([weight], lr=0.1)
        for step in range(3):
            bad = step == bad_step
            before = weight.detach().clone()
            weight.grad = torch.full((4, 3), float("nan")) if bad else torch.randn(4, 3)
            muon.found_inf = torch.tensor(float(bad))
            old = muon.state[weight].get("momentum_buffer", torch.zeros(4, 3)).clone()
            muon.step()
            assert torch.equal(weight.detach(), before) is bad
            assert torch.equal(muon.state[weight]["momentum_buffer"], old) is bad
            assert torch.isfinite(weight).all()


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("family", ["dit", "mamba", "rwkv"])
def test_the_matrices_of_the_blocks_and_nothing_else(family, skips):
    learned = {"skips": True} if skips else {"fuse": "0-1", "align": {"block": 0}}
    model = backbones.create(family, "T/1", depth=2, num_classes=3, input_size=8, **learned)
    matrices = muon_parameters(model)
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        is_matrix = name.startswith("stack.blocks.") and isinstance(owner, nn.Linear) and parameter.ndim == 2
        assert (id(parameter) in matrices) is is_matrix, name
    # The blocks are most of the model, and most of a block is matrices.
    blocks = sum(p.numel() for p in model.stack.blocks.parameters())
    assert sum(p.numel() for p in model.parameters() if id(p) in matrices) > 0.85 * blocks


def test_both_rates_follow_the_warm_up_and_the_schedule(tmp_path):
    loop = make_run(small(tmp_path, *MUON, "train.lr=0.001", "train.warmup=4", "train.schedule=cosine"))
    rates = []
    for _ in range(3):
        loop.training_step.run()
        loop.state.step += 1
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in loop.state.optimizers])
    for adamw, muon in rates:
        assert muon == pytest.approx(3 * adamw)
    assert rates[0][0] == pytest.approx(0.001 / 4)
    # Without a rate of its own Muon has that of AdamW.
    loop = make_run(small(tmp_path, "train.optimizer=muon", "train.lr=0.004"))
    assert loop.state.optimizers[1].param_groups[0]["peak_lr"] == 0.004
