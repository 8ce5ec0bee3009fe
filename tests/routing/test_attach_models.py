"""`routing.attach` on the real classes of diffusers and timm, with small random weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import routing
from routing import AttachError, Selection, UserError

diffusers = pytest.importorskip("diffusers")
timm = pytest.importorskip("timm")

DEPTH, BATCH = 5, 3


def randomised(model, seed=0):
    """Replace zero-initialised gates and heads, so that every block does something."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08)
    return model.train()


def dit(depth=DEPTH):
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=depth,
        sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=2, dropout=0.0,
    )  # fmt: skip
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    g = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8, generator=g),
        "timestep": torch.tensor([1, 500, 900]),
        "class_labels": torch.tensor([1, 2, 3]),
    }
    return randomised(model), model.transformer_blocks, inputs, 16


def sd3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=DEPTH, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=12, caption_projection_dim=16,
        pooled_projection_dim=10, out_channels=4, pos_embed_max_size=8, dual_attention_layers=(2,),
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8, generator=g),
        "encoder_hidden_states": torch.randn(BATCH, 6, 12, generator=g),
        "pooled_projections": torch.randn(BATCH, 10, generator=g),
        "timestep": torch.tensor([1.0, 500.0, 900.0]),
    }
    return randomised(model), model.transformer_blocks, inputs, 16


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=3, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=12, pooled_projection_dim=10,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    inputs = {
        "hidden_states": torch.randn(BATCH, 16, 4, generator=g),
        "encoder_hidden_states": torch.randn(BATCH, 6, 12, generator=g),
        "pooled_projections": torch.randn(BATCH, 10, generator=g),
        "timestep": torch.tensor([0.1, 0.5, 0.9]),
        "img_ids": ids,
        "txt_ids": torch.zeros(6, 3),
    }
    return randomised(model), [*model.transformer_blocks, *model.single_transformer_blocks], inputs, 16


def vit():
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, in_chans=3, num_classes=7, embed_dim=16, depth=DEPTH, num_heads=2,
        class_token=True, reg_tokens=2,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    return randomised(model), model, {"x": torch.randn(BATCH, 3, 16, 16, generator=g)}, 16


def eva():
    model = timm.models.eva.Eva(
        img_size=16, patch_size=4, in_chans=3, num_classes=7, embed_dim=16, depth=DEPTH, num_heads=2,
        use_rot_pos_emb=True,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    return randomised(model), model, {"x": torch.randn(BATCH, 3, 16, 16, generator=g)}, 16


MODELS = {"eva": eva, "dit": dit, "sd3": sd3, "flux": flux, "vit": vit}


def run(model, inputs):
    out = model(**inputs)
    return out if isinstance(out, torch.Tensor) else out.sample


def hooks(model):
    return sum(
        len(table)
        for module in model.modules()
        for key, table in vars(module).items()
        if "hooks" in key and table
    )


@pytest.fixture(params=MODELS)
def case(request):
    return MODELS[request.param]()


def test_keeping_all_is_bitwise_the_original(case):
    model, blocks, inputs, n = case
    expected = run(model, inputs)
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()), allow_unused=True)
    with routing.attach(blocks, "1-3") as attached:
        attached.ids = [torch.randperm(n)]
        out = run(model, inputs)
        assert torch.equal(out, expected) and attached.inner[0].tokens == n
        again = torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)
    for a, b in zip(grads, again, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_training_routes_and_evaluation_is_dense(case):
    model, blocks, inputs, n = case
    dense = run(model, inputs)
    seen = []
    with routing.attach(blocks, "1-3@0.75") as attached:
        probe = attached_blocks(model)[2].register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(tokens_of(args, kwargs)), with_kwargs=True
        )
        first, second = run(model, inputs), run(model, inputs)
        assert not torch.allclose(first, dense, atol=1e-4) and not torch.equal(first, second)
        assert attached.step == 2 and attached.inner[0].tokens == n // 4
        attached.step = 0
        assert torch.equal(run(model, inputs), first)
        assert torch.equal(run(model.eval(), inputs), dense)
        with attached.mode("always"):
            attached.step = 0
            assert torch.equal(run(model, inputs), first)
        assert torch.equal(run(model, inputs), dense)
        with attached.mode("never"):
            assert torch.equal(run(model.train(), inputs), dense)
        extra = seen[0] - n // 4
        assert seen == [n // 4 + extra] * 3 + [n + extra, n // 4 + extra, n + extra, n + extra]
        probe.remove()


def attached_blocks(model):
    if hasattr(model, "blocks"):
        return model.blocks
    return [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", [])]


def tokens_of(args, kwargs):
    return (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).shape[1]


def test_no_trace_is_left(case):
    model, blocks, inputs, _ = case
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
    model, _, inputs, n = vit()
    model = model.double()
    inputs = {"x": inputs["x"].double()}
    states = {}
    with routing.attach(model, "1-3", selection=mode) as attached:
        hook = model.blocks[3].register_forward_hook(lambda m, a, o: states.update(routed=o))
        start = model.blocks[1].register_forward_pre_hook(
            lambda m, a: states.update(x=a[0]), prepend=True
        )
        model(**inputs)
        hook.remove(), start.remove()
    inner = attached.inner[0]
    present = torch.cat((torch.ones(BATCH, 3, dtype=torch.bool), inner.mask()), 1)
    assert inner.ids.shape == (BATCH, n // 2)
    dense = states["x"]
    for i in (1, 2, 3):
        block = copy.deepcopy(model.blocks[i])
        block.attn = Masked(block.attn, present)
        dense = block(dense)
    move = routing.Layout((4, 4), prefix=3).move_to(inner)
    assert torch.allclose(move.take(states["routed"]), move.take(dense), atol=1e-12)
    assert not torch.allclose(move.take(model.blocks[1](states["x"])), move.take(dense), atol=1e-3)


def test_rotary_tables_go_with_their_tokens():
    """Flux at the tokens that stay equals Flux that was only ever given those tokens."""
    model, blocks, inputs, _ = flux()
    ids = torch.tensor([1, 2, 7, 8, 11, 14])
    with routing.attach(blocks, "0-4") as attached:
        attached.ids = [ids.flip(0)]
        routed = run(model, inputs)
    few = {**inputs, "hidden_states": inputs["hidden_states"][:, ids], "img_ids": inputs["img_ids"][ids]}
    assert torch.allclose(routed[:, ids], run(model, few), atol=1e-5)


def test_a_shared_rotary_table_shares_the_subset():
    model, blocks, inputs, n = flux()
    with routing.attach(blocks, "1-4") as attached:
        run(model, inputs)
        assert attached.inner[0].ids.shape == (1, n // 2)
    with (
        routing.attach(blocks, "1-4", selection=Selection("random")),
        pytest.raises(AttachError, match=r"selection=Selection\(shared=True\)"),
    ):
        run(model, inputs)
    with routing.attach(blocks, "1-4", selection=Selection("rows", shared=True), grid=(4, 4)) as attached:
        run(model, inputs)
        assert (attached.inner[0].ids.view(2, 4) % 4 == torch.arange(4)).all()


def test_the_model_says_its_grid_and_prefix():
    for make, prefix in ((dit, 0), (sd3, 0), (vit, 3)):
        model, _, inputs, _ = make()
        with routing.attach(model, "1-3", selection="columns") as attached:
            assert attached.grid == (4, 4) and attached.prefix == prefix
            run(model, inputs)
            columns = attached.inner[0].ids % 4
            assert all(row.unique().numel() == 2 for row in columns)
    model, _, inputs, _ = flux()
    with pytest.raises(AttachError, match="needs the grid"):
        routing.attach(model, "1-3", selection="rows")


def test_blocks_in_evaluation_before_a_route_leave_it_alone():
    """A frozen trunk in evaluation mode: what counts is the block where a route starts."""
    model, blocks, inputs, n = dit()
    blocks[0].eval(), blocks[3].eval()
    with routing.attach(blocks, "1-2+3-4@0.75") as attached:
        run(model, inputs)
        assert [layout.tokens for layout in attached.inner] == [n // 2] and attached.step == 1
        blocks[1].eval(), blocks[4].train()
        run(model, inputs)
        assert attached.step == 1


@pytest.mark.parametrize("route", ["0-2@0.5+4-5@0.5", "1-2@0.5", "0-5@0.5"])
def test_long_skip_connections_are_refused(route):
    """A late block gets the tokens of an early one, which a route has replaced by a subset."""
    model = diffusers.HunyuanDiT2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, patch_size=2, sample_size=16,
        hidden_size=32, num_layers=6, mlp_ratio=2, cross_attention_dim=32,
        cross_attention_dim_t5=32, pooled_projection_dim=16, text_len=7, text_len_t5=7,
    )  # fmt: skip
    for blocks in (model, model.blocks):
        with pytest.raises(AttachError, match=r"block 0 \(HunyuanDiTBlock\) takes a long skip"):
            routing.attach(blocks, route, prefix=0)
    assert not hooks(model)


def test_several_segments():
    model, blocks, inputs, n = dit()
    with routing.attach(blocks, "0-1+3-4@0.75") as attached:
        run(model, inputs)
        assert [layout.tokens for layout in attached.inner] == [n // 2, n // 4]
        attached.ids = [torch.arange(n), torch.arange(n)]
        routed = run(model, inputs)
    assert torch.equal(routed, run(model, inputs))


def test_what_cannot_be_attached():
    swin = timm.models.swin_transformer.SwinTransformer(
        img_size=16, patch_size=2, embed_dim=8, depths=(2,), num_heads=(2,), window_size=4, num_classes=2
    )
    with pytest.raises(AttachError, match="SwinTransformerBlock.* windows"):
        routing.attach(list(swin.layers[0].blocks), "0-1", prefix=0)
    conv = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 3)) for _ in range(4)])
    with pytest.raises(AttachError, match=r"Sequential\.1 is a convolution"):
        routing.attach(conv, "1-2")
    routing.attach([nn.Sequential(nn.Conv2d(4, 4, 1)) for _ in range(4)], "1-2").remove()
    from diffusers.models.transformers.sana_transformer import SanaTransformerBlock

    options = {
        "dim": 8, "num_attention_heads": 1, "attention_head_dim": 8,
        "num_cross_attention_heads": 1, "cross_attention_head_dim": 8, "cross_attention_dim": 8,
    }  # fmt: skip
    sana = nn.ModuleList([SanaTransformerBlock(**options) for _ in range(4)])
    with pytest.raises(AttachError, match="convolution"):
        routing.attach(sana, "1-2")
    assert hooks(sana) == 0 and hooks(swin) == 0 and hooks(conv) == 0


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda m: routing.attach(m.blocks, "1-3"), "prefix=1"),
        (lambda m: routing.attach(m, "1-9"), "the list has 5 blocks"),
        (lambda m: routing.attach(m, "1-3", selection="row"), "did you mean rows"),
        (lambda m: routing.attach(m, "1-3", selection="unsorted"), "have none"),
        (lambda m: routing.attach(m, "1-3", when="later"), "training, always, never"),
        (lambda m: routing.attach(m.blocks, "1-3", prefix=3, selection="rows"), "needs the grid"),
        (lambda m: routing.attach(nn.Linear(2, 2), "1-3"), "attach to the list itself"),
        (lambda m: routing.attach([*m.blocks, m.blocks[1]], "1-3", prefix=3), "block 5 is block 1 once more"),
        (lambda m: m.blocks.append(m.blocks[1]) and routing.attach(m, "1-3"), "block 5 is block 1 once more"),
        (lambda m: routing.attach(m, "1-3", grid=(-4, -4)), "grid=(-4, -4): expected (rows, columns)"),
        (lambda m: routing.attach(m, "1-3", grid="4x4"), "grid='4x4': expected"),
        (lambda m: routing.attach("blocks", "1-2"), "blocks: expected a model or its list of blocks"),
        (lambda m: routing.attach(m, "1-3", prefix=1.5), "prefix=1.5: expected"),
        (lambda m: routing.attach(m, "1-3", extra="pos"), "extra='pos': expected names in a sequence"),
        (lambda m: routing.attach(m, "1-3", extra=["attn_mas"]), "did you mean attn_mask"),
        (lambda m: routing.attach([nn.TransformerEncoderLayer(8, 2, 8)], "0-0"), "build it with batch_first=True"),
    ],
)
def test_errors(make, part):
    model = vit()[0]
    with pytest.raises(UserError) as caught:
        make(model)
    assert part in str(caught.value) and hooks(model) == 0


def test_inputs_that_do_not_fit():
    model, _, inputs, _ = vit()
    with routing.attach(model, "1-3", selection="rows", grid=(5, 5)), pytest.raises(AttachError, match="16 tokens"):
        run(model, inputs)
    with routing.attach(model, "1-3"), pytest.raises(AttachError, match="attn_mask"):
        model(inputs["x"], attn_mask=torch.ones(1, 1, 19, 19, dtype=torch.bool))
    with routing.attach(model, "1-3") as attached:  # the pass that failed leaves nothing behind
        attached.ids = [torch.arange(16)]
        assert torch.equal(run(model, inputs), run(model.eval(), inputs))


def test_a_copy_is_dense_in_evaluation_and_silent_after_removal():
    model, _, inputs, _ = vit()
    attached = routing.attach(model, "1-3")
    ema = copy.deepcopy(model).eval()
    dense = run(ema, inputs)
    assert not torch.equal(run(model, inputs), dense) and torch.equal(run(ema, inputs), dense)
    attached.remove()
    assert torch.equal(run(ema.train(), inputs), run(model, inputs))


def test_a_block_left_out_by_the_model_ends_the_route_all_the_same():
    """Some pipelines skip blocks; the route then ends before the next one that runs."""
    model, blocks, inputs, n = dit()
    x = torch.randn(BATCH, n, 16)
    cond = {"timestep": inputs["timestep"], "class_labels": inputs["class_labels"]}
    with routing.attach(blocks, "1-3") as attached:
        for i in (0, 1, 2, 4):
            x = blocks[i](x, **cond)
        assert x.shape[1] == n and attached.inner[0].tokens == n // 2


def test_a_dense_pass_is_recomputed_densely():
    model, _, inputs, _ = vit()
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
    model, _, inputs, n = dit()
    blocks = nn.ModuleList([torch.compile(block, backend="eager") for block in model.transformer_blocks])
    model.transformer_blocks = blocks
    with routing.attach(blocks, "1-3") as attached:
        out = run(model, inputs)
        assert attached.inner[0].tokens == n // 2
        attached.ids = [torch.arange(n)]
        kept = run(model, inputs)
    assert torch.allclose(kept, run(model, inputs), atol=1e-6) and not torch.allclose(out, kept, atol=1e-4)
