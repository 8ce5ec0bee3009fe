"""Losses, gradient norms and average weights of the first five steps: nothing may change what is learnt unnoticed.

Every backbone, objective and training variant has a case. Each is a real run in this process; its numbers are those
of its own `metrics.jsonl` and `model.safetensors`.

REGENERATE=1 python -m pytest -n 0 tests/experiments/training/test_golden_losses.py writes the file anew, after a change
on purpose; REGENERATE=missing adds the cases that it does not have, and leaves the other numbers as they are.
"""

import json
import math

import pytest
from safetensors.numpy import load_file
from small import overrides
from suite import DATA, golden_numbers, registered, train

GOLDEN = DATA / "golden_losses.json"
# The gates of adaLN-zero open with the first updates; a large step opens them within five.
RUN = (
    "train.steps=5", "train.warmup=0", "train.lr=0.01", "train.ema=0.8", "train.log_every=1", "train.save_every=5",
    "backbone.heads=2", "sampler=euler", "sampler.steps=1", "guidance=none",
)  # fmt: skip
ROUTED = "route=1-2"
MASKED = ("route=0--1", "routing.reinsert=none")
DECODER = "backbone.decoder={depth: 1, width: 32, heads: 2}"
SPRINT = ("route=1-2@0.75", "routing.learned=fuse", "routing.path_drop=0.1", "routing.selection=quad")
CASES: dict[str, tuple[str, ...]] = {
    "dit none": ("route=none",),
    "dit 1-2": (ROUTED,),
    "mamba none": ("backbone=mamba", "route=none"),
    "mamba 1-2": ("backbone=mamba", ROUTED),
    "rwkv none": ("backbone=rwkv", "route=none"),
    "rwkv 1-2": ("backbone=rwkv", ROUTED),
    "rwkv7": ("backbone=rwkv7", ROUTED),
    "lightningdit": ("backbone=lightningdit", ROUTED),
    "mamba1": ("backbone=mamba", "backbone.mixer=mamba1", ROUTED),
    "mamba zigzag": ("backbone=mamba", "backbone.scan=zigzag", ROUTED),
    "mamba bidirectional": ("backbone=mamba", "backbone.scan=bidirectional", "backbone.gap=decay", ROUTED),
    "mamba hybrid": ("backbone=mamba", "backbone.attention=2", "backbone.conv=compact", ROUTED),
    "rwkv as released": ("backbone=rwkv", "backbone.wkv=rank", "backbone.missing=zero", ROUTED),
    "dit rope": ("backbone.rope=true", "backbone.qk_norm=true", ROUTED),
    "flow": ("objective=flow", ROUTED),
    "flow sit": ("experiment=sit", ROUTED),
    "flow lightningdit": ("objective=flow", "objective.cosine=1", "objective.shift=2", "objective.times=uniform"),
    "ddpm": ("objective=ddpm", ROUTED),
    "ddpm learned variance": ("experiment=dit_ddpm", "sampler.steps=1", ROUTED),
    "edm other noise": ("objective.p_mean=0.3", "objective.p_std=1.5", ROUTED),
    "sprint": SPRINT,
    "maskdit": (*MASKED, DECODER),
    "dropping": MASKED,
    "v1 ensemble": ("route=0-1+2-2", "train.loss=ensemble", "routing.reinsert=sum_input"),
    "v1 random end": ("route=0-2", "routing.random_end=true", "train.loss=ensemble"),
    "delayed removal": ("route=0-2", "routing.remove=after:1"),
    "no removal": ("route=0-2", "routing.remove=never"),
    "repa": (ROUTED, "train.encoder=random"),
    "stages": ("route=1-2/0.5:0-2/0.8:none",),
    "rate schedule": (ROUTED, "routing.schedule=linear:1:0"),
    "off after": (ROUTED, "routing.off_after=0.5"),
    "rows": (ROUTED, "routing.selection=rows"),
    "blocks shared": (ROUTED, "routing.selection=blocks", "routing.shared=true"),
    "unsorted": ("backbone=rwkv", ROUTED, "routing.selection=unsorted"),
    "unconditional": ("task=none", ROUTED),
    "optimiser": ("train.schedule=cosine", "train.warmup=2", "train.clip=0.5", "train.weight_decay=0.1", ROUTED),
    "seed 1": ("seed=1", ROUTED),
    "bf16": ("train.precision=bf16", ROUTED),
    "bf16 mamba": ("backbone=mamba", "train.precision=bf16", ROUTED),
    "bf16 residual": ("train.precision=bf16", "train.residual=bf16", ROUTED),
}  # fmt: skip
# The same step computed in another way: the losses of another case.
SAME = {
    "two micro-batches": ("dit 1-2", ("train.micro_batch=4", ROUTED)),
    "micro-batches of three": ("dit 1-2", ("train.micro_batch=3", ROUTED)),
    "recomputed activations": ("dit 1-2", ("routing.checkpoint=true", ROUTED)),
    "micro-batches of mamba": ("mamba 1-2", ("backbone=mamba", "train.micro_batch=4", ROUTED)),
}
# Float32 losses of AVX2 and AVX-512 kernels, with and without the native operators, differed by at most 2e-7. Under bf16
# a sum in another order can round to another value of 8 bits: 7e-5 in the loss, 5e-4 in the gradient norm.
CLOSE = {"loss": 1e-5, "grad_norm": 1e-4, "lr": 1e-12, "average weights": 1e-6}
CLOSE_BF16 = {"loss": 5e-4, "grad_norm": 5e-3, "lr": 1e-12, "average weights": 1e-5}
# The others run in the default suite: one of each backbone, objective and variant.
SLOW = (
    "mamba zigzag", "mamba bidirectional", "mamba hybrid", "rwkv as released", "dit rope", "flow lightningdit",
    "edm other noise", "v1 random end", "stages", "rate schedule", "off after", "rows", "blocks shared", "unsorted",
    "seed 1", "bf16 mamba", "bf16 residual", "micro-batches of three", "micro-batches of mamba", "flow sit",
)  # fmt: skip


def marked(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


def numbers(folder, words):
    run = train(overrides(folder, *RUN, *words))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = load_file(run / "model.safetensors")
    squares = sum(float((w.astype("float64") ** 2).sum()) for w in weights.values())
    return {
        "loss": [line["loss"] for line in lines],
        "grad_norm": [line["grad_norm"] for line in lines],
        "lr": [line["lr"] for line in lines],
        "average weights": [math.sqrt(squares)],
    }


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return golden_numbers(GOLDEN, CASES, lambda name: numbers(tmp_path_factory.mktemp("golden"), CASES[name]))


def check(values, expected, tolerances):
    for quantity, tolerance in tolerances.items():
        assert len(values[quantity]) == len(expected[quantity])
        assert values[quantity] == pytest.approx(expected[quantity], rel=tolerance, abs=0), quantity


@pytest.mark.parametrize("name", marked(CASES))
def test_first_steps(name, golden, tmp_path):
    values = numbers(tmp_path, CASES[name])
    assert name in golden, f"no numbers of {name!r} yet: run this file with REGENERATE=missing and -n 0"
    check(values, golden[name], CLOSE_BF16 if name.startswith("bf16") else CLOSE)


@pytest.mark.parametrize("name", marked(SAME))
def test_first_steps_computed_in_another_way(name, golden, tmp_path):
    other, words = SAME[name]
    check(numbers(tmp_path, words), golden[other], CLOSE)


def test_bf16_is_not_float32(golden):
    # Closer than its tolerance: that autocast was on shows in the numbers as they were written.
    one, other = golden["bf16"]["loss"], golden["dit 1-2"]["loss"]
    assert max(abs(a / b - 1) for a, b in zip(one, other, strict=True)) > 5 * CLOSE["loss"]


def test_every_registered_backbone_and_objective_has_a_case():
    words = {word for case in CASES.values() for word in case}
    backbones = {word.removeprefix("backbone=") for word in words if word.startswith("backbone=")}
    missing = set(registered("backbone")) - backbones - {"dit"}
    assert not missing, f"add a case of {missing} to CASES, then run this file with REGENERATE=missing and -n 0"
    assert {"objective=flow", "objective=ddpm", "experiment=dit_ddpm"} <= words
    assert set(registered("objective")) == {"edm", "flow", "ddpm"}


def test_the_numbers_tell_the_cases_apart(golden):
    names = [name for name in golden if not name.startswith("bf16")]
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            pairs = zip(golden[one]["loss"], golden[other]["loss"], strict=True)
            assert max(abs(a / b - 1) for a, b in pairs) > 5 * CLOSE["loss"], (one, other)
