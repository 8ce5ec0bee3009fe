"""The oracle of routing: routed blocks equal dense blocks under masking semantics, at the kept tokens.

Every case runs in float64, values and gradients of the input, the modulation and every weight, against the
plain references in `tests/reference.py`. The mutations at the end break the code in known ways and
ask the same comparison to fail.
"""

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import backbones
from backbones import registry
from routing.layout import Layout
from routing.options import RoutingOptions, only_rate
from routing.rng import Draws
from routing.route import MODES, Route
from routing.routed_pass import Routing

GRID, BATCH, WIDTH, DEPTH = (4, 6), 2, 32, 4
N = GRID[0] * GRID[1]
ROUTE = "1-2@0.5"

# The architectures of experiment=zigma, dis and diffusion-rwkv.
ZIGMA = {"mixer": "mamba1", "mixers": 1, "scan": "zigzag"}
DIS = {"mixer": "mamba1", "mixers": 1, "scan": "raster", "condition": "prefix", "skips": True}
DIFFUSION_RWKV = {"ratio": 4, "wkv": "rank", "skips": True}

# Family options under test; the first case of each family is its default.
CASES = {
    "dit": [{}, {"rope": True, "qk_norm": True}],
    "mamba": [
        {},
        {"conv": "none"},
        {"scan": "zigzag"},
        {"scan": "bidirectional"},
        {"gap": "decay"},
        {"gap": "dt"},
        {"mixer": "mamba1"},
        {"mixer": "mamba1", "conv": "none", "gap": "dt", "scan": "bidirectional"},
        {"attention": 2},
        ZIGMA,
        DIS,
    ],
    "lightningdit": [{}],
    "rwkv7": [{}, {"missing": "zero"}, {"missing": "nearest"}],
    "rwkv": [{}, {"missing": "zero"}, {"missing": "nearest"}, {"attention": [2]}, DIFFUSION_RWKV],
}
ALL = [(name, options) for name, cases in CASES.items() for options in cases]
# What a table compares, with and without a convolution.
MAIN = [("dit", {}), ("mamba", {}), ("mamba", {"conv": "none"}), ("rwkv", {})]
# Every family whose result depends on the order of its tokens.
ORDERED = [(n, {}) for n in CASES if n not in ("dit", "lightningdit")] + [MAIN[2]]


def label(value):
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "default"
    return None


def build(name, options, dtype=torch.float64, seed=0, **shape):
    """A model whose blocks do something (weights drawn anew, none of them zero)."""
    torch.manual_seed(seed)
    shape = {"depth": DEPTH, "width": WIDTH, "heads": 2, "input_size": GRID, "in_channels": 1} | shape
    model = backbones.create(name, "T/1", **shape, **options).to(dtype)
    with torch.no_grad():
        for p in model.stack.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def drawn(prefix, dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, prefix + N, WIDTH, generator=g, dtype=dtype)
    cond = [torch.randn(BATCH, 6, 1, WIDTH, generator=g, dtype=dtype) / 2 for _ in range(DEPTH)]
    probe = torch.randn(BATCH, prefix + N, WIDTH, generator=g, dtype=dtype)
    return x, cond, probe


def routing(mode="random", ids=None, route=ROUTE, shared=False):
    draws = Draws(seed=3, step=5, index=torch.arange(BATCH))
    return Routing(Route.parse(route), RoutingOptions(selection=mode, shared=shared), draws, ids)


def masks(out, prefix):
    """Presence (B, T) of each segment, prefix included."""
    found = []
    for layout in out.inner:
        rows = layout.mask().expand(BATCH, -1)
        found.append(torch.cat([torch.ones(BATCH, prefix, dtype=torch.bool), rows], dim=1))
    return found


def gradients(y, probe, model, x, cond):
    leaves = [x, *cond, *model.stack.parameters()]
    return torch.autograd.grad((y * probe).sum(), leaves, allow_unused=True)


def compare(model, prefix, plan, dense=reference.run_stack, **changes):
    """Assert values and gradients of the routed stack against the masked dense reference."""
    x, cond, probe = drawn(prefix)
    for leaf in (x, *cond):
        leaf.requires_grad_()
    out = model.stack(x, tuple(cond), Layout(GRID, prefix=prefix), plan)
    segments = changes.pop("segments", plan.route.resolve(DEPTH).segments)
    kept = [(s.start, s.end, m) for s, m in zip(segments, masks(out, prefix), strict=True)]
    want = dense(model.stack.blocks, x, cond, GRID, prefix, kept, **changes)
    torch.testing.assert_close(out.x, want, rtol=1e-9, atol=1e-9)
    ours, theirs = (gradients(y, probe, model, x, cond) for y in (out.x, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("name", "options"), ALL, ids=label)
def test_routed_is_masked_dense(name, options):
    compare(build(name, options), 3, routing())


# The options that are drawn; every other family has its defaults.
OPTIONS = {
    "dit": {"rope": st.booleans()},
    "mamba": {
        "scan": st.sampled_from(["alternate", "zigzag", "bidirectional"]),
        "conv": st.sampled_from(["true", "none"]),
        "gap": st.sampled_from(["off", "decay", "dt"]),
        "mixer": st.sampled_from(["mamba2", "mamba1"]),
        "chunk": st.sampled_from([3, 8, 64]),
        "attention": st.sampled_from([0, 2]),
    },
    "rwkv": {"missing": st.sampled_from(["self", "zero", "nearest"]), "key_norm": st.just(False)},
}
FAMILIES = st.one_of(
    st.fixed_dictionaries({"name": st.just(name), **OPTIONS.get(name, {})}) for name in registry.names()
)


@st.composite
def subsets(draw):
    """A grid, a prefix and one subset per sample, in any order."""
    grid = draw(st.tuples(st.integers(1, 5), st.integers(2, 5)))
    total = grid[0] * grid[1]
    keep = draw(st.integers(1, total))
    rows = [draw(st.permutations(range(total)))[:keep] for _ in range(2)]
    return grid, draw(st.integers(0, 2)), torch.tensor(rows)


@settings(max_examples=15, deadline=None)
@given(FAMILIES, subsets(), st.integers(0, 2**16))
def test_any_routed_stack_is_the_masked_dense_one(options, where, seed):
    """On grids, prefixes, subsets (one for each sample, in any order) and options that hypothesis makes up."""
    grid, prefix, ids = where
    shape = {"depth": 3, "width": 16, "input_size": grid}
    model = build(options.pop("name"), options, seed=seed, **shape)
    total = prefix + grid[0] * grid[1]
    x = torch.randn(2, total, 16, dtype=torch.float64)
    cond = tuple(torch.randn(2, 6, 1, 16, dtype=torch.float64) / 2 for _ in range(3))
    got = model.stack(x, cond, Layout(grid, prefix=prefix), Routing(Route.parse("1-2"), ids=ids)).x
    present = torch.ones(2, total, dtype=torch.bool)
    present[:, prefix:] = torch.zeros_like(present[:, prefix:]).scatter(1, ids, True)
    want = reference.run_stack(model.stack.blocks, x, cond, grid, prefix, [(1, 2, present)])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("random", "unsorted")])
def test_every_selection(mode):
    compare(build("mamba", {}), 2, routing(mode, route=f"1-2@{only_rate(mode) or 0.5}"))


@pytest.mark.parametrize(("name", "options"), MAIN, ids=label)
def test_two_routes_and_a_shared_subset(name, options):
    compare(build(name, options), 0, routing(route="0-0@0.25+2-3@0.75", shared=True))


@pytest.mark.parametrize("options", [{}, {"attention": [0]}], ids=label)
@pytest.mark.parametrize("route", ["0-1", "1-3@0.75"])
def test_values_of_the_first_block_travel_with_the_tokens(options, route):
    """RWKV-7 carries them through routes; a route over the first block writes them inside it."""
    compare(build("rwkv7", options), 2, routing(route=route))


@pytest.mark.parametrize(("name", "options"), MAIN, ids=label)
def test_dense_is_the_reference(name, options):
    compare(build(name, options), 2, routing(route="none"))


@pytest.mark.parametrize(("dtype", "prefix"), [(torch.float32, 3), (torch.float64, 0)])
@pytest.mark.parametrize(("name", "options"), ALL, ids=label)
def test_keep_all_is_bitwise_dense(name, options, dtype, prefix, moves):
    model = build(name, options, dtype)
    x, cond, _ = drawn(prefix, dtype)
    layout = Layout(GRID, prefix=prefix)
    dense = model.stack(x, tuple(cond), layout).x
    assert not moves
    everything = torch.arange(N).expand(BATCH, -1)
    kept = model.stack(x, tuple(cond), layout, routing(ids=everything)).x
    assert moves == ["gather", "scatter"]
    assert torch.equal(kept, dense)


# Relative L2 error of bf16 autocast against float32 over the whole stack; measured about half.
BF16_ERROR = 0.02


@pytest.mark.parametrize(("name", "options"), ALL, ids=label)
def test_bf16_autocast_stays_close(name, options):
    model = build(name, options, torch.float32)
    x, cond, _ = drawn(2, torch.float32)
    plan = routing()
    layout = Layout(GRID, prefix=2)
    want = model.stack(x, tuple(cond), layout, plan).x
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model.stack(x, tuple(cond), layout, plan).x
    assert got.dtype == torch.float32
    error = (got - want).norm() / (want - x).norm()
    assert 0 < error < BF16_ERROR


# Mutations: each breaks one thing, and the comparison must notice.


@pytest.mark.parametrize(("name", "options"), [(n, {}) for n in CASES], ids=label)
def test_mutation_route_end_off_by_one(name, options):
    model = build(name, options)
    wrong = Route.parse("1-3@0.5").resolve(DEPTH).segments
    with pytest.raises(AssertionError):
        compare(model, 0, routing(), segments=wrong)


@pytest.mark.parametrize(("name", "options"), ORDERED, ids=label)
def test_mutation_scan_order_lost(name, options, monkeypatch):
    """Kept tokens in a random order inside the route, as the released code leaves them."""
    subset = Layout.subset

    def unsorted(self, ids, shuffle=None):
        layout = subset(self, ids, shuffle)
        order = torch.randperm(layout.ids.shape[1], generator=torch.Generator().manual_seed(0))
        layout.shuffle = order.expand_as(layout.ids)
        return layout

    model = build(name, options)
    compare(model, 0, routing())
    monkeypatch.setattr(Layout, "subset", unsorted)
    with pytest.raises(AssertionError):
        compare(model, 0, routing())


@pytest.mark.parametrize(("name", "options"), ORDERED, ids=label)
def test_mutation_sort_removed(name, options, monkeypatch):
    """Every sort of `Layout` does nothing: tokens are stored, and scanned, in the order of their ids."""
    model = build(name, options)
    ids = torch.stack([torch.randperm(N)[: N // 2] for _ in range(BATCH)])
    compare(model, 0, routing(ids=ids))
    made = Layout.__init__

    def unsorted(self, grid, ids=None, *rest, **named):
        made(self, grid, ids, *rest, **named)
        self.ids = ids

    def as_stored(self, name):
        return torch.arange(self.length).expand(BATCH, -1)

    monkeypatch.setattr(Layout, "__init__", unsorted)
    monkeypatch.setattr(Layout, "_permutation", as_stored)
    with pytest.raises(AssertionError):
        compare(model, 0, routing(ids=ids))


@pytest.mark.parametrize("policies", [("self", "zero"), ("zero", "nearest"), ("nearest", "self")])
def test_mutation_missing_neighbour_policy_swapped(policies):
    model = build("rwkv", {"missing": policies[0]})
    compare(model, 0, routing(), missing=policies[0])
    with pytest.raises(AssertionError):
        compare(model, 0, routing(), missing=policies[1])
