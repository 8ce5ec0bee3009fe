"""SRA (arXiv 2505.02831): the student's block against a later block of the EMA, less noisy."""

import pytest
import torch
from small import small
from torch.func import functional_call
from training_runs import alignment_term, first_loss, make_run, perturbed

from experiments.config.compose import load
from experiments.config.model import run_cost, teacher_block
from experiments.diffusion import create_objective

SRA = ("train.encoder=ema", "objective=flow", "backbone.align={block: 1, channels: 32, hidden: 16}")
ROUTED = ("route=1-2", *SRA)


def cosine_distance(student, teacher):
    """One minus the cosine of two tokens (D,)."""
    return 1 - torch.cosine_similarity(student, teacher, dim=0)


def smooth_l1_distance(student, teacher):
    """Mean over the entries of two tokens (D,): a parabola up to 0.05, a line beyond."""
    total = 0.0
    for difference in (student - teacher).abs().tolist():
        total += difference**2 / 0.1 if difference < 0.05 else difference - 0.025
    return torch.tensor(total / len(student))


CASES = [
    ("dit", "none", "cosine"),
    ("mamba", "1-2", "cosine"),
    ("rwkv", "1-2", "cosine"),
    ("dit", "none", "smooth_l1"),
    ("mamba", "1-2", "smooth_l1"),
]


@pytest.mark.parametrize(("family", "route", "form"), CASES)
def test_the_loss_is_the_papers(family, route, form, tmp_path):
    words = [f"backbone={family}", f"route={route}", f"train.align_loss={form}"]
    loop = perturbed(make_run(small(tmp_path, *SRA, *words)))
    step, model = loop.training_step, loop.model
    term, output, batch, draws = alignment_term(step)

    # By hand: t' = clamp(t - u, 0), the same noise and labels, the whole EMA model, dense.
    time = step.objective.times(draws)
    earlier = (time - 0.2 * draws.uniform("teacher", 1)[:, 0]).clamp(min=0)
    noise = draws.normal("noise", tuple(batch.x.shape[1:]))
    t = earlier.reshape(-1, 1, 1, 1)
    dropped = draws.uniform("drop", 1)[:, 0] < 0.1
    labels = torch.where(dropped, 10, batch.y)
    weights = dict(zip(loop.state.names, loop.state.ema, strict=True))
    inputs = ((1 - t) * batch.x + t * noise, 1000 * earlier, labels)
    assert teacher_block(loop.config) == 1  # two thirds of four
    teacher = functional_call(model, weights, inputs, {"taps": (1,)}).taps[1]
    student, ids = output.aligned, output.aligned_layout.ids
    assert (ids is None) is (route == "none")
    if ids is not None:
        assert student.shape[1] == 32, "half of the 64 tokens are inside the route"
    distance = {"cosine": cosine_distance, "smooth_l1": smooth_l1_distance}[form]
    distances = []
    for sample in range(8):
        present = range(64) if ids is None else ids[sample].tolist()
        for row, token in enumerate(present):
            distances.append(distance(student[sample, row], teacher[sample, token]))
    expected = 0.5 * torch.stack(distances).mean()
    assert term == pytest.approx(float(expected.detach()), abs=1e-5)
    # Gradients reach the student and its projector, and not the teacher.
    first_loss(loop).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.align.parameters())
    assert all(p.grad is None for p in step.alignment.teacher.parameters())


def test_the_teacher_is_the_ema_after_steps_and_after_loading(tmp_path):
    loop = make_run(small(tmp_path, *ROUTED, "train.ema=0.5"))
    teacher = loop.training_step.alignment.teacher
    loop.fit(3)
    again = make_run(small(tmp_path, *ROUTED, "train.ema=0.5"))
    again.resume()
    resumed = dict(again.training_step.alignment.teacher.named_parameters())
    averages = dict(zip(loop.state.names, loop.state.ema, strict=True))
    for name, weight in teacher.named_parameters():
        assert weight.data_ptr() == averages[name].data_ptr()
        assert torch.equal(resumed[name], weight), name
    assert not all(torch.equal(p, a) for p, a in zip(loop.state.params, loop.state.ema, strict=True))


@pytest.mark.parametrize("name", ["edm", "ddpm", "flow"])
def test_less_noisy_is_an_offset_of_flow_matchings_time(name):
    objective = create_objective(name)
    level = torch.tensor([0.05, 0.5, 2.0, 9.0], dtype=torch.float64)
    offset = torch.tensor([0.2, 0.1, 0.2, 0.0], dtype=torch.float64)
    earlier = objective.level(objective.less_noisy(objective.from_level(level), offset))
    flow_time = level / (1 + level) - offset
    expected = flow_time / (1 - flow_time)
    assert torch.allclose(earlier[1:], expected[1:], rtol=1e-5)
    # 0.05 is t = 0.048: below the offset, so the least noise that the network knows.
    assert float(earlier[0]) == pytest.approx({"edm": 0.002, "ddpm": 0.01, "flow": 0.0}[name], rel=1e-3)


def test_micro_batches_and_bf16_have_the_same_loss(tmp_path):
    losses = []
    for words in ([], ["train.micro_batch=4"], ["train.precision=bf16"]):
        loop = make_run(small(tmp_path, *ROUTED, *words))
        loop.training_step.run()
        losses.append(float(loop.state.tally.loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=0.02)


def test_the_teachers_pass_is_counted():
    words = ["data=digits", "backbone.depth=4", "backbone.width=32", "route=1-2", "objective=flow"]
    plain = run_cost(load(words))
    cost = run_cost(load([*words, "train.encoder=ema", "train.teacher_block=2"]))
    # Patches 1 x 32 on 64 tokens; time 256 x 32 and 32 x 32; modulation 32 x (4 x 6 x 32).
    around = 64 * 32 + 256 * 32 + 32 * 32 + 32 * 4 * 6 * 32
    # A DiT block: qkv, projection and MLP are 12 D^2 a token; QK^T and AV 2 T^2 D.
    blocks = 3 * (64 * 12 * 32 * 32 + 2 * 64 * 64 * 32)
    for state in ("dense", "routed"):
        teacher = getattr(cost, f"macs_{state}") - getattr(plain, f"macs_{state}")
        assert teacher == around + blocks
    linear = cost.macs_routed_no_attention - plain.macs_routed_no_attention
    assert linear == around + 3 * 64 * 12 * 32 * 32
