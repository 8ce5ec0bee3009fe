"""Our paths and samplers against those of diffusers, an independent implementation."""

import numpy as np
import pytest
import torch
from oracles import denoiser

from experiments.diffusion import create_objective, create_sampler

diffusers = pytest.importorskip("diffusers")

STEPS = 200  # of the chain and of the sampler: diffusers knows no uneven strides
START = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(2, 3, 2, 2)


def epsilon(x, t):
    """Any smooth function of image and time."""
    return torch.sin(x) * 0.8 + 0.1 * torch.cos(torch.as_tensor(t, dtype=x.dtype) / 50)


def fraction(x, t):
    return torch.sigmoid(x + torch.as_tensor(t, dtype=x.dtype) / 100)


def with_variance(x, t):
    return torch.cat([epsilon(x, t), 2 * fraction(x, t) - 1], 1)


def noise(i, x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(i), dtype=x.dtype)


def sample(walk, network, start=START):
    """Return what one of our samplers makes of `start` with a network of image and time."""

    def net(x, t):
        return network(x, t[0])

    net.dtype = torch.float64
    return walk.sample(denoiser(walk.objective, net), start, noise)


def ours(sampler, learn_sigma=False, **options):
    path = create_objective({"name": "ddpm", "steps": STEPS, "learn_sigma": learn_sigma})
    walk = create_sampler({"name": sampler, "steps": STEPS, **options}, path)
    return sample(walk, with_variance if learn_sigma else epsilon)


def theirs(scheduler, learn_sigma=False, **options):
    scheduler.set_timesteps(STEPS)
    assert scheduler.timesteps.tolist() == list(range(STEPS - 1, -1, -1))
    x = START
    for i, t in enumerate(scheduler.timesteps):
        out = with_variance(x, t) if learn_sigma else epsilon(x, t)
        generator = torch.Generator().manual_seed(i)
        x = scheduler.step(out, t, x, generator=generator, **options).prev_sample
    return x


CHAIN = {
    "num_train_timesteps": STEPS,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "clip_sample": False,
}


def close(a, b):
    # diffusers keeps its tables in float32.
    assert (a - b).abs().max() < 2e-4 * b.abs().max()


@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_ddim(eta):
    scheduler = diffusers.DDIMScheduler(**CHAIN, set_alpha_to_one=True)
    close(ours("ddim", eta=eta), theirs(scheduler, eta=eta))


@pytest.mark.parametrize(("variance", "name"), [("small", "fixed_small"), ("large", "fixed_large")])
def test_ddpm(variance, name):
    scheduler = diffusers.DDPMScheduler(**CHAIN, variance_type=name)
    close(ours("ddpm", variance=variance), theirs(scheduler))


def test_ddpm_with_learned_variance():
    scheduler = diffusers.DDPMScheduler(**CHAIN, variance_type="learned_range")
    close(ours("ddpm", learn_sigma=True), theirs(scheduler, learn_sigma=True))


def test_ddpm_chain():
    scheduler = diffusers.DDPMScheduler(**{**CHAIN, "num_train_timesteps": 1000})
    path = create_objective("ddpm")
    assert np.allclose(path.abar, scheduler.alphas_cumprod, rtol=1e-4)
    x, eps = START.float(), torch.randn(2, 3, 2, 2)
    time = torch.tensor([3, 700])
    assert torch.allclose(path.corrupt(x, eps, time.float()), scheduler.add_noise(x, eps, time), atol=1e-5)


def test_edm_grid_and_preconditioning():
    scheduler = diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, rho=7.0)
    scheduler.set_timesteps(40)
    walk = create_sampler({"name": "euler", "steps": 40}, create_objective("edm"))
    assert np.allclose(walk.times, scheduler.sigmas, rtol=1e-5)

    def network(x, t):
        return epsilon(x, 100 * t)

    x = START * 80
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t)
        x = scheduler.step(network(scaled, float(t)), t, x).prev_sample.double()
    close(sample(walk, network, START * 80), x)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_euler(shift):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    sigmas = np.linspace(1, 1 / 25, 25)
    scheduler.set_timesteps(sigmas=sigmas)
    walk = create_sampler({"name": "euler", "steps": 25, "shift": shift}, create_objective("flow"))
    assert np.allclose(walk.times, scheduler.sigmas, atol=1e-6)

    def network(x, t):
        return epsilon(x, t / 10)

    x = START
    for t in scheduler.timesteps:
        x = scheduler.step(network(x, float(t)), t, x).prev_sample
    close(sample(walk, network), x.double())
