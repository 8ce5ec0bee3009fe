"""`protect=` and `keep=` of `routing.attach`, and the models that need them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import routing
from routing import AttachError, Selection
from routing.attached.keep import KeptTokens
from routing.layout import Layout

pytest.importorskip("diffusers")
pytest.importorskip("timm")

from foreign_models import IMAGE, build_model, recorded, run

BATCH, LENGTH, WIDTH = 3, 20, 4


class Recorder(nn.Module):
    """A block that adds one to its tokens and notes them; a token is its own position."""

    def forward(self, x):
        self.seen = x[..., 0].long() if x.shape[-1] else x
        return x + torch.tensor([0.0] + [1.0] * (x.shape[-1] - 1))


def positions(length=LENGTH):
    x = torch.zeros(BATCH, length, WIDTH)
    x[..., 0] = torch.arange(length)
    return x


def attach_and_run(route="0-0@0.5", **options):
    block = Recorder()
    with routing.attach([block], route, **options) as attached:
        out = block(positions())
    return block.seen, out, attached


FRONT, BACK, MIDDLE = {0, 1, 2, 3}, {16, 17, 18, 19}, set(range(4, 16))
AROUND = [slice(0, 4), slice(16, None)]
STARTS = torch.tensor([[0], [8], [14]])
OF_EACH_SAMPLE = (torch.arange(LENGTH) >= STARTS) & (torch.arange(LENGTH) < STARTS + 6)


@pytest.mark.parametrize(
    ("protect", "protected"),
    [
        (slice(0, 4), FRONT),
        (slice(-4, None), BACK),
        (AROUND, FRONT | BACK),
        ([slice(4, 16)], MIDDLE),
        (torch.tensor([i in FRONT | BACK for i in range(LENGTH)]), FRONT | BACK),
        (slice(0, None, 2), set(range(0, LENGTH, 2))),
        (OF_EACH_SAMPLE, [set(range(0, 6)), set(range(8, 14)), set(range(14, 20))]),
    ],
)
def test_protected_tokens_stay_wherever_they_are_and_in_order(protect, protected):
    seen, out, attached = attach_and_run(protect=protect)
    protected = protected if isinstance(protected, list) else [protected] * BATCH
    n = LENGTH - len(protected[0])
    assert seen.shape == (BATCH, LENGTH - n // 2)
    assert (seen.diff(dim=1) > 0).all()
    for row, never_skip in zip(seen.tolist(), protected, strict=True):
        assert never_skip <= set(row)
    skipped = torch.ones(BATCH, LENGTH, dtype=torch.bool).scatter(1, seen, False)
    assert skipped.sum() == BATCH * (n // 2)
    assert torch.equal(out[..., 0], positions()[..., 0])  # each token at its own place
    assert torch.equal(out[..., 1], (~skipped).float())  # those that skipped are as they were
    layout = attached.inner[0]
    assert layout.full_length - layout.prefix - layout.tokens == n // 2


def test_a_prefix_is_the_same_as_protecting_the_front():
    one, _, _ = attach_and_run(prefix=4, seed=3)
    other, _, _ = attach_and_run(protect=slice(0, 4), seed=3)
    both, _, _ = attach_and_run(prefix=2, protect=slice(2, 4), seed=3)
    assert torch.equal(one, other) and torch.equal(one, both)


def own():
    """A model of one's own: blocks that get text, then the image, in one sequence."""
    model = nn.Module()
    model.blocks = nn.Sequential(Recorder())
    return model


def test_the_prefix_of_ones_own_model_can_change_with_the_batch():
    model = own()
    with routing.attach(model, "0-0@0.5", prefix=5) as attached:
        for text in (5, 9):
            attached.prefix = text
            seen = model.blocks(positions(text + 16))[..., 1] == 1
            assert seen[:, :text].all() and (seen[:, text:].sum(1) == 8).all()
            assert torch.equal(attached.inner[0].mask(), seen[:, text:])
        with pytest.raises(AttachError, match="prefix=-1: expected the number"):
            attached.prefix = -1


def test_protected_slices_can_change_with_the_batch():
    """As resolution buckets need it: text comes after N image tokens, and N is another in each."""
    model = own()
    with routing.attach(model, "0-0@0.5") as attached:
        for image in (16, 12):
            attached.protect = slice(image, None)
            x = positions(image + 5)
            seen = model.blocks(x)[..., 1] == 1
            assert seen[:, image:].all() and (seen[:, :image].sum(1) == image // 2).all()
        attached.protect = slice(18, None)  # of a larger bucket
        with pytest.raises(AttachError, match=r"slice\(18, None, None\) protects none of the 17 tokens"):
            model.blocks(x)
        attached.protect = None
        with pytest.raises(AttachError, match="how many of the 17 tokens .* is unknown"):
            model.blocks(x)
        attached.protect = slice(0, 0)  # empty in any sequence: all tokens may skip
        assert (model.blocks(x)[..., 1].sum(1) == 9).all()
        assert ", when training, 9 of 17 tokens stayed" in repr(attached)
    assert ", removed, 9 of 17 tokens stayed" in repr(attached)


@pytest.mark.parametrize("make", [own, lambda: own().blocks])
@pytest.mark.parametrize(("prefix", "part"), [({}, "the grid 4x4 has 16"), ({"prefix": 3}, "17 tokens are neither prefix nor protected")])
def test_a_stated_grid_refuses_a_prefix_that_does_not_fit(make, prefix, part):
    blocks = make()
    with routing.attach(blocks, "0-0@0.5", grid=(4, 4), **prefix), pytest.raises(AttachError, match=part):
        nn.Sequential(*getattr(blocks, "blocks", blocks))(positions())


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"protect": 4}, "protect=4: expected a slice of the sequence such as slice"),
        ({"protect": slice(LENGTH / 4, None)}, r"protect=slice\(5.0, None, None\): expected a slice"),
        ({"protect": [slice(None, None, -1)]}, r"protect=\[slice\(None, None, -1\)\]: expected a slice"),
        ({"protect": torch.ones(LENGTH)}, "protect of type torch.float32"),
        ({"protect": torch.ones(7, dtype=torch.bool)}, r"protect of shape \(7,\): expected \(20,\) or"),
        ({"protect": [slice(0, 4), slice(20, None)]}, r"slice\(20, None, None\) protects none of the 20 tokens"),
        ({"protect": slice(0, None)}, "protect: 20 tokens come into block 0, and none of them"),
        ({"protect": torch.arange(LENGTH).expand(BATCH, -1) < torch.tensor([[1], [2], [4]])},
         "leaves 16 tokens of one sample and 19 of another"),
        ({"keep": torch.ones(7, dtype=torch.bool)}, r"keep torch.bool \(7,\): expected a bool mask \(20,\)"),
    ],
)  # fmt: skip
def test_wrong_masks_get_one_sentence(options, part):
    with pytest.raises(AttachError, match=part):
        attach_and_run(**options)


@pytest.mark.parametrize("mode", ["random", "rows", "blocks", "stride"])
def test_kept_tokens_never_skip_and_the_others_fill_up_to_the_number(mode):
    keep = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    keep[0, :3], keep[1, 5:15] = True, True
    stays = torch.zeros(BATCH, LENGTH)
    for seed in range(20):
        seen, out, _ = attach_and_run(keep=keep, selection=mode, grid=(4, 5), seed=seed)
        assert seen.shape == (BATCH, 10) and (seen.diff(dim=1) > 0).all()
        present = torch.zeros(BATCH, LENGTH, dtype=torch.bool).scatter(1, seen, True)
        assert present[keep].all()
        assert torch.equal(out[..., 1], present.float())
        stays += present
    assert (stays[0, 3:] > 0).all() and (stays[0, 3:] < 20).all()  # all others are drawn at times
    assert (stays[1, :5] == 0).all()  # ten are forced, so none of the others stays


def test_a_mask_that_forces_nothing_new_changes_nothing():
    plain, _, _ = attach_and_run(seed=5)
    drawn = torch.zeros(BATCH, LENGTH, dtype=torch.bool).scatter(1, plain, True)
    for keep in (torch.zeros(LENGTH, dtype=torch.bool), drawn):
        assert torch.equal(attach_and_run(seed=5, keep=keep)[0], plain)


def test_more_forced_tokens_than_stay_let_more_stay_in_each_sample():
    keep = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    keep[2, :17] = True
    seen, _, _ = attach_and_run(keep=keep)
    assert seen.shape == (BATCH, 17) and seen[2].tolist() == list(range(17))


def test_a_shared_subset_keeps_what_any_sample_forces():
    keep = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    keep[0, 1], keep[2, 18] = True, True
    for seed in range(10):
        seen, _, attached = attach_and_run(keep=keep, selection=Selection(shared=True), seed=seed)
        assert attached.inner[0].ids.shape == (1, 10)
        assert {1, 18} <= set(seen[0].tolist()) and torch.equal(seen[0], seen[1])


def test_the_mask_can_change_with_the_batch_and_explicit_ids_exclude_it():
    block = Recorder()
    with routing.attach([block], "0-0@0.9") as attached:
        for token in (3, 11):
            attached.keep = torch.arange(LENGTH) == token
            block(positions())
            assert (block.seen == token).any(1).all()
        attached.ids = torch.arange(5)
        with pytest.raises(AttachError, match="keep and ids are both set"):
            block(positions())


def test_a_table_without_rows_for_the_class_token_is_gathered_where_image_tokens_are_protected():
    """EVA's rotary table has a row for each image token: 0, then 1 to 3 and 4, 9 of the rest stay."""
    positions = torch.arange(4, 17)[None]
    kept = KeptTokens.select(Layout((1, 13), prefix=4), torch.tensor([0, 5]), positions, 17, front=1)
    assert kept.index.tolist() == [[0, 1, 2, 3, 4, 9]]
    rows = torch.arange(16.0)[None, :, None]
    assert kept.move_after_front.take(rows).flatten().tolist() == [0, 1, 2, 3, 8]


@pytest.mark.parametrize("name", ["Z-Image", "Z-Image omni"])
def test_z_image_is_refused_where_its_image_tokens_are_unknown(name):
    """The advice is `protect`: a prefix cannot describe text after the image."""
    model, blocks, inputs, _ = build_model(name)
    with pytest.raises(AttachError, match=r"attach to its list, model.layers; .*protect=slice"):
        routing.attach(model, "1-2")
    with routing.attach(blocks, "1-2"), pytest.raises(AttachError, match=r"protect=slice\(N, None\)"):
        run(model, inputs)
    with pytest.raises(AttachError, match="prefix=32: ZImageTransformerBlock needs more"):
        routing.attach(blocks, "1-2", prefix=32)
    assert not any(block._forward_hooks for block in blocks)


def test_wan_s_timesteps_of_each_token_go_with_their_tokens():
    """Wan 2.2 conditions each token on a time of its own; the blocks get it as `temb`."""
    model, blocks, inputs, _ = build_model("Wan")
    inputs["timestep"] = torch.randint(1000, (BATCH, IMAGE))
    dense = run(model, inputs)
    with routing.attach(blocks, "1-2@0.5") as attached:
        with recorded(model.blocks[0], "temb") as before, recorded(model.blocks[1], "temb") as after:
            run(model, inputs)
        (ids,) = attached.inner[0].ids
        (complete,), (few,) = before, after
        assert complete.shape[:3] == (BATCH, IMAGE, 6) and torch.equal(few, complete[:, ids])
        attached.ids = torch.arange(IMAGE)
        assert torch.equal(run(model, inputs), dense)
