"""train.precision=auto: settled once, by measuring; the same run as with the precision typed."""

import json

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from small import small

import backbones
from experiments.data.dataset import Batch
from experiments.diffusion import create_objective
from experiments.runtime.memory import MemoryLimit
from experiments.runtime.option_types import ConfigError
from experiments.training import build, session
from experiments.training.loss import training_loss
from experiments.training.session import train
from routing import Route, Routing, rng


@pytest.mark.slow
def test_auto_is_the_run_of_the_precision_that_it_takes_and_goes_on_in_it(
    tmp_path, monkeypatch, capsys
):
    folder = train(small(tmp_path / "a", "train.precision=auto", "train.steps=2"))
    said = capsys.readouterr().out
    found = json.loads((folder / "precision.json").read_text())
    took = found["precision"]
    assert took == ("bf16" if found["bf16_speed"] > 1.05 else "fp32")
    assert f"precision   {took}: bf16 is {found['bf16_speed']:.2f} times as fast" in said
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["precision"] == took
    typed = train(small(tmp_path / "b", f"train.precision={took}", "train.steps=2"), quiet=True)
    assert typed.name == folder.name
    one, other = (load_file(path / "model.safetensors") for path in (folder, typed))
    assert all(torch.equal(one[key], other[key]) for key in one)
    # Another machine measures something else: nothing is measured again.
    monkeypatch.setattr(session, "bf16_speed", lambda *given: 1 / found["bf16_speed"])
    assert train(small(tmp_path / "a", "train.precision=auto", "train.steps=4")) == folder
    assert json.loads((folder / "summary.json").read_text())["step"] == 4
    assert f"precision   {took}: settled by an earlier start" in capsys.readouterr().out


@pytest.mark.parametrize(("ratio", "took"), [(1.3, "bf16"), (1.02, "fp32"), (0.5, "fp32")])
def test_bf16_has_to_gain_something(tmp_path, monkeypatch, ratio, took):
    monkeypatch.setattr(session, "bf16_speed", lambda *given: ratio)
    config = session.settled(small(tmp_path, "train.precision=auto"), quiet=True)
    assert config.train.precision == took
    assert [p.name for p in tmp_path.glob("*/precision.json")] == ["precision.json"]
    assert (config.folder / "precision.json").exists()


def test_the_slower_precision_measures_slower(tmp_path, monkeypatch):
    """Each timed pass runs in its own precision: a loss that idles under autocast makes it slow."""
    import time

    honest = session.Trainer.loss_of

    def idle(self, *given):
        time.sleep(0.3 if self.config.train.precision == "bf16" else 0)
        return honest(self, *given)

    monkeypatch.setattr(session.Trainer, "loss_of", idle)
    config = session.settled(small(tmp_path, "train.precision=auto"), quiet=True)
    assert config.train.precision == "fp32"


def test_a_batch_that_fits_nowhere_is_one_sentence_while_precisions_are_timed(tmp_path, monkeypatch):
    def grows(*_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(session.Trainer, "loss_of", grows)
    with pytest.raises(MemoryLimit, match="8 samples at once: type train.micro_batch=4 "):
        session.settled(small(tmp_path, "train.precision=auto"), quiet=True)


def test_a_run_that_is_only_named_says_what_to_type(tmp_path):
    config = small(tmp_path, "train.precision=auto")
    for name in ("name", "folder", "hash"):
        with pytest.raises(ConfigError, match="type train.precision=fp32 or bf16"):
            getattr(config, name)
    assert build.make_accelerator(config).num_processes == 1


def test_the_precision_of_accelerates_own_configuration_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState._reset_state()
    assert build.make_accelerator(small(tmp_path)).mixed_precision == "no"


@pytest.mark.parametrize("objective", ["edm", "flow", "ddpm"])
@pytest.mark.parametrize("backbone", ["dit", "mamba", "rwkv"])
def test_a_float64_model_trains(tmp_path, backbone, objective):
    """Its loss and gradients are those of the float32 model to float32's precision."""
    config = small(tmp_path, f"backbone={backbone}")
    index = torch.arange(4)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = backbones.create(backbone, "T/2", depth=2, width=32, input_size=8, in_channels=1)
        with torch.no_grad():
            for parameter in model.parameters():  # the zeros of gates and head hide the rest
                parameter += 0.1 * torch.randn_like(parameter)
        model.to(dtype)
        draws = rng.Draws(0, 0, index)
        batch = Batch(x.to(dtype), torch.zeros(4, dtype=torch.long))
        routing = Routing(Route.parse("0-1"), draws=draws)
        loss = training_loss(
            model, model, create_objective(objective), batch, draws, routing, config.train
        )
        loss.backward()
        assert loss.dtype == dtype
        losses.append(loss.item())
        flat = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(flat))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] != losses[1]
    assert (gradients[0] - gradients[1]).norm() < 1e-3 * gradients[1].norm()
