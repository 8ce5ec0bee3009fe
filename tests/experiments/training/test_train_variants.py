"""Training variants through the one loop: dropping, MaskDiT, v1's ensemble, SPRINT, REPA, text."""

import pytest
import torch
from small import small
from training_runs import alignment_term, first_loss, make_run, perturbed

from experiments.config.model import run_cost
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.training.session import train
from experiments.training.summary import read_summary
from routing.errors import UserError

DROPPING = ["route=0--1", "routing.reinsert=none"]
MASKDIT = [*DROPPING, "backbone.decoder={depth: 1, width: 32, heads: 2}"]


@pytest.mark.slow
def test_scenes_train_with_captions(tmp_path):
    """Unlike latents without their autoencoder, they have previews and final samples of captions."""
    words = ["backbone=mamba", "data=scenes", "task=text", "size=T/2", "route=1-2"]
    folder = train(small(tmp_path, *words, "train.final_samples=true", "train.steps=3"), quiet=True)
    assert (folder / "samples" / "final.png").is_file()


def test_dropping_counts_only_tokens_that_stayed(tmp_path):
    run = perturbed(make_run(small(tmp_path, *DROPPING)))
    batch, draws, routing, *_ = next(run.training_step.micro_batches())
    noise, time = draws.normal("noise", (1, 8, 8)), run.training_step.objective.times(draws)
    pair = run.training_step.objective.training_pair(batch.x, noise, time)
    labels = torch.full((8,), 10)
    output = run.model(pair.inputs, pair.time, y=labels, routing=routing, return_output=True)
    terms = run.training_step.objective.loss_map(output.sample, pair)
    kept = output.kept.expand(8, -1).reshape(8, 1, 8, 8)
    assert kept.sum() == 8 * 32
    run.config.train.__dict__["label_drop"] = 1.0
    assert float(first_loss(run).detach()) == pytest.approx(float(terms[kept].detach().mean()), rel=1e-5)


def test_maskdit_reconstructs_with_the_preconditioned_output(tmp_path):
    # Zheng et al. 2024: weight (D - y)^2 over what is seen, and 0.1 times the error of D to the
    # noisy image y + n over what is not, each patch of y + n at mean 0 and variance 1.
    words = [*MASKDIT, "size=T/2", "train.label_drop=1"]
    run = perturbed(make_run(small(tmp_path, *words)))
    batch, draws, routing, *_ = next(run.training_step.micro_batches())
    y = batch.x
    sigma = (draws.normal("sigma", 1)[:, 0] * 1.2 - 1.2).exp()
    s = sigma.reshape(-1, 1, 1, 1)
    noisy = y + s * draws.normal("noise", (1, 8, 8))
    total = (s**2 + 0.25).sqrt()
    out = run.model(noisy / total, sigma.log() / 4, torch.full((8,), 10), routing=routing, return_output=True)
    denoised = 0.25 / total**2 * noisy + s * 0.5 / total * out.sample
    seen, hidden = [], []
    for image in range(8):
        for token in range(16):
            row, column = token // 4 * 2, token % 4 * 2
            clean, input_, guess = (x[image, 0, row : row + 2, column : column + 2] for x in (y, noisy, denoised))
            if out.kept.expand(8, -1)[image, token]:
                weight = (sigma[image] ** 2 + 0.25) / (sigma[image] * 0.5) ** 2
                seen.append(weight * ((guess - clean) ** 2).mean())
            else:
                target = (input_ - input_.mean()) / (input_.var() + 1e-6).sqrt()
                hidden.append(((guess - target) ** 2).mean())
    assert len(seen) == len(hidden) == 64
    expected = torch.stack(seen).mean() + 0.1 * torch.stack(hidden).mean()
    assert float(first_loss(run).detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_ensemble_weighs_tokens_that_skipped(tmp_path):
    def loss(*words):
        run = perturbed(make_run(small(tmp_path, "route=0-1+2-2", "routing.reinsert=sum_input", *words)))
        return float(first_loss(run).detach())

    without, whole = (loss("train.loss=ensemble", f"train.mae_weight={weight}") for weight in (0.0, 1.0))
    assert whole == pytest.approx(2 * loss(), rel=1e-5), "half stays, half skips: both means add up"
    assert without < whole


@pytest.mark.parametrize(
    ("parent_words", "child_words"),
    [
        (["train.encoder=random"], []),
        (["routing.learned=fuse"], ["route=1-2", "routing.learned=fuse", "routing.off_after=0"]),
    ],
    ids=["REPA", "SPRINT"],
)
def test_a_fine_tune_from_a_routed_run_is_dense(parent_words, child_words, tmp_path):
    parent = train(small(tmp_path, "route=1-2", *parent_words), quiet=True)
    source = str(parent) if child_words else f"{parent.parent}/{parent.name[:-8]}*"
    words = ["experiment=finetune", f"init={source}", "train.steps=2", *child_words]
    child = small(tmp_path, *words)
    assert child.train.lr == 1e-5
    summary = read_summary(train(child, quiet=True))
    assert summary["macs_routed"] == summary["macs_dense"]
    assert summary["macs"] == summary["macs_dense"] * 2 * child.train.batch


def test_weights_of_another_objective_are_refused(tmp_path):
    # SiT's velocity has the other sign, at other times.
    weights = train(small(tmp_path, "experiment=sit", "train.steps=1"), quiet=True)
    run = make_run(small(tmp_path, "objective=flow", "guidance=autoguidance", f"guidance.checkpoint={weights}"))
    with pytest.raises(UserError, match="trained with objective name=flow time_scale=1.0 reverse=True, expected name=flow"):
        SamplingPipeline.make(run.model, run.config)


def test_macs_of_a_run_follow_its_stages_and_its_drawn_ends(tmp_path):
    def total(*words):
        run = make_run(small(tmp_path, *words))
        return run_cost(run.config), [run.training_step.macs(run.config.route_schedule.at(i / 4)) for i in range(4)]

    plain, _ = total("route=0-2")
    assert total("route=none/0.5:0-2")[1] == [plain.macs_dense] * 2 + [plain.macs_routed] * 2
    ends = [total(f"route=0-{end}")[0].macs_routed for end in range(3)]
    drawn, found = total("route=0-2", "routing.random_end=true")
    assert found == [drawn.macs_routed] * 4 and drawn.macs_routed == round(sum(ends) / 3)


def test_tokens_shared_by_the_batch_are_aligned_with_their_own_features(tmp_path):
    words = ["route=1-2", "train.encoder=random", "backbone.align={block: 1, channels: 64, hidden: 16}"]
    run = perturbed(make_run(small(tmp_path, *words, "routing.shared=true")))
    term, output, batch, _ = alignment_term(run.training_step)
    ids = output.aligned_layout.ids
    assert ids.shape[0] == 1
    features = run.training_step.alignment.encode(batch.x)[:, ids[0]]
    similarity = torch.cosine_similarity(output.aligned, features, dim=-1).mean()
    assert term == pytest.approx(-0.5 * float(similarity.detach()), abs=1e-5)
