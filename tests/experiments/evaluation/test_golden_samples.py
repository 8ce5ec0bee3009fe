"""Samples of every sampler, objective and guidance, and what the bundled models predict, against written numbers.

A sample is pinned by projections: its sums weighted with fixed cosines. Another value anywhere changes them.

REGENERATE=1 python -m pytest tests/experiments/evaluation/test_golden_samples.py writes the file anew, after a change on
purpose; REGENERATE=missing adds the cases that it does not have, and leaves the other numbers as they are.
"""

import pytest
import torch
from suite import DATA, RESULTS, create_model, golden_numbers, pretrained, registered, sample

GOLDEN = DATA / "golden_samples.json"
MODELS = sorted(path.stem for path in (RESULTS / "models").glob("*.safetensors"))
SEEDS = (3, 14)
# Relative to the largest projection. Kernels for AVX2 and AVX-512, with and without the native operators, differed by
# 1.2e-5 under autoguidance, which subtracts two models, and by 2e-6 at most elsewhere.
CLOSE = 5e-5
# Few steps: an error of the first is still there in the last.
STEPS = 3
GUIDANCE = {
    "none": {"name": "none"},
    "cfg": {"name": "cfg", "scale": 2.0},
    "cfg one channel": {"name": "cfg", "scale": 2.0, "channels": 1},
    "interval": {"name": "interval"},
    "apg": {"name": "apg"},
    "icg": {"name": "icg", "scale": 2.0},
    "routed": {"name": "routed", "strong": "0", "weak": "0.5"},
    "routed nested": {"name": "routed", "strong": "0.25", "weak": "0.75", "subsets": "nested"},
    "routed null class": {"name": "routed", "strong": "0", "weak": "cosine:0.6:0", "null_class": True},
    "autoguidance": {"name": "autoguidance", "scale": 2.0},
    "pathdrop": {"name": "pathdrop"},
}
# A sampler that so few steps do not tell from another one gets its own number: {"name": "ralston", "steps": 2}.
SAMPLERS = {
    "euler": {"name": "euler"},
    "heun": {"name": "heun"},
    "churn": {"name": "churn"},
    "sde": {"name": "sde"},
    "sde mean": {"name": "sde", "last": "mean", "diffusion": "decreasing", "strength": 0.5},
    "ddpm": {"name": "ddpm"},
    "ddpm large": {"name": "ddpm", "variance": "large"},
    "ddim": {"name": "ddim"},
    "ddim eta": {"name": "ddim", "eta": 0.5},
}
OBJECTIVES = {
    "edm": {"name": "edm"},
    "flow": {"name": "flow"},
    "flow reversed": {"name": "flow", "reverse": True, "time_scale": 1.0},
    "ddpm": {"name": "ddpm"},
    "ddpm learned variance": {"name": "ddpm", "learn_sigma": True},
}
# SiT defines its other diffusions and its mean as the last step for paths of flow matching alone.
PAIRS = [
    (objective, sampler)
    for objective in OBJECTIVES
    for sampler in SAMPLERS
    if sampler != "sde mean" or objective.startswith("flow")
]
FAMILIES = ("dit", "mamba", "rwkv")


def projections(values):
    flat = values.double().flatten()
    index = torch.arange(len(flat), dtype=torch.float64)
    weighted = [(flat * torch.cos(rate * index)).sum() / len(flat) ** 0.5 for rate in (0.0, 0.37, 1.1, 2.3)]
    return [float(value) for value in [*weighted, flat.std()]]


def wavy(family="dit", **settings):
    """A small model whose weights come from no generator: cosines of their index, no gate at zero."""
    shape = {"num_classes": 5, "in_channels": 2, "input_size": 4}
    model = create_model(family, "T/1", **{**shape, "depth": 4, "width": 32, "heads": 2, **settings})
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            index = torch.arange(weight.numel(), dtype=torch.float64).reshape(weight.shape)
            weight.copy_(0.15 * torch.cos(index * (1.3 + 0.017 * number) + number))
    return model.eval()


@pytest.fixture(scope="module")
def bundled():
    return {name: pretrained(RESULTS / "models" / f"{name}.safetensors").eval() for name in MODELS}


def sample_objective(objective, sampler, guidance):
    model = wavy(learn_sigma=objective == "ddpm learned variance")
    options = {"steps": STEPS, **SAMPLERS[sampler]}
    return sample(model, OBJECTIVES[objective], options, GUIDANCE[guidance], torch.tensor(SEEDS), "1-2")


def sample_bundled(family, guidance, bundled):
    model, weak = bundled[f"{family}_2-8"], None
    if guidance == "autoguidance":
        weak = bundled[f"{family}_none"]
    if guidance == "pathdrop":  # needs SPRINT's fusion, which no bundled model has
        model = wavy(family, fuse="1-2@0.75")
    if guidance == "cfg one channel":  # bundled models have no more
        model = wavy(family)
    heun = {"name": "heun", "steps": STEPS}
    return sample(model, "edm", heun, GUIDANCE[guidance], torch.tensor(SEEDS), "2-8", weak)


def predict(model):
    """What a model answers to fixed pictures, times and classes, the null class among them."""
    height, width = model.config["input_size"]
    index = torch.arange(3 * model.in_channels * height * width, dtype=torch.float64)
    pictures = torch.sin(0.61 * index).float().reshape(3, model.in_channels, height, width)
    with torch.no_grad():
        return model(pictures, torch.tensor([-0.8, 0.1, 0.7]), torch.tensor([0, 7, model.num_classes]))


def cases(bundled):
    """Return a function for every case by its name."""
    found = {}
    for objective, sampler in PAIRS:
        found[f"{objective}, {sampler}"] = (sample_objective, objective, sampler, "none")
    for family in FAMILIES:
        for guidance in GUIDANCE if family == "dit" else ("cfg", "routed"):
            found[f"{family}, guidance {guidance}"] = (sample_bundled, family, guidance, bundled)
    for name in MODELS:
        found[f"bundled {name}"] = (predict, bundled[name])
    return found


@pytest.fixture(scope="module")
def golden(bundled):
    calls = cases(bundled)
    return golden_numbers(GOLDEN, calls, lambda name: projections(calls[name][0](*calls[name][1:])))


def check(golden, bundled, *beginnings):
    chosen = {name: case for name, case in cases(bundled).items() if name.startswith(beginnings)}
    assert chosen
    for name, (make, *rest) in chosen.items():
        scale = max(map(abs, golden[name]))
        assert projections(make(*rest)) == pytest.approx(golden[name], rel=0, abs=CLOSE * scale), name


@pytest.mark.parametrize(("objective", "sampler"), PAIRS)
def test_samples_of_every_objective_and_sampler(objective, sampler, golden, bundled):
    check(golden, bundled, f"{objective}, {sampler}")


@pytest.mark.parametrize("family", FAMILIES)
def test_guided_samples_of_the_bundled_models(family, golden, bundled):
    check(golden, bundled, f"{family}, guidance")


@pytest.mark.parametrize("name", MODELS)
def test_bundled_models_open_and_predict_what_they_did(name, golden, bundled):
    check(golden, bundled, f"bundled {name}")


def test_every_registered_sampler_and_guidance_has_a_case(golden, bundled):
    assert {settings["name"] for settings in SAMPLERS.values()} == set(registered("sampler"))
    assert {settings["name"] for settings in GUIDANCE.values()} == set(registered("guidance"))
    assert {settings["name"] for settings in OBJECTIVES.values()} == set(registered("objective"))
    assert set(golden) == set(cases(bundled))


def test_the_numbers_tell_the_cases_apart(golden):
    def behaviour(name):
        # DDIM without noise is Euler's method, and only DDPM's own sampler reads a learned variance.
        name = name.replace(", ddim", ", euler") if name.endswith(", ddim") else name
        return name if name.endswith(", ddpm") else name.replace(" learned variance", "")

    names = list(golden)
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            scale = max(map(abs, golden[one]))
            same = golden[one] == pytest.approx(golden[other], rel=0, abs=4 * CLOSE * scale)
            assert same == (behaviour(one) == behaviour(other)), (one, other)
