"""The presets zigma, dis and diffusion-rwkv: parameter counts, long skips across routes, prefix conditioning."""

import pytest
import reference
import test_backbones_oracle as oracle
import torch

import backbones
from backbones.cost import cost
from experiments.config import load
from routing.routed_pass import Tokens

SKIPS = [("mamba", oracle.DIS), ("rwkv", oracle.DIFFUSION_RWKV), ("dit", {"skips": True})]

# Overrides, and parameters in millions that were counted by instantiating the authors' code (4-channel latents of
# 32x32, patch 2, 1000 classes).
PUBLISHED = {
    "zigma": [
        ("size=S/2 backbone.width=368", 31.8),
        ("size=B/2", 134.8),
        ("size=B/2 backbone.depth=48", 267.9),
        ("size=L/2 backbone.depth=48", 473.8),
    ],
    "dis": [
        ("size=S/2 backbone.width=368", 29.1),
        ("size=B/2", 121.2),
        ("size=B/2 backbone.depth=49", 231.4),
        ("size=L/2 backbone.depth=49", 407.3),
        ("size=L/2 backbone.depth=49 backbone.width=1536", 907.0),
    ],
    "diffusion-rwkv": [
        ("size=S/2 backbone.depth=13", 39.3),
        ("size=S/2", 74.8),
        ("size=S/2 backbone.width=512", 132.6),
        ("size=B/2 backbone.depth=37", 439.4),
        ("size=L/2 backbone.depth=37", 780.3),
    ],
}
ROWS = [(name, *row) for name, rows in PUBLISHED.items() for row in rows]


def options(name, words="size=T/4"):
    """Size and backbone options of a preset, as a run composes them."""
    config = load([f"experiment={name}", "data=digits", *words.split()])
    return config.size, config.backbone.arguments()


@pytest.mark.parametrize(("name", "words", "millions"), ROWS)
def test_published_parameter_counts(name, words, millions):
    size, arguments = options(name, words)
    count = cost(size=size, num_classes=1000, **arguments).params
    assert count / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tested"),
    [("zigma", oracle.ZIGMA), ("dis", oracle.DIS), ("diffusion-rwkv", oracle.DIFFUSION_RWKV)],
)
def test_the_oracle_has_the_presets_options(name, tested):
    _, arguments = options(name)
    assert {key: arguments[key] for key in tested} == tested


def test_a_block_of_zigma_is_one_mixer_on_the_next_of_eight_paths():
    _, arguments = options("zigma")
    model = backbones.create(size="T/4", in_channels=1, input_size=8, **arguments)
    paths = [block.scans for block in model.stack.blocks]
    assert paths == [(f"zigzag:{i % 8}",) for i in range(24)]
    assert model.modulate.project.out_features == 24 * 3 * model.width


# --- long skips -------------------------------------------------------------------------------------


# Of 4 blocks, 0 is joined to 3 and 1 to 2: routes that hold the first of a pair, the second, both, or none of one.
# Around 2-2, block 0's output is carried past a route that begins with another state.
@pytest.mark.parametrize("route", ["0-0", "1-3", "0-2", "1-2", "2-2", "0-0@0.25+2-3@0.75"])
@pytest.mark.parametrize(("name", "case"), SKIPS, ids=oracle.label)
def test_long_skips_across_a_route_are_masked_dense(name, case, route):
    oracle.compare(oracle.build(name, case), 2, oracle.routing(route=route))


@pytest.mark.parametrize(("name", "case"), SKIPS, ids=oracle.label)
def test_mutation_skip_of_bypassing_tokens_lost(name, case, monkeypatch):
    """A token that bypassed the storing block has its own state as skip; zeros are noticed."""
    model = oracle.build(name, case)
    oracle.compare(model, 0, oracle.routing(route="0-1"))
    monkeypatch.setattr("routing.routed_pass.SKIP", "none of the keys")
    with pytest.raises(AssertionError):
        oracle.compare(model, 0, oracle.routing(route="0-1"))


def test_mutation_skip_not_gathered_by_the_routes_ids(monkeypatch):
    model = oracle.build("dit", {"skips": True})
    oracle.compare(model, 0, oracle.routing(route="2-3"))
    gather = Tokens.gather

    def first_rows(self, subset):
        inner = gather(self, subset)
        for key, value in self.state.items():
            inner.state[key] = value[:, : inner.x.shape[1]]
        return inner

    monkeypatch.setattr(Tokens, "gather", first_rows)
    with pytest.raises(AssertionError):
        oracle.compare(model, 0, oracle.routing(route="2-3"))


def test_an_odd_number_of_blocks_has_a_middle_one_without_a_skip():
    model = backbones.create("dit", "T/4", depth=5, in_channels=1, input_size=8, skips=True)
    blocks = model.stack.blocks
    kinds = [type(block).__name__ for block in blocks]
    assert kinds == [*["LongSkipBlock"] * 2, "DiTBlock", *["LongSkipBlock"] * 2]
    assert [blocks[i].key for i in (0, 1, 3, 4)] == ["skip.0", "skip.1", "skip.1", "skip.0"]
    assert [blocks[i].join is None for i in (0, 1, 3, 4)] == [True, True, False, False]


# --- time and class as tokens -----------------------------------------------------------------------


@pytest.mark.parametrize("classes", [0, 5])
def test_prefix_conditioning_against_its_definition(classes):
    torch.manual_seed(0)
    model = backbones.create(
        "mamba", "T/1", depth=3, width=32, in_channels=1, input_size=(4, 6), num_classes=classes,
        mixers=1, scan="raster", mixer="mamba1", condition="prefix", skips=True,
    ).double()  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x, t = torch.randn(2, 1, 4, 6, dtype=torch.float64), torch.tensor([0.3, 7.0]).double()
    y = torch.tensor([1, 4]) if classes else None

    # Time and class: two tokens before the grid's, which have positions.
    rates = torch.exp(-torch.log(torch.tensor(10000.0).double()) * torch.arange(16) / 16)
    waves = torch.cat([(t[:, None] * rates).cos(), (t[:, None] * rates).sin()], dim=1)
    hidden = reference.silu(reference.linear(model.time.mlp[0], waves))
    assert hidden.shape == (2, 4 * 32)
    front = [reference.linear(model.time.mlp[2], hidden)]
    if classes:
        front.append(model.labels.table.weight[y])
    grid = reference.linear(model.patches.project, x.flatten(2).transpose(1, 2)) + model.positions
    tokens = torch.cat([torch.stack(front, 1), grid], dim=1)

    # Blocks x + gate f(LayerNorm(x) (1 + scale) + shift), the same for all samples.
    norms = model.modulate
    gate = torch.full((32,), 3**-0.5, dtype=torch.float64)
    cond = []
    for i in range(3):
        rows = torch.stack([norms.shift[i, 0], norms.scale[i, 0], gate])
        cond.append(rows[:, None].expand(2, 3, 1, 32))
    out = reference.run_stack(model.stack.blocks, tokens, cond, (4, 6), len(front))

    # The head alone is modulated by both.
    modulation = reference.linear(model.head.modulate.project, reference.silu(sum(front)))
    shift, scale = modulation.chunk(2, dim=-1)
    normal = reference.layer_norm(out[:, len(front) :])
    rows = reference.linear(model.head.project, normal * (1 + scale[:, None]) + shift[:, None])
    want = rows.transpose(1, 2).reshape(2, 1, 4, 6)
    assert model.prefix == len(front)
    torch.testing.assert_close(model(x, t, y), want, rtol=1e-6, atol=1e-7)
