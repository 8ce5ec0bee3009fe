"""What foreign models return, where their image tokens begin, and which of them are refused."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_structure

import routing
from routing import AttachError, Selection

pytest.importorskip("diffusers")
pytest.importorskip("timm")

import diffusers
import foreign_models
import timm

BATCH, IMAGE = 2, 16


def randomised(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08)
    return model.eval()


def cogview4(text):
    model = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        out_channels=4, text_embed_dim=16, time_embed_dim=8, condition_dim=4,
    )  # fmt: skip
    size = torch.tensor([[8.0, 8.0]] * BATCH)
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "encoder_hidden_states": torch.randn(BATCH, text, 16),
        "timestep": torch.tensor([1.0, 2.0]),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(BATCH, 2),
    }
    return randomised(model), inputs


def sd3(text):
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=12, caption_projection_dim=16,
        pooled_projection_dim=10, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "encoder_hidden_states": torch.randn(BATCH, text, 12),
        "pooled_projections": torch.randn(BATCH, 10),
        "timestep": torch.tensor([1.0, 500.0]),
    }
    return randomised(model), inputs


def flux2():
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=8, num_layers=1, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    ids = torch.zeros(IMAGE, 4)
    ids[:, 1], ids[:, 2] = torch.arange(IMAGE) // 4, torch.arange(IMAGE) % 4
    inputs = {
        "hidden_states": torch.randn(BATCH, IMAGE, 8),
        "encoder_hidden_states": torch.randn(BATCH, 6, 16),
        "timestep": torch.tensor([0.1, 0.2]),
        "img_ids": ids,
        "txt_ids": torch.zeros(6, 4),
        "guidance": torch.ones(BATCH),
    }
    return randomised(model), inputs


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("make", [cogview4, sd3])
@pytest.mark.parametrize("text", [6, IMAGE // 2, IMAGE])
def test_text_and_image_are_never_swapped(make, text):
    """Whatever the order of a block's outputs, and also with as many text tokens as stay."""
    model, inputs = make(text)
    dense, states = run(model, inputs), {}
    tokens = model.transformer_blocks[1]
    with routing.attach(model, "1-1", when="always") as attached:
        attached.ids = torch.arange(IMAGE)
        assert torch.equal(run(model, inputs), dense)
        for ids, said in (([], "0 tensors of ids"), ([torch.arange(IMAGE) + 1], "distinct numbers"),
                          ([torch.arange(4).expand(7, 4)], "7 rows of ids"), ([[0]], r"ids \[0\]: expected")):  # fmt: skip
            attached.ids = ids
            with pytest.raises(routing.UserError, match=said):
                run(model, inputs)
        attached.ids = None
        before = tokens.register_forward_pre_hook(
            lambda m, a, k: states.update(x=k.get("hidden_states", a[0] if a else None)),
            with_kwargs=True, prepend=True,
        )  # fmt: skip
        after = tokens.register_forward_hook(lambda m, a, o: states.update(out=o))
        run(model, inputs)
        before.remove(), after.remove()
    image, other = states["out"] if make is not sd3 else reversed(states["out"])
    assert image.shape[1] == IMAGE and other.shape[1] == text
    skip = ~attached.inner[0].mask().expand(BATCH, -1)
    assert skip.sum() == BATCH * IMAGE // 2
    assert torch.equal(image[skip], states["x"][skip])
    assert (image[~skip] != states["x"][~skip]).any(-1).all()


@pytest.mark.parametrize("text", [6, IMAGE // 2])
def test_a_rotary_table_of_the_text_alone_stays_as_it_is(text):
    model, _, inputs, _ = foreign_models.qwen(text)
    randomised(model)
    block, ids, calls = model.transformer_blocks[1], torch.tensor([1, 2, 5, 9, 14]), []
    keep = block.register_forward_hook(lambda m, a, k, o: calls.append((dict(k), o)), with_kwargs=True)
    run(model, inputs)
    with routing.attach(model, "1-1", when="always") as attached:
        attached.ids = torch.arange(IMAGE)
        run(model, inputs)
        assert all(torch.equal(a, b) for a, b in zip(calls[0][1], calls[1][1], strict=True))
        attached.ids = ids
        run(model, inputs)
    keep.remove()
    (dense, _), (few, _) = calls[0], calls[2]
    assert torch.equal(few["image_rotary_emb"][0], dense["image_rotary_emb"][0][ids])
    assert torch.equal(few["image_rotary_emb"][1], dense["image_rotary_emb"][1])


class Pair(nn.Module):
    """A block whose source does not say which of its outputs is which."""

    def __init__(self, rows=None):
        super().__init__()
        self.rows = rows

    def forward(self, hidden_states, encoder_hidden_states):
        both = encoder_hidden_states * 2, hidden_states[:, : self.rows] * 3
        return both


@pytest.mark.parametrize(("text", "rows", "part"), [(8, None, "is unknown"), (6, 7, "of its 8 tokens")])
def test_outputs_that_cannot_be_told_are_refused(text, rows, part):
    blocks = [Pair(), Pair(rows)]
    x, y = torch.randn(BATCH, IMAGE, 4), torch.randn(BATCH, text, 4)
    with routing.attach(blocks, "0-1"), pytest.raises(AttachError, match=part):
        for block in blocks:
            y, x = block(x, encoder_hidden_states=y)


def test_row_counts_tell_where_the_source_does_not():
    pair, x, y = Pair(), torch.randn(BATCH, IMAGE, 4), torch.randn(BATCH, 6, 4)
    with routing.attach([pair], "0-0") as attached:
        text, image = pair(x, y)
    stay = attached.inner[0].mask().unsqueeze(-1)
    assert torch.equal(text, y * 2) and torch.equal(image, torch.where(stay, x * 3, x))


class Named(NamedTuple):
    x: torch.Tensor
    heads: int = 2


@pytest.mark.parametrize(
    "pack",
    [Named, lambda x: {"loss": None, "x": x}, lambda x: [x, (x[:, :1],)], lambda x: ((x[:, :1], x[:, :2]), x)],
)
def test_tokens_are_found_in_whatever_holds_them(pack):
    block, x = nn.Identity(), torch.randn(BATCH, IMAGE, 4)
    hook = block.register_forward_hook(lambda m, a, o: pack(o * 2))
    with routing.attach([block], "0-0") as attached:
        out = block(x)
    hook.remove()
    expected = pack(torch.where(attached.inner[0].mask().unsqueeze(-1), x * 2, x))
    whole = [[t for t in tree_leaves(o) if getattr(t, "shape", None) == x.shape] for o in (out, expected)]
    assert torch.equal(*map(torch.stack, whole)) and tree_structure(out) == tree_structure(expected)


def test_single_stream_blocks_need_the_length_of_their_text():
    model, inputs = flux2()
    dense = run(model, inputs)
    for blocks, route in ((model, "2-3"), (model.single_transformer_blocks, "1-2")):
        with routing.attach(blocks, route, when="always"), pytest.raises(AttachError, match="pass prefix=[N6]"):
            run(model, inputs)
    with routing.attach(model, "0-2", when="always"), pytest.raises(AttachError, match="end it before"):
        run(model, inputs)
    with routing.attach(model.single_transformer_blocks, "1-2", prefix=6, when="always") as attached:
        attached.ids = [torch.randperm(IMAGE)]
        assert torch.equal(run(model, inputs), dense)
        attached.ids = None
        assert not torch.allclose(run(model, inputs), dense, atol=1e-4)
        assert attached.inner[0].tokens == IMAGE // 2


def test_block_lists_that_are_not_counted_are_refused():
    model, _, inputs, _ = foreign_models.auraflow()
    randomised(model)
    model.other_blocks = nn.ModuleList([nn.Identity()])
    with pytest.raises(AttachError, match="other_blocks beside joint_transformer_blocks and single"):
        routing.attach(model, "0-1")
    del model.other_blocks
    single = model.single_transformer_blocks
    with (
        routing.attach(single, "0-1", grid=(4, 4), when="always"),
        pytest.raises(AttachError, match="grid 4x4 has 16; pass prefix=N"),
    ):
        run(model, inputs)
    dense = run(model, inputs)
    front = single[0].register_forward_pre_hook(
        lambda m, a, k: seen.append(k["hidden_states"].shape[1]), with_kwargs=True
    )
    seen = []
    run(model, inputs)
    front.remove()
    with routing.attach(single, "0-1", prefix=seen[0] - IMAGE, grid=(4, 4), when="always") as attached:
        attached.ids = [torch.arange(IMAGE)]
        assert torch.equal(run(model, inputs), dense)


def test_a_prefix_shorter_than_text_and_registers_is_refused():
    """AuraFlow puts 8 register tokens before the text: a prefix of the text's length routes some."""
    model, _, inputs, _ = foreign_models.auraflow()
    randomised(model)
    text = inputs["encoder_hidden_states"].shape[1]
    joint, single = len(model.joint_transformer_blocks), len(model.single_transformer_blocks)
    route, message = f"{joint}-{joint + single - 1}@0.5", f"pass prefix={8 + text} if it comes first"
    for prefix in (None, 0, text):
        with (
            routing.attach(model, route, prefix=prefix, when="always"),
            pytest.raises(AttachError, match=message),
        ):
            run(model, inputs)
    with routing.attach(model, route, prefix=8 + text, when="always") as attached:
        run(model, inputs)
        assert attached.inner[0].tokens == IMAGE // 2
        assert repr(attached) == (
            f"<routing.attach: route {joint}-{joint + single - 1} of {joint + single} blocks, "
            f"prefix {8 + text}, when always, 8 of 16 tokens stayed>"
        )
        attached.ids = torch.arange(IMAGE)
        complete = run(model, inputs)
    assert torch.equal(complete, run(model, inputs))
    with (
        routing.attach(model.single_transformer_blocks, "0-0", prefix=text, grid=(4, 4), when="always"),
        pytest.raises(AttachError, match=r"24 tokens may skip where grid=\(4, 4\)"),
    ):
        run(model, inputs)


def test_one_prefix_cannot_serve_blocks_with_and_without_text_in_their_sequence():
    model, inputs = flux2()
    for prefix, message in ((6, "attach twice, once to each list"), (0, "pass prefix=6")):
        with (
            routing.attach(model, "0-0+1-2@0.5", prefix=prefix, when="always"),
            pytest.raises(AttachError, match=message),
        ):
            run(model, inputs)
    with (
        routing.attach(model.transformer_blocks, "0-0@0.5", prefix=0, when="always") as double,
        routing.attach(model.single_transformer_blocks, "0-1@0.5", prefix=6, when="always") as one,
    ):
        run(model, inputs)
    assert double.inner[0].tokens == one.inner[0].tokens == IMAGE // 2


def test_masks_of_a_shared_subset_that_leave_nothing_to_skip_are_warned_about_once():
    model, inputs = flux2()
    keep = torch.zeros(BATCH, IMAGE, dtype=torch.bool)
    keep[0, :7], keep[1, 9:] = True, True
    with routing.attach(model, "0-0@0.5", keep=keep, when="always") as attached:
        with pytest.warns(UserWarning, match="the 14 tokens .* 14 of 16 stay where the rate leaves 8"):
            run(model, inputs)
        run(model, inputs)  # warnings are errors here
        assert attached.inner[0].tokens == 14
    with routing.attach(model, "0-0@0.5", keep=keep[0], when="always") as attached:
        run(model, inputs)
        assert attached.inner[0].tokens == 8


def test_a_mask_over_text_and_image_is_named_as_what_it_is():
    class Joint(nn.Module):
        def forward(self, hidden_states, encoder_hidden_states, attention_mask=None):
            return encoder_hidden_states, hidden_states

    x, y = torch.randn(BATCH, IMAGE, 4), torch.randn(BATCH, 7, 4)
    block = Joint()
    message = r"attention_mask of shape \(\d, 23\) spans text and the 16 tokens .* not supported"
    with routing.attach([block], "0-0"), pytest.raises(AttachError, match=message):
        block(x, y, attention_mask=torch.ones(BATCH, 23))


def test_a_model_that_says_neither_grid_nor_prefix_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model, x = Own(), torch.randn(BATCH, IMAGE, 4)
    with routing.attach(model, "0-1"), pytest.raises(AttachError, match="16 tokens .* prefix=0 if there is none"):
        model(x)
    for blocks, given in ((model, {"prefix": 0}), (model, {"grid": (4, 4)}), (model.blocks, {})):
        with routing.attach(blocks, "0-1", **given) as attached:
            model(x)
            assert attached.inner[0].tokens == IMAGE // 2


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("mixer_s32_224", "MixerBlock.mlp_tokens is a linear layer over tokens"),
        ("gmlp_ti16_224", "SpatialGatingBlock.mlp_channels.gate is a linear layer over tokens"),
        ("convit_tiny", "Block.attn is a table of relative positions"),  # made anew for any length
        ("tnt_s_patch16_224", "Block carries a second sequence, of pixels"),
    ],
)
def test_layers_over_tokens_and_their_positions_are_refused(name, where):
    model = timm.create_model(name, img_size=64)
    for blocks, given in ((model, {}), (model.blocks, {"prefix": 0})):
        with pytest.raises(AttachError, match=where):
            routing.attach(blocks, "1-2", **given)


def test_relative_positions_that_all_blocks_share_are_refused():
    model = timm.create_model("vit_srelpos_small_patch16_224", img_size=64).train()
    with routing.attach(model, "1-2"), pytest.raises(AttachError, match="shared_rel_pos spans all 16"):
        model(torch.randn(BATCH, 3, 64, 64))


def test_cait_has_no_class_token_in_its_blocks():
    model = timm.create_model("cait_xxs24_224", depth=4, img_size=64).train()
    with routing.attach(model, "1-2@0.9") as attached:
        assert attached.prefix == 0 and attached.grid == (4, 4)
        lengths = []
        probe = model.blocks[1].mlp.register_forward_hook(lambda m, a, o: lengths.append(o.shape[1]))
        for _ in range(20):
            model(torch.randn(4, 3, 64, 64))
            lengths.append((attached.inner[0].ids == 0).any(1).float().mean().item())
        probe.remove()
    assert lengths[0] == attached.inner[0].tokens == 2
    assert 0 < sum(lengths[1::2]) / 20 < 0.5  # patch 0 stays no more often than others


@pytest.mark.parametrize("batch", [3, 6])  # 6 heads: a table (6, T, D) must not be taken for a batch
def test_rotary_tables_of_each_head_go_with_their_tokens(batch):
    model = timm.create_model("vit_small_patch16_rope_mixed_224", depth=4, img_size=64).double().train()
    x = torch.randn(batch, 3, 64, 64).double()
    dense, states = model(x), {}
    with routing.attach(model, "1-2") as attached:
        attached.ids = [torch.randperm(16)]
        assert torch.equal(model(x), dense)
        attached.ids = None
        hook = model.blocks[1].register_forward_pre_hook(
            lambda m, a, k: states.update(x=a[0], rope=k["rope"]), with_kwargs=True, prepend=True
        )
        late = model.blocks[1].register_forward_pre_hook(
            lambda m, a, k: states.update(few=k["rope"]), with_kwargs=True
        )
        model(x)
        hook.remove(), late.remove()
        (ids,) = attached.inner[0].ids
    assert states["rope"].shape[0] == 6 and torch.equal(states["few"], states["rope"][:, ids])
    with routing.attach(model, "1-2", selection=Selection("random")), pytest.raises(AttachError, match="shared"):
        model(x)


def test_rotary_tables_of_each_sample_with_a_dimension_for_heads():
    model = timm.create_model("eva02_tiny_patch14_224", depth=4, img_size=56, patch_drop_rate=0.25).train()
    states = {}
    with routing.attach(model, "1-2") as attached:
        hooks = [
            model.blocks[i].register_forward_pre_hook(
                lambda m, a, k, i=i: states.update({i: k["rope"]}), with_kwargs=True
            )
            for i in (0, 1)
        ]
        model(torch.randn(4, 3, 56, 56))
        for hook in hooks:
            hook.remove()
        ids = attached.inner[0].ids
    assert ids.shape == (4, 6) and states[0].shape[:3] == (4, 1, 12)
    for sample in range(4):
        assert torch.equal(states[1][sample], states[0][sample][:, ids[sample]])


class AnyName(nn.Module):
    """A block that hands its keyword arguments on, as wrappers of blocks do."""

    def forward(self, x, **kwargs):
        return x * 2 + (kwargs["pos"] if "pos" in kwargs else kwargs["rope"][0])[: x.shape[1]]


@pytest.mark.parametrize("name", ["rope", "pos"])
def test_tables_among_any_keyword_arguments_go_with_their_tokens(name):
    block, x, table = AnyName(), torch.randn(BATCH, IMAGE, 4), torch.randn(IMAGE, 4)
    given = {name: table if name == "pos" else (table, None, 100.0)}  # not all of it is a table
    with routing.attach([block], "0-0", extra=("pos",)) as attached:
        out = block(x, **given)
    assert attached.inner[0].ids.shape == (1, IMAGE // 2)
    assert torch.equal(out, torch.where(attached.inner[0].mask().unsqueeze(-1), x * 2 + table, x))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask=None, pos=None):
        if mask is not None:
            x = x * mask[..., None]
        return x + self.linear(x if pos is None else x + pos)


def plain():
    return nn.ModuleList(Plain() for _ in range(4))


class Listed(nn.Module):
    def forward(self, x):
        return [x]


class Pooled(nn.Module):
    def forward(self, states):
        return states[0].mean(1)


def test_blocks_outside_of_a_route_take_what_they_like():
    """A whole nn.Sequential is a list of blocks: images come in, and no tokens go out."""
    front = [nn.Conv2d(1, 8, 2, 2), nn.Flatten(2), nn.Linear(16, 16), nn.Linear(16, 16)]
    model = nn.Sequential(*front, Listed(), Pooled(), nn.Linear(16, 2)).train()
    with routing.attach(model, "2-3@0.25") as attached:
        assert model(torch.randn(BATCH, 1, 8, 8)).shape == (BATCH, 2)
        assert attached.inner[0].tokens == 6
    layers, x = [nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval() for _ in range(3)], torch.randn(16, 8)
    with routing.attach(layers, "1-1"):  # without a batch, where nothing is routed
        assert layers[2](layers[1](layers[0](x))).shape == x.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_pass_densely_and_are_refused_in_a_route():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 3).eval(), torch.randn(BATCH, IMAGE, 8)
    pad = torch.arange(IMAGE).expand(BATCH, -1) >= torch.tensor([[IMAGE], [9]])
    with torch.no_grad(), routing.attach(encoder.layers, "1-1") as attached:
        assert encoder(x, src_key_padding_mask=pad).shape == x.shape
        with attached.mode("always"), pytest.raises(AttachError, match="nested tensor, .* leave the padding mask out"):
            encoder(x, src_key_padding_mask=pad)


def test_an_attachment_is_changed_by_attaching_again():
    blocks = plain()
    attached = routing.attach(blocks, "1-2")
    with pytest.raises(AttachError, match=r"block 2 has a route already .* call remove\(\)"):
        routing.attach(blocks, "2-3")
    routing.attach(blocks, "0-0").remove()  # beside it there is room
    copied = copy.deepcopy(blocks)
    with pytest.raises(AttachError, match=r"\(a copy has that of its original\).* copy before attaching"):
        routing.attach(copied, "2-3")
    with pytest.raises(AttributeError):
        attached.route = "0-3"
    for change in (lambda: setattr(attached, "when", "nevr"), attached.mode("nevr").__enter__):
        with pytest.raises(AttachError, match="did you mean never"):
            change()
    attached.remove()
    routing.attach(copied, "2-3").remove()
    with routing.attach(blocks, "2-3") as attached:
        x = torch.randn(3, 16, 8)
        for block in blocks.train():
            x = block(x)
        (layout,) = attached.inner
        assert layout.full_length - layout.prefix - layout.tokens == 8


def test_masks_over_the_tokens_are_refused_by_any_usual_name():
    blocks, x = plain().train(), torch.randn(3, 16, 8)
    whole = pytest.raises(AttachError, match="mask spans all 16 tokens, .* leave it out")
    with routing.attach(blocks, "0-1"), whole:
        blocks[0](x, mask=torch.ones(3, 16))
    with routing.attach(blocks, "0-1"), whole:  # also where the first block has none
        blocks[1](blocks[0](x), mask=torch.ones(3, 16))
    with routing.attach(blocks, "0-1", prefix=16), pytest.raises(AttachError, match="none of them is the image's"):
        blocks[0](x)
    with routing.attach(blocks, "0-1", extra=("pos",)):
        assert blocks[0](x, pos=torch.randn(3, 16, 8)).shape[1] == 8


def test_a_model_that_nobody_holds_is_freed_with_its_attachment():
    blocks = plain()
    kept, gone = routing.attach(blocks, "1-2"), weakref.ref(blocks[1])
    gc.collect()
    gc.disable()
    try:
        del blocks
        assert gone() is None
    finally:
        gc.enable()
    kept.remove()


def test_only_the_causal_mask_goes_with_is_causal():
    layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)).train()
    x, causal = torch.randn(3, 16, 8), nn.Transformer.generate_square_subsequent_mask(16)
    with routing.attach(layers, "0-1"):
        padded = pytest.raises(AttachError, match="src_key_padding_mask spans all 16 tokens")
        with padded:
            layers[0](x, src_mask=causal, is_causal=True, src_key_padding_mask=torch.zeros(3, 16))
        with pytest.raises(AttachError, match="src_mask spans all 16 tokens"):
            layers[0](x, src_mask=causal)


def test_a_batch_without_samples_passes():
    """As the last one of an uneven split is."""
    blocks = plain()
    with routing.attach(blocks, "1-2"):
        assert nn.Sequential(*blocks)(torch.randn(0, 16, 8)).shape == (0, 16, 8)
