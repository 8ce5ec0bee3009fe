"""In-context class tokens (JiT): against their definition on every family, in and across routes; counts; refusals."""

import pytest
import reference
import test_backbones_oracle as oracle
import torch
from torch import nn

import backbones
from backbones import BackboneError, registry
from backbones.context import with_context
from backbones.cost import cost, features_macs
from backbones.registry import model_config

COUNT = 3
# Option, first block with class tokens (of 4; null is a third of the depth) and route: dense, a route that begins
# before, at or after that block, and two of them.
CASES = [(None, 1, "none"), (0, 0, "0-1"), (2, 2, "1-2"), (3, 3, "2-3"), (2, 2, "0-0@0.25+2-3@0.75")]
# Families whose blocks hand per-token tensors on refuse class tokens.
FAMILIES = [name for name in registry.names() if not registry.find(name).carries]
MAIN = [*((name, {}) for name in FAMILIES), ("mamba", {"conv": "none"})]


def by_definition(blocks, x, cond, grid, prefix, segments, start):
    """Blocks before `start` see the image alone; the class tokens are put in front of it there."""
    for index, block in enumerate(blocks):
        block = getattr(block, "block", block)
        present = torch.ones(x.shape[:2], dtype=torch.bool)
        for first, last, kept in segments:
            if first <= index <= last:
                present = kept
        unseen = prefix if index < start else 0
        seen, tokens = present[:, unseen:], x[:, unseen:]
        tokens = reference.run_block(block, tokens, cond[index], seen, grid, prefix - unseen)
        x = torch.cat([x[:, :unseen], tokens], dim=1)
    return x


@pytest.mark.parametrize(("option", "start", "route"), CASES)
@pytest.mark.parametrize(("name", "options"), MAIN, ids=oracle.label)
def test_the_blocks_are_those_of_the_definition(name, options, option, start, route):
    options = options | {"context_tokens": COUNT, "context_start": option, "num_classes": 5}
    model = oracle.build(name, options)
    oracle.compare(model, COUNT, oracle.routing(route=route), by_definition, start=start)


def test_the_tokens_are_the_class_embedding_plus_a_position():
    torch.manual_seed(0)
    model = backbones.create("dit", "T/4", depth=3, in_channels=1, input_size=8, num_classes=5, context_tokens=4)
    x, t, y = torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([2, 5])  # 5 is no class
    tokens, _ = model.embed(x, t, y)
    assert tokens.shape[1] == 4 + model.num_tokens
    for sample, label in enumerate((2, 5)):
        for place in range(4):
            expected = model.labels.table.weight[label] + model.context.positions[place]
            torch.testing.assert_close(tokens[sample, place], expected, rtol=0, atol=0)
    assert 0.015 < model.context.positions.std() < 0.025
    (gradient,) = torch.autograd.grad(tokens[:, :4].sum(), model.context.positions)
    assert gradient.eq(2).all()  # of two samples
    unlabelled, _ = model.embed(x, t, None)
    torch.testing.assert_close(unlabelled[0, :4], tokens[1, :4], rtol=0, atol=0)


@pytest.mark.parametrize(("size", "depth", "millions"), [("B/16", 12, 131), ("L/16", 24, 459)])
def test_parameters_are_those_of_jit(size, depth, millions):
    """PAPER (arXiv 2511.13720, Table 9): with 32 tokens from block 4 of B and 8 of L on, bottleneck 128."""
    words = {"in_channels": 3, "input_size": 256, "bottleneck": 128, "num_classes": 1000}
    with_tokens = cost("lightningdit", size, **words, context_tokens=32).params
    assert with_tokens / 1e6 == pytest.approx(millions, rel=0.01)
    config = model_config("lightningdit", size, **words, context_tokens=32)
    assert config.context_block == depth // 3 == {12: 4, 24: 8}[depth]
    assert with_tokens - cost("lightningdit", size, **words).params == 32 * config.shape.width


def test_macs_count_the_tokens_from_their_block_on():
    words = {"depth": 6, "num_classes": 5, "input_size": 16}
    plain = cost("dit", "S/2", **words, route="1-4")
    tokens = cost("dit", "S/2", **words, route="1-4", context_tokens=8, context_start=3)
    assert plain.tokens == (64, 32, 32, 32, 32, 64)
    assert tokens.tokens == (64, 32, 32, 40, 40, 72)
    # Linear layers: 12 D^2 a token and block, three blocks of eight more tokens.
    extra = tokens.macs_dense_no_attention - plain.macs_dense_no_attention
    assert extra == 3 * 8 * 12 * 384**2
    config = model_config("dit", "S/2", **words, context_tokens=8, context_start=3)
    without = model_config("dit", "S/2", **words)
    for block, blocks_with_tokens in ((2, 0), (4, 2)):
        more = features_macs(config, block, mixing=False) - features_macs(without, block, mixing=False)
        assert more == blocks_with_tokens * 8 * 12 * 384**2


def test_blocks_that_would_lack_what_others_hand_on_are_refused():
    """Of a family that does not declare it."""
    block = nn.Identity()
    block.carries = ("v_first",)
    with pytest.raises(BackboneError, match="expected 0 for blocks that hand per-token tensors on"):
        with_context([block], 4, 1)
