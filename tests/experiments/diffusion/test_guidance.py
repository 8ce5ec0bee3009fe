"""Guidance: its algebra, its passes, its labels, its tokens, its cost."""

from types import SimpleNamespace

import pytest
import torch
from small import random_backbone

from experiments.diffusion import create_guidance, create_objective, create_sampler
from experiments.evaluation import generate, model_cost, sampling_cost
from experiments.evaluation.guided_denoiser import GuidedDenoiser
from experiments.options.guidance import rate_over_steps
from experiments.options.roles import ConfigError

FAMILIES = ("dit", "mamba", "rwkv")


class Recorder:
    """Says what it was asked: its output is a number per label, and per number of tokens kept."""

    num_classes, depth, dtype = 5, 4, torch.float64
    num_tokens = 16

    def __init__(self, gain=1.0, text=None):
        self.calls, self.gain = [], gain
        self.config = {"input_size": 4, "num_classes": 5, "text": text, "in_channels": 2}
        self.in_channels = 2

    def __call__(self, x, t, y=None, text=None, text_drop=None, routing=None):
        self.calls.append(SimpleNamespace(y=y, text=text, drop=text_drop, routing=routing, n=len(x)))
        value = torch.zeros(len(x), dtype=x.dtype)
        if y is not None:
            value = value + torch.where(y == 5, -1.0, y.double())
        if text_drop is not None:
            value = value + torch.where(text_drop, -1.0, 2.0)
        if routing is not None:
            value = value - 10 * routing.route.segments[0].rate
        return self.gain * value.reshape(-1, 1, 1, 1).expand_as(x)


def evaluate(guidance, model, labels=(1, 3), step=0, steps=5, time=0.5, weak=None, text=None):
    """The velocity of one guided evaluation of flow matching, one number per image."""
    flow = create_objective("flow")
    seeds = torch.arange(len(labels)) + 7
    guided = GuidedDenoiser(model, flow, guidance, seeds, steps, torch.tensor(labels), text=text, weak_model=weak)
    x = torch.zeros(len(labels), 2, 4, 4, dtype=torch.float64)
    return (-guided(x, time, step, step).x0 / time)[:, 0, 0, 0].tolist()


def test_cfg_in_one_batch():
    model = Recorder()
    assert evaluate(create_guidance({"name": "cfg", "scale": 2}), model) == [2 * 1 + 1, 2 * 3 + 1]
    assert [c.n for c in model.calls] == [4]
    assert model.calls[0].y.tolist() == [1, 3, 5, 5]


def test_the_first_channels_alone_are_guided():
    """The published sampling of DiT, SiT and LightningDiT: the others stay conditional."""
    given, null = torch.randn(2, 3, 4, 2, 2)
    guidance = create_guidance({"name": "interval", "scale": 4.0, "channels": 3})
    want = given.clone()
    want[:, :3] = null[:, :3] + 4 * (given[:, :3] - null[:, :3])
    torch.testing.assert_close(guidance.combine([given, null], {}), want)
    assert torch.equal(guidance.combine([given], {}), given)


def test_scale_one_is_no_second_pass():
    for name in ("none", "cfg", "icg", "apg", "interval"):
        model = Recorder()
        options = {} if name == "none" else {"scale": 1}
        assert evaluate(create_guidance({"name": name, **options}), model) == [1, 3]
        assert [c.n for c in model.calls] == [2] and model.calls[0].routing is None


@pytest.mark.parametrize(("level", "acts"), [(0.27, False), (0.29, True), (2.89, True), (2.91, False)])
def test_interval_acts_inside_only(level, acts):
    guidance, time = create_guidance({"name": "interval", "scale": 3}), level / (1 + level)
    model = Recorder()
    expected = [3 * 1 + 2, 3 * 3 + 2] if acts else [1, 3]
    assert evaluate(guidance, model, time=time) == pytest.approx(expected)
    assert model.calls[0].n == (4 if acts else 2)


def test_routed_mixes_two_conditional_passes():
    model = Recorder()
    # The route may be named for a model that was trained without one.
    guidance = create_guidance({"name": "routed", "scale": 1.5, "route": "1-2"}, route="none")
    strong, weak = [1 - 5, 3 - 5], [1 - 9, 3 - 9]
    expected = [1.5 * s - 0.5 * w for s, w in zip(strong, weak, strict=True)]
    assert evaluate(guidance, model) == pytest.approx(expected)
    assert [c.y.tolist() for c in model.calls] == [[1, 3], [1, 3]]
    assert [c.routing.route.segments[0].rate for c in model.calls] == [0.5, 0.9]
    assert [str(c.routing.route.with_rate(0.5)) for c in model.calls] == ["1-2", "1-2"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["strong", "weak"])
def test_the_label_reaches_both_routed_passes_of_a_real_model(family, scale):
    # Scale 1 is the strong pass alone, 0 the weak one. The released code drops the label in both.
    model, flow = random_backbone(family), create_objective("flow")
    guidance = create_guidance({"name": "routed", "scale": scale}, route="1-2")
    seeds = torch.tensor([4, 4, 4])
    guided = GuidedDenoiser(model, flow, guidance, seeds, 5, torch.tensor([0, 1, 1]))
    x = torch.randn(1, 2, 4, 4).expand(3, -1, -1, -1)
    with torch.no_grad():
        out = guided(x, 0.5, 0, 0).x0
    assert torch.allclose(out[1], out[2], atol=1e-6)
    assert (out[0] - out[1]).abs().max() > 1e-3


def test_routed_with_the_null_class():
    model = Recorder()
    guidance = create_guidance({"name": "routed", "scale": 2, "null_class": True}, route="1-2")
    assert evaluate(guidance, model) == pytest.approx([2 * (1 - 5) - (-1 - 9), 2 * (3 - 5) + 10])
    assert [c.y.tolist() for c in model.calls] == [[1, 3], [5, 5]]
    # At equal rates the passes differ in the label only: one batch, on the same tokens.
    model = Recorder()
    guidance = create_guidance({"name": "routed", "null_class": True, "weak": 0.5, "strong": 0.5}, route="1-2")
    evaluate(guidance, model)
    assert [c.y.tolist() for c in model.calls] == [[1, 3, 5, 5]]
    tokens = model.calls[0].routing.draws.uniform("route.0", 16)
    assert torch.equal(tokens[:2], tokens[2:]) and not torch.equal(tokens[0], tokens[1])


def test_rates_follow_a_schedule_over_the_steps():
    options = {"name": "routed", "strong": "cosine:0:0.6", "weak": "cosine:0.6:0", "scale": 1.5}
    guidance = create_guidance(options, route="1-2")
    pairs = [[p.rate for p in guidance.guided(i / 4)] for i in range(5)]
    assert [a for a, _ in pairs] == pytest.approx([0, 0.0878680, 0.3, 0.5121320, 0.6])
    assert [a + b for a, b in pairs] == pytest.approx([0.6] * 5)
    model = Recorder()
    evaluate(guidance, model, step=4, steps=5)
    assert model.calls[0].routing.route.segments[0].rate == pytest.approx(0.6)
    assert model.calls[1].routing is None
    assert rate_over_steps("linear:0.8:0.2", "rate").at(0.25) == pytest.approx(0.65)
    assert rate_over_steps("0.3", "rate").at(0.7) == 0.3


@pytest.mark.parametrize(
    ("options", "rate"),
    [({"name": "autoguidance"}, 0.0), ({"name": "routed", "checkpoint": "early", "strong": 0, "weak": 0.5}, 0.5)],
)
def test_a_weaker_checkpoint_runs_the_weak_pass_with_the_label(options, rate):
    strong, weak = Recorder(), Recorder(gain=0.5)
    velocities = evaluate(create_guidance({**options, "scale": 3}, route="1-2"), strong, weak=weak)
    assert velocities == pytest.approx([3 * label - 2 * 0.5 * (label - 10 * rate) for label in (1, 3)])
    assert len(strong.calls) == len(weak.calls) == 1 and weak.calls[0].y.tolist() == [1, 3]
    assert strong.calls[0].routing is None and (weak.calls[0].routing is None) == (rate == 0)


def test_icg_uses_random_labels_that_belong_to_the_seed():
    guidance = create_guidance({"name": "icg", "scale": 2})
    model = Recorder()
    evaluate(guidance, model, labels=[1] * 300)
    drawn = model.calls[0].y[300:]
    assert drawn.min() == 0 and drawn.max() == 4
    assert (drawn.bincount() > 30).all()
    alone = Recorder()
    evaluate(guidance, alone, labels=[1] * 3)
    assert torch.equal(alone.calls[0].y[3:], drawn[:3])
    evaluate(guidance, alone, labels=[1] * 3, step=1)
    assert not torch.equal(alone.calls[1].y[3:], drawn[:3])


def test_apg_without_its_parts_is_cfg():
    plain = create_guidance({"name": "cfg", "scale": 4})
    apg = create_guidance({"name": "apg", "scale": 4, "eta": 1, "threshold": 0, "momentum": 0})
    torch.manual_seed(0)
    pair = [torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)]
    assert torch.allclose(plain.combine(pair, {}), apg.combine(pair, {}), atol=1e-5)


def test_apg_projects_limits_and_remembers():
    given = torch.tensor([1.0, 0.0]).reshape(1, 2, 1, 1)
    null = torch.tensor([0.0, -2.0]).reshape(1, 2, 1, 1)  # the difference is (1, 2)

    def run(memory=None, **options):
        guidance = create_guidance({"name": "apg", "scale": 3, **options})
        return guidance.combine([given, null], {} if memory is None else memory).flatten().tolist()

    free = {"threshold": 0, "momentum": 0}
    assert run(**free) == pytest.approx([1, 4])  # only the part orthogonal to (1, 0)
    assert run(**free, eta=0.5) == pytest.approx([1 + 2 * 0.5, 4])
    short = run(threshold=1.0, momentum=0)
    assert short == pytest.approx([1, 2 * 2 / 5**0.5])
    memory: dict = {}
    first, second = (run(memory, threshold=0, momentum=-0.5) for _ in range(2))
    assert first == pytest.approx([1, 4]) and second == pytest.approx([1, 2])


def test_text_is_dropped_by_the_mask_and_replaced_in_icg():
    model = Recorder(text=(3, 4))
    model.num_classes = 0
    text = torch.randn(2, 3, 4)
    found = evaluate(create_guidance({"name": "cfg", "scale": 2}), model, text=text)
    assert found == [2 * 2 + 1] * 2
    assert model.calls[0].drop.tolist() == [False, False, True, True]
    model.calls.clear()
    evaluate(create_guidance({"name": "icg", "scale": 2}), model, text=text)
    call = model.calls[0]
    assert torch.equal(call.text[:2], text) and not call.drop.any()
    assert not torch.allclose(call.text[2:], text)


def test_learned_variance_survives_guidance():
    model = random_backbone(learn_sigma=True)
    path = create_objective({"name": "ddpm", "learn_sigma": True})
    walk = create_sampler({"name": "ddpm", "steps": 4}, path)
    out = generate(model, path, walk, create_guidance("cfg"), torch.arange(2))
    small = create_sampler({"name": "ddpm", "steps": 4, "variance": "small"}, path)
    other = generate(model, path, small, create_guidance("cfg"), torch.arange(2))
    assert out.shape == (2, 2, 4, 4) and not torch.allclose(out, other)


# ------------------------------------------------------------------------------------------- cost

SG = [  # Sparse Guidance, Table 1: SiT-XL/2, r_{2->24}, GFLOPs a step.
    ({"name": "none"}, 114.42),
    ({"name": "cfg"}, 228.84),
    ({"name": "icg"}, 228.84),
    ({"name": "apg"}, 228.84),
    ({"name": "autoguidance"}, 228.84),
    ({"name": "routed"}, 97.67),
    ({"name": "routed", "strong": "cosine:0:0.6", "weak": "cosine:0.6:0", "checkpoint": "50K"}, 173.16),
]


@pytest.mark.parametrize(("options", "published"), SG)
def test_cost_is_the_papers(options, published):
    model = SimpleNamespace(config={"name": "dit", "size": "XL/2"}, depth=28)
    path = create_objective("flow")
    walk = create_sampler({"name": "euler", "steps": 40}, path)
    guidance = create_guidance(options, route="2-24")
    cost = sampling_cost(path, walk, guidance, model_cost(model, guidance, attention=False))
    assert cost.macs_per_evaluation / 1e9 == pytest.approx(published, rel=2.5e-3)
    assert cost.evaluations == 40


def test_cost_counts_what_runs():
    model, path = Recorder(), create_objective("edm")
    walk = create_sampler({"name": "heun", "steps": 6}, path)
    for name in ("none", "cfg", "interval", "routed"):
        guidance = create_guidance(name, route="1-2")
        model.calls.clear()
        generate(model, path, walk, guidance, torch.arange(3), batch=3)
        cost = sampling_cost(path, walk, guidance, lambda rate, weak: 1.0)
        assert cost.passes == sum(c.n for c in model.calls) / 3 == cost.macs
        assert cost.batches == len(model.calls) and cost.evaluations == 11


# ------------------------------------------------------------------------------------ wrong input


def test_models_that_a_guidance_cannot_use_are_refused():
    with pytest.raises(ConfigError, match="another num_classes than the model"):
        create_guidance("autoguidance").check(random_backbone(), random_backbone(num_classes=3))
    unconditional = random_backbone(num_classes=0)
    for name in ("cfg", "interval", "icg", "apg"):
        with pytest.raises(ConfigError, match="needs a model with classes or text"):
            create_guidance(name).check(unconditional)
    with pytest.raises(ConfigError, match="guidance=routed needs a route"):
        create_guidance("routed").check(unconditional)
    create_guidance("routed", route="1-2").check(unconditional)


def test_path_drop_leaves_out_the_fused_span():
    from routing.learned import Fuse

    model, path = random_backbone(depth=5), create_objective("flow")
    guidance = create_guidance({"name": "pathdrop", "scale": 2}, route="1-3")
    walk = create_sampler({"name": "euler", "steps": 3}, path)
    with pytest.raises(ConfigError, match="SPRINT's fusion"):
        generate(model, path, walk, guidance, torch.arange(2))
    model.stack.fuse = Fuse(32, "1-3", 5)
    ran, labels = [], []
    for i, block in enumerate(model.stack.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    model.register_forward_pre_hook(lambda m, a, k: labels.append(k["y"][0].item()), with_kwargs=True)
    out = generate(model, path, walk, guidance, torch.arange(2), torch.tensor([3, 3]))
    assert out.isfinite().all() and ran == [0, 1, 2, 3, 4, 0, 4] * 3
    assert labels == [3, 5] * 3  # the weak pass has the null class
    cost = sampling_cost(path, walk, guidance, lambda rate, weak, skipped=(): 5 - len(skipped), 5)
    assert cost.macs == len(ran) and cost.batches == 6
