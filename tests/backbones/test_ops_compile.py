"""Under torch.compile every block is one graph, with the same numbers."""

import pytest
import torch

import backbones
from backbones import registry
from experiments.components import compile_blocks
from routing import Draws, Route, Routing
from routing.layout import Layout
from routing.stack import prepare

FAMILIES = registry.names()
SLOW = [pytest.param(name, {}, marks=pytest.mark.slow) for name in FAMILIES if name != "dit"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo warns of every cached function.
@pytest.mark.parametrize(("name", "options"), [("dit", {}), ("mamba", {"mixers": 1}), *SLOW])
def test_a_block_is_one_graph(name, options):
    """fullgraph=True raises at the first break."""
    model = backbones.create(name, "T/2", input_size=8, depth=2, num_classes=0, **options)
    block = model.stack.blocks[0]
    rows = [torch.randperm(16, generator=torch.Generator().manual_seed(i))[:7] for i in range(2)]
    layout = Layout((4, 4)).subset(torch.stack(rows))
    prepare([block], layout)
    torch.manual_seed(0)
    cond, x = torch.randn(2, 3 * options.get("mixers", 2), 1, 64), torch.randn(2, 7, 64, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: block(x, cond, layout), backend="aot_eager", fullgraph=True)
    fast, plain = compiled(x), block(x, cond, layout)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (fast, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, and raises it here
# The first block of a family that hands tensors on differs from the others.
@pytest.mark.parametrize("name", [name for name in FAMILIES if not registry.find(name).carries])
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
