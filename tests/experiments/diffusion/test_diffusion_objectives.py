"""Objectives against closed forms: conversions, targets, loss weights, minimisers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import GAUSSIAN, MIXTURE, Oracle, loss_map
from torch.distributions import Normal, kl_divergence

from experiments.diffusion import create_objective
from experiments.options.guidance import GUIDANCE, rate_over_steps
from experiments.options.objective import EDMOptions
from experiments.options.roles import parse_named
from routing.errors import UserError
from routing.rng import Draws

OBJECTIVES = ("edm", "flow", "ddpm")
INSIDE = {"edm": 1.7, "flow": 0.4, "ddpm": 321.0}  # a native time of each


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_level_and_native_time_are_inverses(name):
    path = create_objective(name)
    times = double(*path.schedule(20)[1:-1])
    assert torch.allclose(path.from_level(path.level(times)), times, rtol=1e-9)
    assert torch.allclose(path.level(times), path.sigma(times) / path.alpha(times), rtol=1e-9)
    assert torch.allclose(path.coordinate(times) * path.scale(times), path.sigma(times), rtol=1e-9)


@given(st.floats(0.02, 100))
@settings(deadline=None, max_examples=50)
def test_one_noise_level_is_one_time_in_every_objective(level):
    # The noisiest DDPM step has sigma / alpha = 157, the cleanest 0.01.
    for name in OBJECTIVES:
        path = create_objective(name)
        assert float(path.level(path.from_level(double(level)))) == pytest.approx(level, rel=1e-6)


def test_conversion_table():
    edm, flow, ddpm = map(create_objective, OBJECTIVES)
    assert float(edm.model_time(double(math.e**2))) == pytest.approx(0.5)
    assert float(flow.model_time(double(0.25))) == pytest.approx(250.0)
    assert float(ddpm.model_time(double(17))) == 17
    # abar of DiT's chain at its ends, and alpha^2 + sigma^2 = 1.
    assert float(ddpm.alpha(double(0)) ** 2) == pytest.approx(1 - 1e-4)
    assert float(ddpm.alpha(double(999)) ** 2) == pytest.approx(4.0358e-5, rel=1e-3)
    assert float(ddpm.alpha(double(-1))) == 1 and float(ddpm.sigma(double(-1))) == 0
    both = ddpm.alpha(double(321)) ** 2 + ddpm.sigma(double(321)) ** 2
    assert float(both) == pytest.approx(1)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_corrupt_is_the_gaussian_path(name):
    path = create_objective(name)
    x0, noise = torch.randn(2, 3, 4, 4).double(), torch.randn(2, 3, 4, 4).double()
    times = double(INSIDE[name], INSIDE[name])
    noisy = path.corrupt(x0, noise, times)
    expected = float(path.alpha(times)[0]) * x0 + float(path.sigma(times)[0]) * noise
    assert torch.allclose(noisy, expected)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("data", [GAUSSIAN, MIXTURE], ids=["gaussian", "mixture"])
def test_denoise_undoes_the_preconditioning(name, data):
    path = create_objective(name)
    x = torch.randn(5, 2, 1, 1, dtype=torch.float64)
    times = torch.full((5,), INSIDE[name], dtype=torch.float64)
    exact = data.denoise(x, float(path.alpha(times)[0]), float(path.sigma(times)[0]))
    assert torch.allclose(path.predict(Oracle(path, data), x, times).x0, exact, atol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_exact_denoiser_minimises_the_loss(name):
    path = create_objective(name)
    n = 4000
    index = torch.arange(n)
    parts = torch.distributions.MultivariateNormal(GAUSSIAN.means[0], GAUSSIAN.covariances[0])
    torch.manual_seed(0)
    x0 = parts.sample((n,)).reshape(n, 2, 1, 1)
    noise = torch.randn_like(x0)
    times = torch.full((n,), INSIDE[name], dtype=torch.float64)
    oracle = Oracle(path, GAUSSIAN)
    best = loss_map(path, oracle, x0, noise, times)
    assert best.shape == x0.shape and len(index) == n

    for change in (lambda f: 1.1 * f, lambda f: f + 0.1):

        class Worse:
            dtype = torch.float64

            def __call__(self, x, t, change=change):
                return change(oracle(x, t))

        # The mean loss rises by a change's square: far more than the sampling error of the difference.
        assert loss_map(path, Worse(), x0, noise, times).mean() > best.mean()


def zero(x, t, **cond):
    return torch.zeros_like(x)


def test_edm_loss_is_the_weighted_denoising_error():
    path = create_objective("edm")
    torch.manual_seed(0)
    x0, noise = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64)
    sigma = torch.tensor([0.05, 1.0, 20.0], dtype=torch.float64)
    got = loss_map(path, zero, x0, noise, sigma)
    s = sigma.reshape(-1, 1, 1, 1)
    # F = 0: D is c_skip x, lambda = (s^2 + sd^2) / (s sd)^2 (Karras et al. 2022, Table 1).
    skip = 0.25 / (s**2 + 0.25)
    expected = (s**2 + 0.25) / (s * 0.5) ** 2 * (skip * (x0 + s * noise) - x0) ** 2
    assert torch.allclose(got, expected, rtol=1e-4)


def test_edm_loss_at_initialisation_is_about_one_at_every_noise_level():
    # The point of the weights: with F = 0 and data of variance sd^2, E[loss] = 1 at every sigma.
    path = create_objective("edm")
    torch.manual_seed(0)
    x0, noise = 0.5 * torch.randn(8, 4, 32, 32), torch.randn(8, 4, 32, 32)
    for sigma in (0.01, 0.1, 1.0, 10.0, 70.0):
        loss = loss_map(path, zero, x0, noise, torch.full((8,), sigma))
        assert float(loss.mean()) == pytest.approx(1, abs=0.05)


def test_flow_loss_is_the_velocity_error_and_its_cosine():
    x0, noise = torch.randn(3, 4, 4, 4), torch.randn(3, 4, 4, 4)
    times = torch.tensor([0.1, 0.5, 0.9])
    assert torch.allclose(loss_map(create_objective("flow"), zero, x0, noise, times), (noise - x0) ** 2)
    path = create_objective({"name": "flow", "cosine": 1.0})

    def right(x, t, **cond):
        return 2 * (noise - x0)

    def opposite(x, t, **cond):
        return x0 - noise

    square = ((noise - x0) ** 2).mean()
    assert loss_map(path, right, x0, noise, times).mean() == pytest.approx(float(square), rel=1e-5)
    assert loss_map(path, opposite, x0, noise, times).mean() == pytest.approx(float(4 * square + 2), rel=1e-5)


def test_released_sit_weights_count_from_noise_to_data():
    # SiT's network sees t = 1 at the data and predicts x - noise: the same flow, read backwards.
    ours = create_objective({"name": "flow", "time_scale": 1.0})
    theirs = create_objective({"name": "flow", "time_scale": 1.0, "reverse": True})
    gen = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(4, 2, 3, 3, generator=gen) for _ in range(2))
    time = torch.rand(4, generator=gen)

    def net(x, t, **_):
        return x * t[:, None, None, None]

    def sit(x, t, **_):
        return -net(x, 1 - t)

    assert torch.equal(loss_map(theirs, sit, x0, noise, time), loss_map(ours, net, x0, noise, time))
    x = ours.corrupt(x0, noise, time)
    assert torch.equal(theirs.predict(sit, x, time).x0, ours.predict(net, x, time).x0)


def test_ddpm_loss_is_the_epsilon_error():
    path = create_objective("ddpm")
    x0, noise = torch.randn(3, 4, 4, 4), torch.randn(3, 4, 4, 4)
    loss = loss_map(path, zero, x0, noise, torch.tensor([0.0, 400.0, 999.0]))
    assert torch.allclose(loss, noise**2)


class Epsilon:
    """Predicts given epsilons and a variance between its bounds."""

    def __init__(self, epsilon, fraction):
        self.epsilon = epsilon
        self.raw = torch.full_like(epsilon, 2 * fraction - 1).requires_grad_()

    def __call__(self, x, t, **cond):
        return torch.cat([self.epsilon, self.raw], 1)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("step", [1, 500, 999])
def test_ddpm_bound_is_the_divergence_of_two_gaussians(step, fraction):
    path = create_objective({"name": "ddpm", "learn_sigma": True})
    torch.manual_seed(0)
    x0, noise = torch.rand(2, 3, 4, 4).double() * 2 - 1, torch.randn(2, 3, 4, 4).double()
    times = double(step, step)
    net = Epsilon(noise + 0.1 * torch.randn_like(noise), fraction)
    net.epsilon.requires_grad_()
    net.dtype = torch.float64
    loss = loss_map(path, net, x0, noise, times)
    bits = (loss - (net.epsilon - noise) ** 2).detach()

    beta, abar, before = path.chain.betas[step], path.chain.abar[step], path.chain.abar[step - 1]
    tilde = beta * (1 - before) / (1 - abar)
    x = path.corrupt(x0, noise, times)
    clean = (x - (1 - abar).sqrt() * net.epsilon) / abar.sqrt()

    def posterior(x0):
        return (before.sqrt() * beta * x0 + (1 - beta).sqrt() * (1 - before) * x) / (1 - abar)

    variance = torch.exp(fraction * beta.log() + (1 - fraction) * tilde.log())
    exact = kl_divergence(Normal(posterior(x0), tilde.sqrt()), Normal(posterior(clean), variance.sqrt()))
    assert torch.allclose(bits, exact.detach() / math.log(2), rtol=1e-6, atol=1e-9)
    # The bound must not train the mean (improved DDPM, section 4).
    grads = torch.autograd.grad(loss.sum(), [net.epsilon, net.raw])
    assert torch.allclose(grads[0], 2 * (net.epsilon - noise).detach())
    assert grads[1].abs().sum() > 0


def test_ddpm_bound_at_step_0_is_a_likelihood_of_8_bit_values():
    from experiments.diffusion.ddpm import discretised_nll

    levels = (torch.arange(256, dtype=torch.float64) / 127.5) - 1
    mean, log_std = torch.tensor(0.1, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
    total = torch.exp(-discretised_nll(levels, mean, log_std)).sum()
    assert float(total) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "options", "log_mean", "log_std"),
    [("edm", {}, -1.2, 1.2), ("flow", {}, 0.0, 1.0), ("flow", {"mean": -0.5, "std": 0.7}, -0.5, 0.7)],
)
def test_training_times_have_their_distribution(name, options, log_mean, log_std):
    path = create_objective({"name": name, **options})
    times = path.times(Draws(0, 3, torch.arange(20000))).double()
    values = times.log() if name == "edm" else torch.logit(times)
    assert float(values.mean()) == pytest.approx(log_mean, abs=0.04)
    assert float(values.std()) == pytest.approx(log_std, abs=0.03)


def test_uniform_times_and_shift():
    flow = create_objective({"name": "flow", "times": "uniform"})
    draws = Draws(0, 3, torch.arange(20000))
    times = flow.times(draws)
    assert float(times.mean()) == pytest.approx(0.5, abs=0.01) and times.max() < 1
    moved = create_objective({"name": "flow", "times": "uniform", "shift": 3}).times(draws)
    assert torch.allclose(moved, 3 * times / (1 + 2 * times))
    steps = create_objective("ddpm").times(draws)
    assert steps.min() == 0 and steps.max() == 999 and torch.equal(steps, steps.floor())


def test_training_times_of_a_sample_do_not_depend_on_its_batch():
    path = create_objective("edm")
    whole = path.times(Draws(0, 3, torch.arange(8)))
    assert torch.equal(whole[5:], path.times(Draws(0, 3, torch.arange(5, 8))))


def test_learned_variance_and_channels_must_agree():
    with pytest.raises(ValueError, match="learn_sigma of both must agree"):
        path = create_objective({"name": "ddpm", "learn_sigma": True})
        loss_map(path, zero, torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, 2, 2), torch.zeros(1))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("emd", "did you mean edm"),
        ({"name": "edm", "sigma_mn": 1}, "did you mean sigma_min"),
        ({"name": "edm", "rho": -1}, "objective.rho=-1: expected a number > 0"),
        ({"name": "edm", "sigma_max": 0.001}, "expected a value below objective.sigma_max=0.001"),
        ({"name": "ddpm", "steps": 2.5}, "objective.steps=2.5: expected an integer >= 2"),
        ({"name": "edm", "sigma_max": float("inf")}, "objective.sigma_max=inf: expected a finite number"),
        ({"name": "flow", "reverse": "no"}, "objective.reverse=no: expected true or false"),
        (3, "objective=3: expected a name, or a mapping with a name"),
    ],
)
def test_wrong_options_say_what_to_type(value, says):
    with pytest.raises(UserError, match=says):
        create_objective(value)


def test_options_come_from_hydra_too():
    from omegaconf import OmegaConf

    values = OmegaConf.create({"name": "edm", "p_mean": -0.4, "rho": 5})
    assert create_objective(values).options == EDMOptions(p_mean=-0.4, rho=5.0)
    chosen = parse_named(GUIDANCE, "guidance", OmegaConf.create({"name": "routed", "weak": 0.8}))
    assert chosen.weak == 0.8 and parse_named(GUIDANCE, "guidance", chosen) is chosen


@given(st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 0.99), st.floats(0, 0.99), st.floats(0, 1))
def test_rates_run_monotonically_from_start_to_end(shape, start, end, progress):
    text = f"{start!r}" if shape == "constant" else f"{shape}:{start!r}:{end!r}"
    rate = rate_over_steps(text, "rate")
    last = start if shape == "constant" else end
    assert rate.at(0) == pytest.approx(start, abs=1e-12) and rate.at(1) == pytest.approx(last, abs=1e-12)
    low, high = sorted((start, last))
    assert low - 1e-12 <= rate.at(progress) <= high + 1e-12
