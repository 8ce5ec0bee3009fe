"""The held-out loss: the objective's own, on noise that no run can change, for both passes."""

import json

import pytest
import torch
from small import make_model_and_data, small

from experiments.diffusion.objectives import create_objective
from experiments.evaluation import heldout_loss
from experiments.evaluation.heldout import HeldOut, _EvenNoiseLevels
from experiments.evaluation.scoring import score
from experiments.runtime.console import Console
from experiments.training.session import train


def data(folder, *overrides):
    """Return a narrow random model before its held-out data."""
    config = small(folder, *overrides)
    model, dataset = make_model_and_data(config)
    objective = create_objective(config.objective)
    return HeldOut(model, config, dataset, objective, torch.device("cpu"))


def values(found):
    return {each.key: each.value for each in found}


@pytest.mark.parametrize("objective", ["edm", "flow", "ddpm"])
def test_two_runs_are_compared_on_the_same_noisy_inputs(tmp_path, objective):
    seen = []
    for more in (("seed=0",), ("seed=7", "route=1-2", "backbone=mamba", "train.batch=4")):
        held = data(tmp_path, f"objective={objective}", *more)
        net = held.model.forward
        calls: list[tuple[torch.Tensor, ...]] = []

        def watched(x, t, *, y, net=net, calls=calls, **rest):
            calls.append((x, t, y))
            return net(x, t, y=y, **rest)

        held.model.forward = watched
        held.losses(torch.arange(30, 50), draw=1)
        seen.append(calls)
    (dense,), routed = seen
    assert len(routed) == 2  # the dense pass and the routed one, on one input
    for each in routed:
        assert all(torch.equal(a, b) for a, b in zip(dense, each, strict=True))


def test_the_loss_is_the_objectives_own_mean_over_all_of_the_split(tmp_path):
    held = data(tmp_path, "route=1-2")
    # An untrained output layer answers zero: EDM's loss of that is known.
    for p in held.model.head.parameters():
        torch.nn.init.zeros_(p)
    found = values(heldout_loss.heldout_scores(held, batch=40))
    expected = []
    for draw in range(2):
        x, noise, *_ = held.sample(torch.arange(360), draw)
        time = held.objective.times(_EvenNoiseLevels(torch.arange(360), draw))
        levels = time.reshape(-1, 1, 1, 1)
        denoised = 0.25 / (levels**2 + 0.25) * (x + levels * noise)
        expected.append(((levels**2 + 0.25) / (levels * 0.5) ** 2 * (denoised - x) ** 2).double().mean())
    assert found["heldout_loss"] == pytest.approx(float(sum(expected)) / 2, rel=1e-5)
    assert found["heldout_loss_routed"] == pytest.approx(found["heldout_loss"], rel=1e-6)


def test_batches_of_unequal_size_and_every_draw_count_by_their_images(tmp_path, monkeypatch):
    held = data(tmp_path)
    index = torch.arange(360)
    with torch.no_grad():
        losses = [float(torch.stack([held.losses(index[i : i + 1], draw)[0] for i in range(5)]).mean()) for draw in (0, 1)]
    assert abs(losses[0] - losses[1]) > 1e-3
    monkeypatch.setattr(heldout_loss, "split_indices", lambda *_: index[:5])
    monkeypatch.setattr(heldout_loss, "NOISY_INPUTS", 10)
    for batch in (3, 5):
        found = values(heldout_loss.heldout_scores(held, batch))
        assert found["heldout_loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_a_run_scores_its_averaged_weights(tmp_path):
    words = ["eval=digits", "eval.metrics=[heldout_loss]", "train.ema=0.99"]
    folder = train(small(tmp_path, *words), quiet=True)
    (scored,) = (json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines())
    averaged, raw = (heldout_loss.heldout_scores(HeldOut.open(folder, weights=w, device="cpu"), 500)[0].value for w in ("ema", "raw"))
    assert scored["value"] == pytest.approx(averaged, rel=1e-6) and abs(raw - averaged) > 1e-3


def test_a_process_without_a_sample_changes_nothing(tmp_path, monkeypatch):
    other = torch.tensor([[4.0, 6.0]], dtype=torch.float64)  # of another process: images, loss
    monkeypatch.setattr(heldout_loss, "share", lambda n: range(0))
    monkeypatch.setattr(heldout_loss, "gather_rows", lambda own: torch.cat([own, other]))
    assert values(heldout_loss.heldout_scores(data(tmp_path), 10)) == {"heldout_loss": 1.5}


def test_noise_levels_cover_those_of_training_evenly():
    spread = _EvenNoiseLevels(torch.arange(1000, 1200), 3)
    assert (spread.uniform("sigma", 1)[:, 0] * 10).long().bincount().tolist() == pytest.approx([20] * 10, abs=2)
    normal = spread.normal("sigma", 1)
    assert abs(normal.mean()) < 0.02 and normal.std() == pytest.approx(1, abs=0.03)
    other = _EvenNoiseLevels(torch.arange(1000, 1200), 4).uniform("sigma", 1)  # each draw of a sample has its own
    assert not torch.isclose(spread.uniform("sigma", 1), other).any()


def test_tokens_dropped_for_good_are_left_out(tmp_path):
    held = data(tmp_path, "route=0-3", "routing.reinsert=none")
    dense, routed = held.losses(torch.arange(64))
    assert torch.isfinite(routed) and routed != dense


@pytest.mark.slow
def test_a_run_reports_it_beside_its_scores_and_training_leaves_no_trace_in_the_noise(tmp_path):
    metrics = "eval.metrics=[memorisation_pixels,heldout_loss]"
    few = ("eval.every=3", "eval.samples=10", "eval.batch=10", "seed=3")
    folder = train(small(tmp_path, "route=1-2", "eval=digits", metrics, *few), quiet=True)
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    by_step = {(x["step"], x["key"]): x for x in lines}
    pixels = ("memorisation_pixels", "memorisation_pixels_heldout")
    keys = {*pixels, "heldout_loss", "heldout_loss_routed"}
    assert set(by_step) == {(step, key) for step in (3, 6) for key in keys}
    last = by_step[6, "heldout_loss"]
    assert (last["metric"], last["better"], last["n"]) == ("heldout-loss-360", "lower", 360)
    assert last["guidance"] == by_step[6, "memorisation_pixels"]["guidance"]
    summary = json.loads((folder / "summary.json").read_text())["scores"]
    assert summary["heldout-loss-routed-360"] == by_step[6, "heldout_loss_routed"]["value"]
    # The same weights opened later give the same number.
    again = values(heldout_loss.heldout_scores(HeldOut.open(folder, device="cpu"), 10))
    assert again["heldout_loss"] == pytest.approx(last["value"], rel=1e-6)


def test_a_loss_alone_samples_nothing_and_without_a_held_out_split_it_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("experiments.evaluation.pipeline.generate", None)
    held = data(tmp_path, "eval=digits")
    parts = held.model, held.config, held.dataset
    (found,) = score(*parts, metrics=("heldout_loss",))  # no route, no routed pass
    assert found.metric == "heldout-loss-360"
    del held.dataset.sizes["test"]
    assert score(*parts, metrics=("heldout_loss",), console=Console()) == []
    assert "heldout_loss is missing: data=digits has no held-out split" in capsys.readouterr().out
