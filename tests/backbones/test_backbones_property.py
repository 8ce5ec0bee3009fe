"""The masking oracle on grids, prefixes, subsets and options that hypothesis makes up."""

import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import backbones
from backbones import registry
from routing.layout import Layout
from routing.route import Route
from routing.segment import Routing

torch.set_num_threads(1)
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
    grid, prefix, ids = where
    torch.manual_seed(seed)
    shape = {"depth": 3, "width": 16, "heads": 2, "input_size": grid, "in_channels": 1}
    model = backbones.create(options.pop("name"), "T/1", **shape, **options).double()
    with torch.no_grad():
        for p in model.stack.parameters():
            p.add_(0.1 * torch.randn_like(p))
    total = prefix + grid[0] * grid[1]
    x = torch.randn(2, total, 16, dtype=torch.float64)
    cond = tuple(torch.randn(2, 6, 1, 16, dtype=torch.float64) / 2 for _ in range(3))
    plan = Routing(Route.parse("1-2"), ids=ids)
    got = model.stack(x, cond, Layout(grid, prefix=prefix), plan).x
    present = torch.ones(2, total, dtype=torch.bool)
    present[:, prefix:] = torch.zeros_like(present[:, prefix:]).scatter(1, ids, True)
    want = reference.run_stack(model.stack.blocks, x, cond, grid, prefix, [(1, 2, present)])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
