"""What foreign models return, where their image tokens begin, and which of them are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_structure

import routing
from routing import AttachError

pytest.importorskip("diffusers")
pytest.importorskip("timm")

import foreign_models as foreign
import timm
from foreign_models import BATCH, IMAGE, TEXT, build, recorded, run


@pytest.mark.parametrize("make", [foreign.cogview4, foreign.sd3])
@pytest.mark.parametrize("text", [TEXT, IMAGE // 2, IMAGE])
def test_text_and_image_are_never_swapped(make, text):
    """Whatever the order of a block's outputs, and also with as many text tokens as stay."""
    model, blocks, inputs, _ = build(make, text)
    dense, outputs = run(model, inputs), []
    with routing.attach(model, "1-1") as attached:
        attached.ids = torch.arange(IMAGE)
        assert torch.equal(run(model, inputs), dense)
        attached.ids = [torch.arange(4).expand(7, 4)]
        with pytest.raises(routing.UserError, match="ids of 7 samples"):
            run(model, inputs)
        attached.ids = None
        hook = blocks[1].register_forward_hook(lambda m, a, o: outputs.append(o))
        with recorded(blocks[1], "hidden_states", prepend=True) as entering:
            run(model, inputs)
        hook.remove()
    image, other = outputs[0] if make is not foreign.sd3 else reversed(outputs[0])
    assert image.shape[1] == IMAGE and other.shape[1] == text
    skip = ~attached.inner[0].mask().expand(BATCH, -1)
    assert skip.sum() == BATCH * IMAGE // 2
    assert torch.equal(image[skip], entering[0][skip])
    assert (image[~skip] != entering[0][~skip]).any(-1).all()


class Pair(nn.Module):
    """A block whose source does not say which of its outputs is which."""

    def __init__(self, rows=None):
        super().__init__()
        self.rows = rows

    def forward(self, hidden_states, encoder_hidden_states):
        both = encoder_hidden_states * 2, hidden_states[:, : self.rows] * 3
        return both


@pytest.mark.parametrize(("text", "rows", "part"), [(8, None, "is unknown"), (6, 7, "of its 8 tokens")])
def test_outputs_without_one_image_are_refused(text, rows, part):
    blocks = [Pair(), Pair(rows)]
    x, y = torch.randn(BATCH, IMAGE, 4), torch.randn(BATCH, text, 4)
    with routing.attach(blocks, "0-1", ordered=True), pytest.raises(AttachError, match=part):
        for block in blocks:
            y, x = block(x, encoder_hidden_states=y)


@pytest.mark.parametrize(
    "pack",
    [lambda x: {"loss": None, "x": x}, lambda x: [x, (x[:, :1],)], lambda x: ((x[:, :1], x[:, :2]), x)],
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


def whole(model):
    return model


def single(model):
    return model.single_transformer_blocks


@pytest.mark.parametrize(
    ("make", "blocks_of", "route", "options", "message"),
    [
        (foreign.flux2, whole, "2-3", {}, "pass prefix=[N6]"),
        (foreign.flux2, whole, "0-2", {}, "end it before"),
        (foreign.flux2, whole, "0-0+1-2", {"prefix": TEXT}, "attach twice, once to each list"),
        (foreign.flux2, whole, "0-0+1-2", {"prefix": 0}, "pass prefix=6"),
        (foreign.auraflow, single, "0-1", {"grid": (4, 4)}, "grid 4x4 has 16; pass prefix=N"),
        (foreign.auraflow, single, "0-0", {"prefix": TEXT, "grid": (4, 4)},
         r"24 tokens are neither prefix nor protected, but grid=\(4, 4\)"),
        # 8 register tokens come before the text: a prefix of its length routes some.
        (foreign.auraflow, whole, "1-4", {}, f"pass prefix={8 + TEXT} if it comes first"),
        (foreign.auraflow, whole, "1-4", {"prefix": TEXT}, f"pass prefix={8 + TEXT} if it comes first"),
        (foreign.flux, whole, "1-2", {"prefix": TEXT}, r"text in a separate argument.* pass protect=slice\(0, 6\)"),
        (foreign.wan, whole, "1-2", {"prefix": TEXT}, r"text in a separate argument.* pass protect=slice\(0, 6\)"),
        (foreign.dit, whole, "1-3", {"selection": "rows", "grid": (5, 5), "prefix": 0}, "16 tokens come in where grid"),
    ],
)  # fmt: skip
def test_calls_whose_image_tokens_would_be_wrong_are_refused(make, blocks_of, route, options, message):
    model, _, inputs, _ = build(make)
    with routing.attach(blocks_of(model), route, **options), pytest.raises(AttachError, match=message):
        run(model, inputs)


def test_single_stream_blocks_are_routed_with_the_length_of_their_text():
    model, _, inputs, _ = build(foreign.flux2)
    dense = run(model, inputs)
    with routing.attach(model.single_transformer_blocks, "1-2", prefix=TEXT) as attached:
        attached.ids = [torch.randperm(IMAGE)]
        assert torch.equal(run(model, inputs), dense)
        attached.ids = None
        assert not torch.allclose(run(model, inputs), dense, atol=1e-4)
        assert attached.inner[0].tokens == IMAGE // 2


def test_a_model_with_registers_and_text_in_front_of_the_image():
    model, _, inputs, options = build(foreign.auraflow)
    with routing.attach(model, "1-4", **options) as attached:
        run(model, inputs)
        assert repr(attached) == (
            "<routing.attach: route 1-4 of 5 blocks, prefix 14, when training, 8 of 16 tokens stayed>"
        )
    model.other_blocks = nn.ModuleList([nn.Identity()])
    with pytest.raises(AttachError, match="other_blocks beside joint_transformer_blocks and single"):
        routing.attach(model, "0-1")


def test_two_lists_are_attached_to_with_the_prefix_of_each():
    model, _, inputs, _ = build(foreign.flux2)
    with (
        routing.attach(model.transformer_blocks, "0-0@0.5", prefix=0) as double,
        routing.attach(model.single_transformer_blocks, "0-1@0.5", prefix=TEXT) as one,
    ):
        run(model, inputs)
    assert double.inner[0].tokens == one.inner[0].tokens == IMAGE // 2


def test_one_prefix_cannot_serve_both_forms_of_ones_own_blocks():
    double, joined = Pair(), nn.Identity()
    x, y = torch.randn(BATCH, IMAGE, 4), torch.randn(BATCH, TEXT, 4)
    refused = pytest.raises(AttachError, match="attach twice, .*with the prefix of each")
    with routing.attach([double, joined], "0-0+1-1", prefix=TEXT), refused:
        text, image = double(x, y)
        joined(torch.cat((text, image), 1))


def test_masks_of_a_shared_subset_that_leave_nothing_to_skip_are_warned_about_once():
    model, _, inputs, _ = build(foreign.flux2)
    keep = torch.zeros(BATCH, IMAGE, dtype=torch.bool)
    keep[0, :7], keep[1, 9:] = True, True
    with routing.attach(model, "0-0@0.5", keep=keep) as attached:
        with pytest.warns(UserWarning, match="the 14 tokens .* 14 of 16 stay where the rate leaves 8"):
            run(model, inputs)
        run(model, inputs)  # warnings are errors here
        assert attached.inner[0].tokens == 14


def test_a_model_that_says_neither_grid_nor_prefix_is_refused():
    model, x = nn.Module(), torch.randn(BATCH, IMAGE, 4)
    model.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with routing.attach(model, "0-1"), pytest.raises(AttachError, match="16 tokens .* prefix=0 if there is none"):
        model.blocks(x)
    for blocks, given in ((model, {"prefix": 0}), (model, {"grid": (4, 4)}), (model.blocks, {})):
        with routing.attach(blocks, "0-1", **given) as attached:
            model.blocks(x)
            assert attached.inner[0].tokens == IMAGE // 2


def test_relative_positions_that_all_blocks_share_are_refused():
    model = timm.create_model("vit_srelpos_small_patch16_224", img_size=64).train()
    with routing.attach(model, "1-2"), pytest.raises(AttachError, match="shared_rel_pos spans all 16"):
        model(torch.randn(BATCH, 3, 64, 64))


def test_cait_has_no_class_token_in_its_blocks():
    model = timm.create_model("cait_xxs24_224", depth=4, img_size=64).train()
    with routing.attach(model, "1-2@0.9") as attached, recorded(model.blocks[1]) as entering:
        model(torch.randn(4, 3, 64, 64))
        assert attached.prefix == 0 and attached.grid == (4, 4)
    assert entering[0].shape[1] == attached.inner[0].tokens == 2


@pytest.mark.parametrize("batch", [3, 6])  # 6 heads: a table (6, T, D) must not be taken for a batch
def test_rotary_tables_of_each_head_go_with_their_tokens(batch):
    model = timm.create_model("vit_small_patch16_rope_mixed_224", depth=4, img_size=64).double().train()
    x = torch.randn(batch, 3, 64, 64).double()
    dense, block = model(x), model.blocks[1]
    with routing.attach(model, "1-2") as attached:
        attached.ids = [torch.randperm(16)]
        assert torch.equal(model(x), dense)
        attached.ids = None
        with recorded(block, "rope", prepend=True) as before, recorded(block, "rope") as after:
            model(x)
        (ids,) = attached.inner[0].ids
    assert before[0].shape[0] == 6 and torch.equal(after[0], before[0][:, ids])


def test_rotary_tables_of_each_sample_with_a_dimension_for_heads():
    model = timm.create_model("eva02_tiny_patch14_224", depth=4, img_size=56, patch_drop_rate=0.25).train()
    block = model.blocks[1]
    with routing.attach(model, "1-2") as attached:
        with recorded(block, "rope", prepend=True) as before, recorded(block, "rope") as after:
            model(torch.randn(4, 3, 56, 56))
        ids = attached.inner[0].ids
    assert ids.shape == (4, 6) and before[0].shape[:3] == (4, 1, 12)
    for sample in range(4):
        assert torch.equal(after[0][sample], before[0][sample][:, ids[sample]])


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
    front = [nn.Conv2d(1, 8, 2, 2), nn.Flatten(2), nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16))]
    model = nn.Sequential(*front, Listed(), Pooled(), nn.Linear(16, 2)).train()
    with routing.attach(model, "2-3@0.25") as attached:
        assert model(torch.randn(BATCH, 1, 8, 8)).shape == (BATCH, 2)
        assert attached.inner[0].tokens == 6


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
    with pytest.raises(AttachError, match="did you mean never"):
        attached.when = "nevr"
    for step in (-1, 2.5):
        with pytest.raises(AttachError, match=f"step={step}: expected the number of the next routed pass"):
            attached.step = step
    attached.remove()
    routing.attach(copied, "2-3").remove()
    with routing.attach(blocks, "2-3") as attached:
        nn.Sequential(*blocks)(torch.randn(3, 16, 8))
        assert attached.inner[0].tokens == 8


def test_masks_over_the_tokens_are_refused_by_any_usual_name():
    blocks, x = plain().train(), torch.randn(3, 16, 8)
    whole = pytest.raises(AttachError, match="mask spans all 16 tokens, .* not supported; .* prompts of equal length")
    with routing.attach(blocks, "0-1"), whole:
        blocks[0](x, mask=torch.ones(3, 16))
    with routing.attach(blocks, "0-1"), whole:  # also where the first block has none
        blocks[1](blocks[0](x), mask=torch.ones(3, 16))
    layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)).train()
    causal = nn.Transformer.generate_square_subsequent_mask(16)
    with routing.attach(layers, "0-1"):
        with pytest.raises(AttachError, match="src_mask spans all 16 tokens"):
            layers[0](x, src_mask=causal)
        with pytest.raises(AttachError, match="src_key_padding_mask spans all 16"):  # the causal one is fine
            layers[0](x, src_mask=causal, is_causal=True, src_key_padding_mask=torch.zeros(3, 16))


def test_a_batch_without_samples_passes():
    """As the last one of an uneven split is."""
    blocks = plain()
    with routing.attach(blocks, "1-2"):
        assert nn.Sequential(*blocks)(torch.randn(0, 16, 8)).shape == (0, 16, 8)
