"""Objectives against closed forms: conversions, targets, loss weights, minimisers."""

import math

import pytest
import torch
from oracles import GAUSSIAN, Oracle, loss_map
from torch.distributions import Normal, kl_divergence

from experiments.diffusion import create_objective
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


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_exact_denoiser_minimises_the_loss(name):
    path, n = create_objective(name), 4000
    torch.manual_seed(0)
    gaussian = torch.distributions.MultivariateNormal(GAUSSIAN.means[0], GAUSSIAN.covariances[0])
    x0 = gaussian.sample((n,)).reshape(n, 2, 1, 1)
    noise, times = torch.randn_like(x0), torch.full((n,), INSIDE[name], dtype=torch.float64)
    oracle = Oracle(path, GAUSSIAN)
    best = loss_map(path, oracle, x0, noise, times)
    assert best.shape == x0.shape
    # The mean loss rises by a change's square: far more than the sampling error of the difference.
    for worse in (lambda x, t: 1.1 * oracle(x, t), lambda x, t: oracle(x, t) + 0.1):
        assert loss_map(path, worse, x0, noise, times).mean() > best.mean()


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

    beta, abar, before = path.betas[step], path.abar[step], path.abar[step - 1]
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


def test_learned_variance_and_channels_must_agree():
    with pytest.raises(ValueError, match="learn_sigma of both must agree"):
        path = create_objective({"name": "ddpm", "learn_sigma": True})
        loss_map(path, zero, torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, 2, 2), torch.zeros(1))
