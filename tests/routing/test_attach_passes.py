"""An attached route under torch.compile and under activation checkpointing of any grouping."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import routing
from routing import AttachError

pytest.importorskip("timm")

from timm.models import vision_transformer

BATCH, TOKENS = 3, 17


def vit(depth=6):
    torch.manual_seed(0)
    model = vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, in_chans=3, num_classes=7, embed_dim=16, depth=depth, num_heads=2
    )
    return model.double().train()


def images(seed):
    return torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.filterwarnings("ignore")  # dynamo hides its own warnings only from the printer
@pytest.mark.parametrize(
    ("depth", "per_block"),
    [(5, True), pytest.param(12, False, marks=pytest.mark.slow), pytest.param(12, True, marks=pytest.mark.slow)],
)
def test_compiled_models_of_any_depth_equal_eager_ones(depth, per_block):
    """Ten calls, dense ones between: more than dynamo recompiles one function for."""
    route = "1-3" if depth == 5 else "2-8"
    torch._dynamo.reset()
    eager, model = vit(depth), vit(depth)
    expected, attached = routing.attach(eager, route), routing.attach(model, route)
    compiled = model
    if per_block:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager")
    for seed in range(10):
        training = seed % 3 != 2
        eager.train(training), model.train(training)
        a, b = eager(images(seed)), compiled(images(seed))
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), seed
        assert torch.equal(expected.inner[0].ids, attached.inner[0].ids)
        for out in (a, b):
            out.square().sum().backward()
    assert expected.step == attached.step == 7
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.allclose(p.grad, q.grad, rtol=1e-8)
    attached.remove()
    assert torch.allclose(compiled(images(3)), model(images(3)), rtol=1e-9, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per_block", [False, True], ids=["model", "blocks"])
def test_compiled_and_checkpointed(per_block):
    torch._dynamo.reset()
    grads = []
    for compile_it in (False, True):
        model = vit(5)
        model.set_grad_checkpointing()
        with routing.attach(model, "1-3"):
            for module in model.blocks if per_block else [model]:
                if compile_it:
                    module.compile(backend="aot_eager")
            (model(images(0)).square().sum() + model(images(1)).pow(3).sum()).backward()
        grads.append([p.grad for p in model.parameters()])
    same(*grads)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_one_graph_for_all_is_refused_with_the_reason():
    torch._dynamo.reset()
    model = vit(4)
    with routing.attach(model, "1-2"), pytest.raises(RuntimeError, match="leave fullgraph=True out"):
        torch.compile(model, backend="eager", fullgraph=True)(images(0))
    torch._dynamo.reset()


def grouped(blocks, x, groups, reentrant=False, frozen=0):
    """Run all blocks, those of each group in one checkpoint, the `frozen` first without gradients."""
    i = 0
    while i < len(blocks):
        size = next((len(group) for group in groups if group[0] == i), 0)
        if i < frozen:
            with torch.no_grad():
                x = blocks[i](x)
        elif size:
            part = nn.Sequential(*blocks[i : i + size])
            x = checkpoint(part, x, use_reentrant=reentrant)
        else:
            x = blocks[i](x)
        i += size or 1
    return x


def same(gradients, others):
    for a, b in zip(gradients, others, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


GROUPS = {
    "each": [[i] for i in range(6)],
    "pairs": [[0, 1], [2, 3], [4, 5]],
    "halves": [[0, 1, 2], [3, 4, 5]],
    "two of them": [[3], [4]],
    "the end": [[4, 5]],
    "the middle": [[2, 3, 4]],
    "all": [list(range(6))],
}


@pytest.mark.parametrize(
    ("route", "name", "early_stop"),
    [
        *((route, name, True) for route in ("1-4", "0-5", "0-1+2-4") for name in GROUPS),
        ("1-4", "halves", False),
        ("0-1+2-4", "two of them", False),
    ],
)
def test_gradients_under_checkpoints_of_any_grouping(route, name, early_stop):
    from torch.utils.checkpoint import set_checkpoint_early_stop

    g = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, BATCH, TOKENS, 16, generator=g).double()
    grads = []
    for groups in ([], GROUPS[name]):
        model = vit()
        with routing.attach(model, route) as attached, set_checkpoint_early_stop(early_stop):
            # Two passes wait for their gradients, then one alone.
            a, b = grouped(model.blocks, first, groups), grouped(model.blocks, second, groups)
            (a.square().sum() + b.pow(3).sum()).backward()
            grouped(model.blocks, first, groups).pow(3).sum().backward()
            assert attached.step == 3  # recomputing is no new pass
        grads.append([p.grad for p in model.blocks.parameters()])
    same(*grads)


@pytest.mark.parametrize(
    ("groups", "refused"),
    [
        ([[0, 1, 2, 3, 4, 5]], False), ([[1, 2, 3, 4]], False), ([[2, 3]], False), ([[0], [1], [5]], False),
        ([[0, 1], [2, 3], [4, 5]], True), ([[1], [2], [3], [4]], True), ([[4]], True),
    ],
)  # fmt: skip
def test_reentrant_checkpoints_are_refused_where_a_gradient_would_be_lost(groups, refused):
    """That is where a checkpoint ends a route that began outside of it; a dense pass loses none."""
    x = torch.randn(2, BATCH, TOKENS, 16).double()

    def gradients(when, reentrant):
        model, given = vit(), x.clone().requires_grad_()
        with routing.attach(model, "1-4", when=when):
            sum(grouped(model.blocks, y, groups, reentrant).pow(3).sum() for y in given).backward()
        return [given.grad, *(p.grad for p in model.blocks.parameters())]

    same(gradients("never", False), gradients("never", True))
    if refused:
        with pytest.raises(AttachError, match="use_reentrant=False"):
            gradients("training", True)
    else:
        same(gradients("training", False), gradients("training", True))


def test_a_trunk_without_gradients_is_no_reentrant_checkpoint():
    x, grads = torch.randn(BATCH, TOKENS, 16).double(), []
    for groups in ([], GROUPS["each"]):
        model = vit()
        with routing.attach(model, "1-4"):
            grouped(model.blocks, x, groups, frozen=2).pow(3).sum().backward()
        grads.append([p.grad for p in model.blocks[2:].parameters()])
    same(*grads)


@pytest.mark.parametrize("saved", [[[1, 2], [3, 4]], [[2, 3], [4]]])
def test_interleaved_passes_and_a_left_out_end(saved):
    """The first pass gets its gradients last, and no pass runs the route's last block: it ends before the next."""
    grads = []
    for groups in ([], saved):
        model = vit()
        with routing.attach(model, "1-4") as attached:
            blocks = [block for i, block in enumerate(model.blocks) if i != 4]
            g = torch.Generator().manual_seed(1)
            x = torch.randn(4, BATCH, TOKENS, 16, generator=g).double().requires_grad_()
            a, b = grouped(blocks, x[0], groups), grouped(blocks, x[1], groups)
            assert a.shape == x[0].shape and attached.inner[0].tokens < TOKENS
            b.square().sum().backward()
            c = grouped(blocks, x[2], groups)
            a.square().sum().backward()
            c.square().sum().backward()
        grads.append([x.grad, *(p.grad for block in blocks for p in block.parameters())])
    same(*grads)


def test_one_input_of_two_waiting_passes_is_refused():
    model = vit()
    x = torch.randn(BATCH, TOKENS, 16).double().requires_grad_()
    with routing.attach(model, "1-4"):
        groups = GROUPS["halves"]
        for _ in range(2):  # one at a time is no question
            grouped(model.blocks, x, groups).sum().backward()
        total = grouped(model.blocks, x, groups).sum() + grouped(model.blocks, x, groups).sum()
        with pytest.raises(AttachError, match="call backward after each pass"):
            total.backward()


def test_a_pass_that_an_error_ended_inside_a_route_waits_for_nothing():
    model, x, grads = vit(), torch.randn(BATCH, TOKENS, 16).double().requires_grad_(), []
    for fails in (False, True):
        with routing.attach(model, "1-4") as attached:
            if fails:
                hook = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    grouped(model.blocks, x, GROUPS["each"])
                hook.remove()
                died, attached.step = attached._passes.current(), 0
            out = grouped(model.blocks, x, GROUPS["each"])
            assert not fails or not died.skipped  # what it held is free again
            grads.append(torch.autograd.grad(out.square().sum(), [x, *model.blocks.parameters()]))
    same(*grads)


def test_frozen_blocks_whose_tokens_are_gone_are_refused():
    model = vit()
    for block in model.blocks[:5]:
        block.requires_grad_(False)
    with routing.attach(model, "1-4"):
        out = grouped(model.blocks, torch.randn(BATCH, TOKENS, 16).double(), GROUPS["halves"])
        with pytest.raises(AttachError, match="checkpoint each block by itself"):
            out.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[], GROUPS["halves"]])
def test_nothing_is_kept_longer_than_the_graph(groups):
    model = vit()
    attached = routing.attach(model, "1-4")

    def step():
        out = grouped(model.blocks, torch.randn(BATCH, TOKENS, 16).double(), groups)
        passed = attached._passes.current()
        out.sum().backward()
        return passed

    for _ in range(5):
        passed = step()
        gc.collect()
        assert passed.skipped_refs and all(ref() is None for ref in passed.skipped_refs.values())
    assert len(attached._passes._seen) <= 6 and len(attached._passes._waiting) == 1
