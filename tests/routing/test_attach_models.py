"""`routing.attach` on the real classes of diffusers and timm, with small random weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import routing
from routing import AttachError, Selection, UserError
from routing.attached import passes

pytest.importorskip("diffusers")
pytest.importorskip("timm")

import timm
from foreign_models import BATCH, IMAGE, MODELS, build_model, recorded, run


def hooks(model):
    return sum(
        len(table)
        for module in model.modules()
        for key, table in vars(module).items()
        if "hooks" in key and table
    )


def gradients(output, model):
    return torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_itself_in_evaluation_and_where_all_tokens_stay(name):
    model, blocks, inputs, options = build_model(name)
    with torch.no_grad():
        evaluated = run(model.eval(), inputs)
    dense = run(model.train(), inputs)
    expected = gradients(dense, model)
    with routing.attach(blocks, "1-2@0.5", **options) as attached:
        with torch.no_grad():
            assert torch.equal(run(model.eval(), inputs), evaluated)
        assert not torch.equal(run(model.train(), inputs), dense)
        layout = attached.inner[0]
        routable = layout.full_length - layout.prefix
        assert layout.tokens == routable // 2
        attached.ids = torch.randperm(routable)
        complete = run(model, inputs)
        assert torch.equal(complete, dense)
        actual = gradients(complete, model)
    for a, b in zip(expected, actual, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["DiT", "ViT"])
def test_a_step_can_be_repeated_and_a_mode_set(name):
    model, blocks, inputs, _ = build_model(name)
    dense = run(model, inputs)
    with routing.attach(blocks, "1-3@0.75") as attached:
        first, second = run(model, inputs), run(model, inputs)
        assert not torch.allclose(first, dense, atol=1e-4) and not torch.equal(first, second)
        assert attached.step == 2
        with attached.mode("always"):
            attached.step = 0
            assert torch.equal(run(model.eval(), inputs), first)
        with attached.mode("never"):
            assert torch.equal(run(model.train(), inputs), dense)


@pytest.mark.parametrize("name", ["Flux", "ViT"])
def test_no_trace_is_left(name):
    model, blocks, inputs, _ = build_model(name)
    before, keys, expected = hooks(model), list(model.state_dict()), run(model, inputs)
    attached = routing.attach(blocks, "1-3")
    assert hooks(model) > before and list(model.state_dict()) == keys
    run(model, inputs)
    attached.remove()
    attached.remove()
    assert hooks(model) == before and torch.equal(run(model, inputs), expected)
    assert attached.step == 1  # for the next attachment
    with pytest.raises(ZeroDivisionError), routing.attach(blocks, "1-3"):
        raise ZeroDivisionError
    assert hooks(model) == before


class Masked(nn.Module):
    """A timm attention that ignores the keys that a mask leaves out."""

    def __init__(self, attention, mask):
        super().__init__()
        self.attention, self.mask = attention, mask

    def forward(self, x, **_):
        return self.attention(x, attn_mask=self.mask[:, None, None, :].expand(-1, 1, x.shape[1], -1))


@pytest.mark.parametrize("mode", ["random", "rows", "blocks"])
def test_routed_equals_dense_with_masked_keys(mode):
    """The oracle: at the tokens that stay, a routed span is the dense one with a key mask."""
    model, _, inputs, _ = build_model("ViT")
    model = model.double()
    inputs = {"x": inputs["x"].double()}
    start, end = model.blocks[1], model.blocks[4]
    attached = routing.attach(model, "1-3", selection=mode)
    with attached, recorded(start, prepend=True) as entering, recorded(end) as leaving:
        model(**inputs)
    inner = attached.inner[0]
    present = torch.cat((torch.ones(BATCH, 3, dtype=torch.bool), inner.mask()), 1)
    assert inner.ids.shape == (BATCH, IMAGE // 2)
    (x,), (routed,) = entering, leaving
    dense = x
    for i in (1, 2, 3):
        block = copy.deepcopy(model.blocks[i])
        block.attn = Masked(block.attn, present)
        dense = block(dense)
    move = routing.Layout((4, 4), prefix=3).move_to(inner)
    assert torch.allclose(move.take(routed), move.take(dense), atol=1e-12)
    assert not torch.allclose(move.take(start(x)), move.take(dense), atol=1e-3)


def test_rotary_tables_go_with_their_tokens():
    """Flux at the tokens that stay equals Flux that was only ever given those tokens."""
    model, blocks, inputs, _ = build_model("Flux")
    ids = torch.tensor([1, 2, 7, 8, 11, 14])
    with routing.attach(blocks, "0-4") as attached:
        attached.ids = [ids.flip(0)]
        routed = run(model, inputs)
    few = {**inputs, "hidden_states": inputs["hidden_states"][:, ids], "img_ids": inputs["img_ids"][ids]}
    assert torch.allclose(routed[:, ids], run(model, few), atol=1e-5)


def test_a_shared_rotary_table_shares_the_subset():
    model, blocks, inputs, _ = build_model("Flux")
    with routing.attach(blocks, "1-4") as attached:
        run(model, inputs)
        assert attached.inner[0].ids.shape == (1, IMAGE // 2)
    of_each_sample = routing.attach(blocks, "1-4", selection=Selection("random"))
    with of_each_sample, pytest.raises(AttachError, match=r"selection=Selection\(shared=True\)"):
        run(model, inputs)
    with routing.attach(blocks, "1-4", selection=Selection("rows", shared=True), grid=(4, 4)) as attached:
        run(model, inputs)
        assert (attached.inner[0].ids.view(2, 4) % 4 == torch.arange(4)).all()


def test_the_model_says_its_grid_and_prefix():
    for name, prefix in (("DiT", 0), ("SD3", 0), ("ViT", 3)):
        model, _, inputs, _ = build_model(name)
        with routing.attach(model, "1-3", selection="columns") as attached:
            assert attached.grid == (4, 4) and attached.prefix == prefix
            run(model, inputs)
            columns = attached.inner[0].ids % 4
            assert all(row.unique().numel() == 2 for row in columns)


def test_the_mode_of_the_block_where_a_segment_starts_counts():
    """As a frozen trunk may be in evaluation mode."""
    model, blocks, inputs, _ = build_model("DiT")
    blocks[0].eval(), blocks[3].eval()
    with routing.attach(blocks, "1-2+3-4@0.75") as attached:
        run(model, inputs)
        assert [layout.tokens for layout in attached.inner] == [IMAGE // 2] and attached.step == 1
        blocks[1].eval(), blocks[4].train()
        run(model, inputs)
        assert attached.step == 1
        run(model.train(), inputs)
        assert [layout.tokens for layout in attached.inner] == [IMAGE // 2, IMAGE // 4]


class LongSkip(nn.Module):
    """As HunyuanDiT's: a late block gets the tokens of an early one, which a route has replaced by a subset."""

    def forward(self, hidden_states, skip=None):
        return hidden_states if skip is None else hidden_states + skip


def timm_model(name):
    return timm.create_model(name, img_size=64)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda m: routing.attach(m.blocks, "1-3"), "prefix=1"),
        (lambda m: routing.attach(m, "1-9"), "the list has 5 blocks"),
        (lambda m: routing.attach(m, "1-3", selection="unsorted"), "have none"),
        (lambda m: routing.attach(m, "1-3", when="later"), "training, always, never"),
        (lambda m: routing.attach(m.blocks, "1-3", prefix=3, selection="rows"), "needs the grid"),
        (lambda m: routing.attach(nn.Linear(2, 2), "1-3"), "attach to the list itself"),
        (lambda m: routing.attach([*m.blocks, m.blocks[1]], "1-3", prefix=3), "block 5 is block 1 once more"),
        (lambda m: routing.attach(m, "1-3", grid=(-4, -4)), "grid=(-4, -4): expected (rows, columns)"),
        (lambda m: routing.attach("blocks", "1-2"), "blocks: expected a model or its list of blocks"),
        (lambda m: routing.attach(m, "1-3", prefix=1.5), "prefix=1.5: expected"),
        (lambda m: routing.attach(m, "1-3", seed=1.5), "seed=1.5: expected an integer"),
        (lambda m: routing.attach(m, "1-3", extra="pos"), "extra='pos': expected names in a sequence"),
        (lambda m: routing.attach(m, "1-3", extra=["attn_mas"]), "did you mean attn_mask"),
        (lambda m: routing.attach([nn.TransformerEncoderLayer(8, 2, 8)], "0-0"), "build it with batch_first=True"),
        (lambda m: routing.attach([LongSkip(), LongSkip()], "0-1"), "block 0 (LongSkip) takes a long skip"),
        (lambda m: routing.attach([nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3))], "0-0"), "Sequential.1 is a convolution"),
        (lambda m: routing.attach(timm_model("swin_tiny_patch4_window7_224").layers[0].blocks, "0-1", prefix=0), "windows"),
        (lambda m: routing.attach(timm_model("mixer_s32_224"), "1-2"), "MixerBlock.mlp_tokens is a linear layer over tokens"),
        # Made anew for any length.
        (lambda m: routing.attach(timm_model("convit_tiny"), "1-2"), "Block.attn is a table of relative positions"),
        (lambda m: routing.attach(timm_model("tnt_s_patch16_224").blocks, "1-2", prefix=0), "carries a second sequence, of pixels"),
    ],
)
def test_what_cannot_be_attached(make, part):
    model = build_model("ViT")[0]
    with pytest.raises(UserError) as caught:
        make(model)
    assert part in str(caught.value) and hooks(model) == 0


def test_a_pass_that_is_refused_leaves_nothing_behind():
    model, _, inputs, _ = build_model("ViT")
    with routing.attach(model, "1-3"), pytest.raises(AttachError, match="attn_mask"):
        model(inputs["x"], attn_mask=torch.ones(1, 1, 19, 19, dtype=torch.bool))
    with routing.attach(model, "1-3") as attached:
        attached.ids = [torch.arange(16)]
        assert torch.equal(run(model, inputs), run(model.eval(), inputs))


def test_a_copy_is_dense_in_evaluation_and_silent_after_removal():
    model, _, inputs, _ = build_model("ViT")
    attached = routing.attach(model, "1-3")
    ema = copy.deepcopy(model).eval()
    dense = run(ema, inputs)
    assert not torch.equal(run(model, inputs), dense) and torch.equal(run(ema, inputs), dense)
    attached.remove()
    assert torch.equal(run(ema.train(), inputs), run(model, inputs))


def test_a_dense_pass_is_recomputed_densely():
    model, _, inputs, _ = build_model("ViT")
    grads = []
    with routing.attach(model, "1-3") as attached:
        for on in (False, True):
            model.set_grad_checkpointing(on)
            run(model, inputs)  # a routed pass whose gradient nobody asks for
            with attached.mode("never"):
                loss = run(model, inputs).square().mean()
            grads.append(torch.autograd.grad(loss, list(model.blocks.parameters())))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore")  # dynamo hides its own warnings only from the printer
def test_compiled_blocks_are_blocks():
    model, _, inputs, _ = build_model("DiT")
    blocks = nn.ModuleList([torch.compile(block, backend="eager") for block in model.transformer_blocks])
    model.transformer_blocks = blocks
    with routing.attach(blocks, "1-3") as attached:
        out = run(model, inputs)
        assert attached.inner[0].tokens == IMAGE // 2
        attached.ids = [torch.arange(IMAGE)]
        kept = run(model, inputs)
    assert torch.allclose(kept, run(model, inputs), atol=1e-6) and not torch.allclose(out, kept, atol=1e-4)


def test_each_process_draws_for_its_own_samples(monkeypatch):
    """Two processes with half of a batch each keep the tokens that one keeps with all of it."""
    model, _, _, _ = build_model("ViT")
    x, subsets = torch.randn(6, 3, 16, 16), []
    for rank, samples in ((0, x), (0, x[:3]), (1, x[3:])):
        monkeypatch.setattr(passes, "_rank", lambda rank=rank: rank)
        with routing.attach(model, "1-2@0.75") as attached:
            model(samples)
            subsets.append(attached.inner[0].ids)
    assert torch.equal(subsets[0], torch.cat(subsets[1:]))
