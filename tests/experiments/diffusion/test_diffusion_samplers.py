"""Every sampler against data whose exact denoiser is known."""

import math

import pytest
import torch
from oracles import GAUSSIAN, MIXTURE, Mixture, Oracle, denoiser

from experiments.diffusion import create_guidance, create_objective, create_sampler
from experiments.diffusion.objective import Prediction
from experiments.diffusion.samplers import Euler, Heun, TwoStage
from experiments.evaluation import generate
from experiments.options.sampler import SAMPLERS, EulerOptions, HeunOptions

OBJECTIVES = ("edm", "flow", "ddpm")
# Enough steps for each that the method's own error is below the sampling error of N images.
STEPS = {"heun": 60, "euler": 200, "churn": 80, "sde": 250, "ddpm": 400, "ddim": 200}
SIT_FORMS = ("sigma", "constant", "SBDM", "linear", "decreasing", "increasing-decreasing")
N = 1500


def draw(objective_name, sampler, data, n=N, **options):
    objective = create_objective(objective_name)
    if sampler == "churn":
        options = {"churn_noise": 1.0, **options}  # any other value adds variance on purpose
    walk = create_sampler({"name": sampler, "steps": STEPS[sampler], **options}, objective)
    net = Oracle(objective, data)
    images = generate(net, objective, walk, create_guidance(), torch.arange(n), batch=n)
    assert images.shape == (n, 2, 1, 1) and images.dtype == torch.float32
    return images.flatten(1).double()


@pytest.mark.parametrize(
    ("objective", "sampler", "options"),
    [("flow", name, {}) for name in SAMPLERS]
    + [("ddpm", "ddim", {"eta": eta}) for eta in (0.5, 1.0)]
    + [("flow", "sde", {"diffusion": form, "strength": 0.5}) for form in ("constant", "SBDM")]
    # Few steps: stable near the data too.
    + [(objective, "sde", {"strength": 4.0, "steps": 40}) for objective in ("edm", "ddpm")],
)
def test_gaussian_has_the_right_mean_and_covariance(objective, sampler, options):
    x = draw(objective, sampler, GAUSSIAN, **options)
    error = GAUSSIAN.covariance.diagonal().sqrt() / math.sqrt(N)
    assert ((x.mean(0) - GAUSSIAN.mean).abs() < 4 * error).all()
    # A covariance estimate of a Gaussian has standard error at most sqrt(2 / N) of the variances.
    assert (x.T.cov() - GAUSSIAN.covariance).abs().max() < 5 * math.sqrt(2 / N) * 0.25


@pytest.mark.parametrize("sampler", STEPS)
@pytest.mark.parametrize("objective", ["edm", "ddpm"])
def test_mixture_has_the_right_weights(objective, sampler):
    x = draw(objective, sampler, MIXTURE)
    left = (x[:, 0] < -0.4).double()
    assert abs(left.mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / N)
    for inside, k in ((left == 1, 0), (left == 0, 1)):
        spread = MIXTURE.covariances[k].diagonal()
        assert ((x[inside].mean(0) - MIXTURE.means[k]).abs() < 5 * (spread / inside.sum()).sqrt()).all()
        assert torch.allclose(x[inside].var(0), spread, rtol=0.25)


@pytest.mark.parametrize("last", ["mean", "tweedie", "euler"])
@pytest.mark.parametrize("form", SIT_FORMS)
def test_sde_is_sits_sampler(form, last):
    """SiT's `sample_sde` written out: s = 1 - t runs from noise to data, alpha = s, sigma = 1 - s."""
    steps, last_size, norm = 25, 0.04, 0.7
    generator = torch.Generator().manual_seed(0)
    first, *fresh = torch.randn(steps, 3, 2, 1, 1, generator=generator, dtype=torch.float64)

    def velocity(x, s):  # any network
        return torch.tanh(x) * (1 + s) - 0.3 * x

    def score(x, s):
        return (s * velocity(x, s) - x) / (1 - s)

    def coefficient(s):
        alpha_ratio, sigma, d_sigma = 1 / s if s else math.inf, 1 - s, -1
        return {
            "constant": lambda: norm,
            "SBDM": lambda: norm * (alpha_ratio * sigma**2 - sigma * d_sigma),
            "sigma": lambda: norm * sigma,
            "linear": lambda: norm * (1 - s),
            "decreasing": lambda: 0.25 * (norm * math.cos(math.pi * s) + 1) ** 2,
            "increasing-decreasing": lambda: norm * math.sin(math.pi * s) ** 2,
        }[form]()

    def drift(x, s):
        return velocity(x, s) + coefficient(s) * score(x, s)

    start, end = 1e-3 if form == "SBDM" else 0.0, 1 - last_size
    times = torch.linspace(start, end, steps, dtype=torch.float64).tolist()
    length, x = times[1] - times[0], first
    for s, noise in zip(times[:-1], fresh, strict=True):
        wiener = math.sqrt(length) * noise
        x = x + drift(x, s) * length + math.sqrt(2 * coefficient(s)) * wiener
    sits = {
        "mean": x + drift(x, end) * last_size,
        "tweedie": x / end + (1 - end) ** 2 / end * score(x, end),
        "euler": x + velocity(x, end) * last_size,
    }[last]

    options = {"name": "sde", "steps": steps, "diffusion": form, "strength": norm, "last": last}
    walk = create_sampler({**options, "last_step": last_size}, create_objective("flow"))

    def denoise(x, t, step, evaluation):
        return Prediction(x + t * velocity(x, 1 - t))

    ours = walk.sample(denoise, walk.start(first), lambda i, x: fresh[i])
    assert walk.steps == steps
    assert (ours - sits).abs().max() < 1e-6 * sits.abs().max()


WEIGHTS, MEANS, SPREADS = (0.3, 0.7), (-0.6, 0.5), (0.3, 0.5)


def cdf(objective, time, x):
    """Distribution function of a mixture of two Gaussians, noised to a native time."""
    time = torch.tensor(time, dtype=torch.float64)
    alpha, sigma = float(objective.alpha(time)), float(objective.sigma(time))
    below = torch.zeros_like(x)
    for weight, mean, spread in zip(WEIGHTS, MEANS, SPREADS, strict=True):
        width = math.sqrt(alpha**2 * spread**2 + sigma**2)
        below += weight * torch.special.ndtr((x - alpha * mean) / width)
    return below


def exact_end(objective, walk, denoise, x):
    """Where the exact ODE from x ends after the last interval, which every ODE sampler takes by Euler.

    In one dimension the probability-flow ODE keeps the order of points, so it keeps their quantile.
    """
    first, last = walk.times[0], walk.times[-2]
    probability = cdf(objective, first, x)
    low, high = torch.full_like(x, -100.0), torch.full_like(x, 100.0)
    for _ in range(80):  # bisection
        middle = (low + high) / 2
        is_below = cdf(objective, last, middle) < probability
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return denoise(middle, last).x0


def convergence(objective, sampler, options=HeunOptions):
    """Return by how many powers of two the error falls, each time that the number of steps doubles.

    On a mixture: on a single Gaussian an error term may cancel (the midpoint method then measures 3).
    """
    data = Mixture(WEIGHTS, [[mean] for mean in MEANS], [[[spread**2]] for spread in SPREADS])
    path = create_objective({"name": objective, **({"steps": 1025} if objective == "ddpm" else {})})
    net = Oracle(path, data)
    noise = torch.tensor([-1.3, 0.4, 2.0], dtype=torch.float64).reshape(-1, 1, 1, 1)

    errors, denoise = [], denoiser(path, net)
    for steps in (129, 257, 513):
        walk = sampler(options(steps=steps), path)
        start = walk.start(noise)
        end = walk.sample(denoise, start, lambda i, x: torch.zeros_like(x))
        errors.append(float((end - exact_end(path, walk, denoise, start)).abs().max()))
    return [math.log2(a / b) for a, b in zip(errors, errors[1:], strict=False)]


class Midpoint(TwoStage):
    node = 1 / 2


class Ralston(TwoStage):
    node = 2 / 3


class ShareOfTime(Midpoint):
    """The bug that the order finds: the weight for the node in time."""

    def _step(self, denoise, x, i, time):
        after = self.times[i + 1]
        if i == self.steps - 1:
            return super()._step(denoise, x, i, time)
        middle = (time + after) / 2
        halfway = self._move(x, self._slope(x, denoise(x, time).x0, time), time, middle)
        return self._move(x, self._slope(halfway, denoise(halfway, middle).x0, middle), time, after)


@pytest.mark.parametrize(
    ("sampler", "options", "order"),
    [(Euler, EulerOptions, 1), (Heun, HeunOptions, 2), (Midpoint, HeunOptions, 2), (Ralston, HeunOptions, 2)],
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_order_of_convergence(objective, sampler, options, order):
    """At every number of steps: an error of order 1 may be too small to be seen at few of them."""
    assert convergence(objective, sampler, options) == pytest.approx([order, order], abs=0.2)


def test_a_wrong_weight_costs_the_order():
    assert min(convergence("ddpm", ShareOfTime)) < 1.5


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_evaluations_are_those_made(sampler, objective):
    walk = create_sampler({"name": sampler, "steps": 5}, create_objective(objective))
    evaluations = []

    def denoise(x, time, step, evaluation):
        assert evaluation == len(evaluations)
        evaluations.append((step, time))
        return Prediction(0.5 * x)

    walk.sample(denoise, torch.ones(1, 2, 1, 1), lambda i, x: torch.ones_like(x))
    assert evaluations == walk.evaluations()


def test_ddpm_grid_is_dits_respacing():
    times = create_sampler("ddpm", create_objective("ddpm")).times
    assert len(times) == 251 and times[0] == 999 and times[-2:] == [0, -1]
    assert times[-3] == 4.0 and len(set(times)) == 251


def test_churn_zero_is_heun_and_sde_without_noise_is_euler():
    assert torch.equal(draw("edm", "churn", MIXTURE, n=20, churn=0), draw("edm", "heun", MIXTURE, n=20, steps=80))
    sde = draw("flow", "sde", MIXTURE, n=20, strength=0, last_step=0.0, steps=200)
    assert torch.allclose(sde, draw("flow", "euler", MIXTURE, n=20), atol=1e-9)
