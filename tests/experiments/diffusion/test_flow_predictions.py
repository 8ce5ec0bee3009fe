"""x- and epsilon-prediction of flow matching against JiT's formulas, in JiT's own time.

JiT (arXiv 2511.13720) counts time from noise (0) to data (1): z = t x + (1 - t) e, v = x - e, where
e has the standard deviation s. Everything here is written in that time; the suite's t is 1 - t.
"""

import pytest
import torch
from oracles import GAUSSIAN, loss_map
from suite import registered

import backbones
from experiments.config.compose import load
from experiments.diffusion import create_guidance, create_objective, create_sampler
from experiments.diffusion.objective import Prediction
from experiments.evaluation.guided_denoiser import GuidedDenoiser
from routing.rng import Draws

JIT_TIMES = torch.tensor([0.01, 0.3, 0.7, 0.99], dtype=torch.float64)  # two beyond the clamp


def flow(**options):
    return create_objective({"name": "flow", "reverse": True, "time_scale": 1.0, **options})


def images(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def column(t):
    return t.reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("prediction", ["x", "eps", "v"])
@pytest.mark.parametrize("s", [1.0, 2.0])
def test_the_loss_is_jits_on_the_velocity(prediction, s):
    x, unit, output = images(0, 4, 2, 3, 3), images(1, 4, 2, 3, 3), images(2, 4, 2, 3, 3)
    t, e = column(JIT_TIMES), s * unit
    z = t * x + (1 - t) * e
    if prediction == "x":
        divisor = (1 - t).clamp(min=0.05)
        v, v_hat = (x - z) / divisor, (output - z) / divisor
    elif prediction == "v":
        v, v_hat = x - e, output
    else:  # z = t x + (1 - t) e and v = x - e give v = (z - e) / t
        divisor = t.clamp(min=0.05)
        v, v_hat = (z - e) / divisor, (z - output) / divisor
    inputs = []

    def net(noisy, time):
        inputs.append((noisy, time))
        return output

    loss = loss_map(flow(prediction=prediction, noise_scale=s), net, x, unit, 1 - JIT_TIMES)
    assert torch.allclose(loss, (v - v_hat) ** 2, rtol=1e-9)
    assert torch.allclose(inputs[0][0], z) and torch.allclose(inputs[0][1], JIT_TIMES)


def test_the_preset_draws_jits_times():
    options = load(["experiment=jit", "data=digits"]).objective
    draws = Draws(0, 3, torch.arange(1000))
    normal = draws.normal("sigma", 1)[:, 0]
    # A normal number and its negative are equally likely: JiT's sigmoid(-0.8 + 0.8 n).
    expected = torch.sigmoid(-0.8 - 0.8 * normal)
    assert torch.allclose(1 - create_objective(options).times(draws), expected, atol=1e-6)
    assert float(expected.median()) == pytest.approx(0.31, abs=0.02)  # sigmoid(-0.8)


class Network:
    """A smooth function of image, time and label; the null class is 5."""

    num_classes, depth, dtype, num_tokens = 5, 4, torch.float64, 16
    config = {"input_size": 4, "num_classes": 5, "text": None, "in_channels": 2}
    in_channels = 2

    def __call__(self, z, t, y=None, **_):
        label = torch.full_like(t, 5.0) if y is None else y.to(t)
        return torch.tanh(z * column(0.5 + t)) + column(0.1 * label)


def jit_sampling(net, noise, labels, steps, scale, s, low):
    """Heun's method on v_hat with guidance where t > low; the last step is Euler's."""

    def velocity(z, t):
        time = torch.full((len(z),), t, dtype=torch.float64)
        guided, unguided = ((net(z, time, y=y) - z) / max(1 - t, 0.05) for y in (labels, torch.full_like(labels, 5)))
        return unguided + (scale if t > low else 1.0) * (guided - unguided)

    z, ends = s * noise, torch.linspace(0, 1, steps + 1, dtype=torch.float64).tolist()
    for i, (t, after) in enumerate(zip(ends, ends[1:], strict=False)):
        first = velocity(z, t)
        moved = z + (after - t) * first
        if i < steps - 1:
            moved = z + (after - t) * (first + velocity(moved, after)) / 2
        z = moved
    return z


@pytest.mark.parametrize(("s", "steps"), [(1.0, 8), (2.0, 25)])
def test_sampling_is_jits_with_its_guidance_interval(s, steps):
    net, noise, labels = Network(), images(3, 3, 2, 4, 4), torch.tensor([0, 2, 4])
    objective = flow(prediction="x", noise_scale=s)
    sampler = create_sampler({"name": "heun", "steps": steps}, objective)
    # Their t > 0.1 is sigma / alpha < 9 s; both step counts avoid 0.1 itself.
    guidance = create_guidance({"name": "interval", "scale": 2.5, "low": 0.0, "high": 9.0 * s})
    denoise = GuidedDenoiser(net, objective, guidance, torch.arange(3), steps, labels)
    ours = sampler.sample(denoise, sampler.start(noise), lambda i, x: x)
    theirs = jit_sampling(net, noise, labels, steps, 2.5, s, 0.1)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    unlimited = jit_sampling(net, noise, labels, steps, 2.5, s, -1.0)
    assert not torch.allclose(ours, unlimited, rtol=1e-3), "the interval has to matter"


@pytest.mark.parametrize(
    "options",
    [{"name": name} for name in registered("sampler")]
    + [{"name": "sde", "diffusion": form} for form in ("SBDM", "decreasing")]
    + [{"name": "sde", "last": "mean"}],
)
def test_a_noise_scale_is_the_same_process_in_another_unit(options):
    """x / s with noise 1 and x with noise s: every sampler makes s times the same image."""
    s = 2.0
    small, large = create_objective("flow"), create_objective({"name": "flow", "noise_scale": s})
    noise = images(4, 5, 2, 1, 1)
    generated = []
    for objective, unit in ((small, 1.0), (large, s)):
        # Levels sigma / alpha are in the unit of the image too: churn acts on all of them.
        limits = {"churn_min": 0.0, "churn_max": 1e9} if options["name"] == "churn" else {}
        sampler = create_sampler({**options, "steps": 7, **limits}, objective)

        def denoise(x, time, *_, unit=unit):
            return Prediction(unit * GAUSSIAN.denoise(x / unit, 1 - time, time))

        generated.append(sampler.sample(denoise, sampler.start(noise), lambda i, x: images(i, *x.shape)))
    assert torch.allclose(generated[1], s * generated[0], rtol=1e-8)


@pytest.mark.parametrize("s", [1.0, 2.0])
def test_every_prediction_stands_for_the_same_denoised_image(s):
    x, unit, time = images(0, 3, 2, 3, 3), images(1, 3, 2, 3, 3), torch.tensor([0.2, 0.5, 0.9])
    time = time.double()
    for prediction in ("v", "x", "eps"):
        objective = flow(prediction=prediction, noise_scale=s)
        pair = objective.training_pair(x, unit, time)
        assert torch.allclose(objective.denoised(pair.target, pair.noisy, time), x), prediction
        assert torch.allclose(objective.from_level(objective.level(time)), time)


def test_the_cosine_term_compares_velocities():
    x, unit, time = images(0, 3, 2, 3, 3), images(1, 3, 2, 3, 3), torch.full((3,), 0.4).double()
    velocity = images(5, 3, 2, 3, 3)
    losses = []
    for prediction in ("v", "x"):
        objective = flow(prediction=prediction, cosine=1.0)
        pair = objective.training_pair(x, unit, time)
        # The image that this velocity stands for; reversed, the network's velocity is -v.
        output = -velocity if prediction == "v" else pair.noisy - 0.4 * velocity
        losses.append(objective.loss_map(output, pair))
    assert torch.allclose(*losses)


def test_a_bottleneck_is_two_linear_layers():
    model = backbones.create("lightningdit", "T/4", depth=1, bottleneck=5, num_classes=3, in_channels=3, input_size=8)
    x, weights = images(0, 2, 3, 8, 8).float(), model.patches
    reduced = torch.nn.functional.conv2d(x, weights.reduce.weight.reshape(5, 3, 4, 4), stride=4)
    expected = torch.nn.functional.linear(reduced.flatten(2).mT, weights.project.weight, weights.project.bias)
    assert torch.allclose(model.patches(x), expected, atol=1e-6)
