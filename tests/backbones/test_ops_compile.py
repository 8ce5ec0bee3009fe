"""Under torch.compile every op is a formula that compilers differentiate: the same numbers, one graph."""

import pytest
import torch

import backbones
from backbones.ops import biwkv, chunks, conv, shift, ssd
from experiments.training.build import compile_blocks
from routing import Draws, Route, Routing
from routing.layout import Layout


def draw(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()


def same(fast, plain, values):
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-11)
    g = torch.randn(fast.shape, generator=torch.Generator().manual_seed(9), dtype=fast.dtype)
    ours = torch.autograd.grad(fast, values, g)
    for a, b in zip(ours, torch.autograd.grad(plain, values, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("position", [None, [0, 1, 4, 5, 9, 11]])
def test_biwkv(position):
    k, v, w, u = draw(2, 6, 3), draw(2, 6, 3, seed=1), draw(3, seed=2), draw(3, seed=3)
    place = None if position is None else torch.tensor(position)
    formula = biwkv._formula(k, v, w / 12, torch.exp(u / 12), place, 12)
    same(formula, biwkv.reference(k, v, w, u, place, 12), (k, v, w, u))


def test_ssd_with_the_initialisation_that_overflows():
    x, B, C = draw(1, 32, 2, 4), draw(1, 32, 1, 4, seed=1), draw(1, 32, 1, 4, seed=2)
    dt = torch.full((1, 32, 2), 6.0, dtype=torch.float64, requires_grad=True)
    A, D = torch.full((2,), -16.0, dtype=torch.float64, requires_grad=True), draw(2, seed=3)
    packed = torch.cat((x.flatten(2), B.flatten(2), C.flatten(2)), -1)
    # exp(6 * 16 * 15) is infinite even in float64.
    formula = chunks.formula(packed, dt, dt * A, D, 16, 4)
    same(formula, ssd.reference(x, dt, A, B, C, D), (x, dt, A, B, C, D))


@pytest.mark.parametrize("position", [None, [0, 1, 3, 4, 9, 10]])
def test_conv(position):
    x, weight, bias = draw(2, 6, 3), draw(3, 4, seed=1), draw(3, seed=2)
    place = None if position is None else torch.tensor(position)
    table = None if place is None else conv.taps(place, 4)
    formula = conv._formula(x, weight.t().flip(0), bias, table)
    same(formula, conv.reference(x, weight, bias, place), (x, weight, bias))


def test_shift():
    x = draw(2, 14, 8)
    same(shift._padded(x, (3, 4), 2), shift.grid_shift(x, None, (3, 4), 2), (x,))


@pytest.mark.parametrize("kept", [pytest.param(16, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("name", ["dit", "mamba", "rwkv"])
def test_a_block_is_one_graph(name, kept):
    """fullgraph=True raises at the first break."""
    block = backbones.create(name, "T/2", input_size=8, depth=2, num_classes=0).stack.blocks[0]
    layout = Layout((4, 4))
    if kept < 16:
        rows = [torch.randperm(16, generator=torch.Generator().manual_seed(i))[:kept] for i in range(2)]
        layout = layout.subset(torch.stack(rows))
    cond = draw(2, 6, 1, 64).detach().float()
    x = draw(2, kept, 64).detach().float().requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: block(x, cond, layout), backend="aot_eager", fullgraph=True)
    fast, plain = compiled(x), block(x, cond, layout)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (fast, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, and raises it here
@pytest.mark.parametrize("name", ["dit", "mamba", "rwkv"])
def test_all_blocks_share_a_graph_for_each_number_of_tokens(name):
    """More than the limit of 8 graphs would leave the last of twelve blocks uncompiled."""
    model = backbones.create(name, "T/2", input_size=8, width=32, depth=12, num_classes=0)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(model.stack.blocks, backend="aot_eager")
    graphs = []
    for step in range(5):
        route = Route() if step < 2 else Route.parse("2-8")
        routing = Routing(route, draws=Draws(0, step, torch.arange(2)))
        model(torch.randn(2, 4, 8, 8), torch.rand(2), routing=routing).sum().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 2, 2, 2]
