"""The loop over blocks: what is gathered, what returns, and where gradients go."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from routing import Draws, Fuse, Layout, Route, Routing, Stack, UserError
from routing.options import RoutingError, RoutingOptions

GRID, WIDTH, DEPTH, BATCH, PREFIX = (4, 4), 6, 8, 3, 2
N, T = 16, 18


class Mix(nn.Module):
    """A residual block that mixes all tokens it sees, so that a missing one is felt."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple] = []

    def forward(self, x, cond, layout):
        self.seen.append((x.shape[1], layout.length, x.dtype, torch.is_autocast_enabled("cpu")))
        return x + torch.tanh(self.linear(x + cond.unsqueeze(1)) + x.mean(1, keepdim=True))


class Carry(Mix):
    """A block that carries a per-token tensor: the first one writes it, the rest add to it."""

    carries = ("first",)

    def forward(self, x, cond, layout, state):
        if "first" not in state:
            state["first"] = x.detach() * 2
        assert state["first"].shape[1] == x.shape[1] == layout.length
        state["first"] = state["first"] + 1
        return super().forward(x, cond, layout) + 0.1 * state["first"][..., :WIDTH]


def stack(block=Mix, **options):
    torch.manual_seed(0)
    return Stack([block() for _ in range(DEPTH)], **options).double()


def inputs(dtype=torch.float64):
    torch.manual_seed(1)
    x = torch.randn(BATCH, T, WIDTH, dtype=dtype, requires_grad=True)
    return x, torch.randn(BATCH, WIDTH, dtype=dtype), Layout(GRID, prefix=PREFIX)


def draws(step=0, index=BATCH):
    return Draws(0, step, torch.arange(index))


DRAWS = draws()


def routing(text="2-5", draws=DRAWS, ids=None, **options):
    return Routing(Route.parse(text), RoutingOptions(**options), draws, ids)


def by_hand(model, x, cond, layout, all_ids, reinsert, remove):
    """A pass through route 2-5 with plain indexing, one sample at a time: tokens and carried tensors."""
    drop_before = {"start": 2, "after:3": 4, "never": 6}[remove]
    rows, states = [], []
    for b, ids in enumerate(all_ids):
        chosen = [*range(PREFIX), *(PREFIX + i for i in ids.tolist())]
        tokens, state, present = x[b : b + 1], {}, layout
        for i, block in enumerate(model.blocks):
            if i == 2:
                skipped, skipped_state = tokens, dict(state)
            if i == drop_before:
                tokens, present = tokens[:, chosen], layout.subset(ids)
                state = {key: value[:, chosen] for key, value in state.items()}
            if i == 6 and reinsert != "none":
                back = skipped + x[b : b + 1] if reinsert == "sum_input" else skipped
                tokens = back.index_copy(1, torch.tensor(chosen), tokens)
                for key, value in state.items():
                    state[key] = skipped_state[key].index_copy(1, torch.tensor(chosen), value)
                present = layout
            extra = (state,) if isinstance(block, Carry) else ()
            tokens = block(tokens, cond[b : b + 1], present, *extra)
        rows.append(tokens)
        states.append(state)
    return torch.cat(rows), {key: torch.cat([state[key] for state in states]) for key in states[0]}


@pytest.mark.parametrize("block", [Mix, Carry])
@pytest.mark.parametrize("shared", [False, True])
def test_keeping_all_is_bitwise_dense_through_gather_and_scatter(block, shared, moves):
    model = stack(block)
    x, cond, layout = inputs()
    dense = model(x, cond, layout)
    assert not moves
    ids = torch.randperm(N) if shared else torch.stack([torch.randperm(N) for _ in range(BATCH)])
    for text, count in (("2-5", 1), ("0-2+3-3+6-7", 3)):
        moves.clear()
        routed = model(x, cond, layout, Routing(Route.parse(text), ids=[ids] * count))
        assert moves == ["gather", "scatter"] * count
        assert torch.equal(routed.x, dense.x) and routed.layout.is_full and routed.kept is None
        assert all(torch.equal(routed.state[key], dense.state[key]) for key in dense.state)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("reinsert", "remove"),
    [
        *itertools.product(["identity", "sum_input"], ["start", "after:3", "never"]),
        ("none", "start"),
        ("none", "after:3"),  # with never it is refused: it would drop tokens that it keeps
    ],
)
@pytest.mark.parametrize("block", [Mix, Carry])
def test_a_route_equals_plain_indexing(block, reinsert, remove, shared):
    """Any re-insertion after any removal; routed tokens arrive bit for bit."""
    model, arrived = stack(block), []
    model.blocks[6].register_forward_pre_hook(lambda _, args: arrived.append(args[0]))
    x, cond, layout = inputs()
    how = routing("2-5@0.75", reinsert=reinsert, remove=remove, shared=shared)
    out = model(x, cond, layout, how, taps=(1,))
    ids = out.inner[0].ids.expand(BATCH, -1)
    assert ids.shape == (BATCH, 4)
    if reinsert == "none":
        assert torch.equal(out.layout.ids, out.inner[0].ids) and torch.equal(out.kept, out.inner[0].mask())
    elif reinsert == "identity":
        skipped = torch.cat((torch.zeros(BATCH, PREFIX, dtype=torch.bool), ~out.inner[0].mask().expand(BATCH, N)), 1)
        same = (arrived[0] == out.taps[1]).all(-1)
        assert torch.equal(same, skipped)  # the prefix never skips
    expected, state = by_hand(model, x, cond, layout, ids, reinsert, remove)
    torch.testing.assert_close(out.x, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.state, state, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (out.x, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_state_that_a_segment_creates_is_0_for_the_tokens_that_skip_it():
    x, cond, layout = inputs()
    out = stack(Carry)(x, cond, layout, routing("0-7"))
    skip = torch.cat((torch.zeros(BATCH, PREFIX, dtype=torch.bool), ~out.inner[0].mask()), 1)
    assert (out.state["first"][skip] == 0).all() and (out.state["first"][~skip] != 0).all()


@pytest.mark.parametrize("on", [True, False])
def test_the_block_after_a_route_runs_in_float32(on):
    model = stack(fp32_after=on).float()
    x, cond, layout = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x, cond.bfloat16(), layout, routing("1-2+5-6"))
        cast = [block.seen[0][3] for block in model.blocks]
        assert cast == ([True] * 3 + [False] + [True] * 3 + [False] if on else [True] * 8)
        assert [block.seen[0][2] for block in model.blocks][3] == torch.float32
        model(x, cond, layout)
        assert all(block.seen[1][3] for block in model.blocks)  # a dense pass has no such block


@pytest.mark.parametrize("block", [Mix, Carry])
def test_checkpointing_recomputes_the_same_inside_routes_only(block):
    plain, saving = stack(block), stack(block, checkpoint=True)
    x, cond, layout = inputs()
    outs = [model(x, cond, layout, routing("2-5+6-6")) for model in (plain, saving)]
    assert torch.equal(outs[0].x, outs[1].x)
    grads = [torch.autograd.grad(o.x.square().sum(), [x, *m.parameters()]) for o, m in zip(outs, (plain, saving), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    runs = [len(b.seen) for b in saving.blocks]
    assert runs == [1, 1, 2, 2, 2, 2, 2, 1]


def test_taps():
    model = stack()
    x, cond, layout = inputs()
    out = model(x, cond, layout, routing("2-5"), taps=(-1, 0, 3, 5, 7))
    assert sorted(out.taps) == [-1, 0, 3, 5, 7] and torch.equal(out.taps[-1], x)
    assert torch.equal(out.taps[7], out.x)
    assert out.taps[3].shape == (BATCH, PREFIX + 8, WIDTH)
    assert torch.equal(out.tap_layouts[3].ids, out.inner[0].ids) and out.tap_layouts[0].is_full
    for tap in (-2, 8):
        with pytest.raises(RoutingError, match=r"-1 \(the input\) or 0..7"):
            model(x, cond, layout, taps=(tap,))


# Variants


def test_sum_input_adds_nothing_where_a_route_begins_at_block_0():
    model = stack()
    x, cond, layout = inputs()
    ids = torch.stack([torch.randperm(N)[:8] for _ in range(BATCH)])
    plain, summed = (
        model(x, cond, layout, routing("0-5", ids=ids, reinsert=how)).x
        for how in ("identity", "sum_input")
    )
    assert torch.equal(plain, summed)  # the state before block 0 is the input


@pytest.mark.parametrize("options", [{}, {"reinsert": "none"}, {"remove": "after:3"}])
def test_blocks_get_each_layout_once_with_the_tables_that_they_declare(options):
    prepared, ran = [], []

    class Scan(Mix):
        scans = ("zigzag:1",)
        tables = (("gaps", "zigzag:1"), ("neighbours", "zero"))

        def prepare(self, layout):
            prepared.append((self, layout))

        def forward(self, x, cond, layout):
            ran.append((self, layout))
            before = set(layout.tables)
            assert before >= {("scan", "zigzag:1"), *self.tables} and ran[-1] in prepared
            layout.scan_order("zigzag:1"), layout.gaps("zigzag:1"), layout.neighbours("zero")
            assert set(layout.tables) == before
            return super().forward(x, cond, layout)

    x, cond, layout = inputs()
    inner = stack(Scan)(x, cond, layout, routing("2-5", **options)).inner[0]
    assert ("gaps", "zigzag:1") in inner.tables and ("gaps", "raster") not in inner.tables
    assert len(ran) == DEPTH and len(set(prepared)) == len(prepared)


def test_random_end_is_drawn_per_step_within_the_segment():
    model = stack()
    x, cond, layout = inputs()
    ends = set()
    for step in range(40):
        model(x, cond, layout, routing("0-5", draws=draws(step), random_end=True))
        sparse = [i for i, block in enumerate(model.blocks) if block.seen.pop()[0] == 10]
        assert sparse == list(range(len(sparse))) and 1 <= len(sparse) <= 6
        ends.add(len(sparse))
    assert ends == {1, 2, 3, 4, 5, 6}


def test_random_ends_of_two_segments_are_drawn_separately():
    model = stack()
    x, cond, layout = inputs()
    lengths = set()
    for step in range(12):
        model(x, cond, layout, routing("0-3+4-7", draws=draws(step), random_end=True))
        sparse = [block.seen.pop()[0] == 10 for block in model.blocks]
        lengths.add((sum(sparse[:4]), sum(sparse[4:])))
    assert len({first for first, _ in lengths}) == 4 and any(first != second for first, second in lengths)


def test_unsorted_shuffles_inside_the_route_only():
    model = stack()
    x, cond, layout = inputs()
    out = model(x, cond, layout, routing("2-5", selection="unsorted"))
    assert out.inner[0].shuffle.shape == out.inner[0].ids.shape
    assert (out.inner[0].ids.diff(dim=1) > 0).all() and out.layout.shuffle is None
    explicit = torch.randperm(N)
    with_ids = model(x, cond, layout, routing("2-5", selection="unsorted", ids=explicit))
    assert with_ids.inner[0].shuffle is not None and with_ids.inner[0].tokens == N


def through_the_end(model, x, cond, layout):
    """Tokens after the blocks that follow the span 2-5."""
    for block in model.blocks[6:]:
        x = block(x, cond, layout)
    return x


def test_fusion_acts_in_dense_passes_too():
    fuse = Fuse(WIDTH, "2-5", DEPTH)
    model = stack(fuse=fuse)
    x, cond, layout = inputs()
    out = model(x, cond, layout, routing("2-5@0.75"), taps=(1, 5))
    before, after = out.taps[1], out.taps[5]
    sparse = fuse.mask.expand_as(before).clone()
    for b in range(BATCH):
        sparse[b, :PREFIX] = after[b, :PREFIX]
        sparse[b, PREFIX + out.inner[0].ids[b]] = after[b, PREFIX:]
    fused = fuse.linear(torch.cat((before, sparse), -1))
    assert torch.allclose(out.x, through_the_end(model, fused, cond, layout), atol=1e-12)
    dense = model(x, cond, layout, taps=(1, 5))
    fused = fuse.linear(torch.cat((dense.taps[1], dense.taps[5]), -1))
    assert torch.allclose(dense.x, through_the_end(model, fused, cond, layout), atol=1e-12) and not dense.inner
    kept = model(x, cond, layout, Routing(Route.parse("2-5"), ids=torch.randperm(N)))
    assert torch.equal(kept.x, dense.x)
    assert torch.autograd.grad(dense.x.sum(), fuse.mask)[0].eq(0).all()  # there, and nothing
    with pytest.raises(RoutingError, match="try route=2-5"):
        model(x, cond, layout, routing("1-5"))
    with pytest.raises(RoutingError, match="try identity"):
        model(x, cond, layout, routing("2-5", reinsert="sum_input"))


def test_path_drop_leaves_the_span_out():
    model = stack(fuse=Fuse(WIDTH, "2-5", DEPTH))
    x, cond, layout = inputs()
    none = routing("none", draws=None, path_drop=1.0)  # nothing to draw
    out = model(x, cond, layout, none, taps=(1,))
    assert [len(block.seen) for block in model.blocks] == [1, 1, 0, 0, 0, 0, 1, 1]
    fused = model.fuse.linear(torch.cat((out.taps[1], model.fuse.mask.expand_as(x)), -1))
    assert torch.equal(out.x, through_the_end(model, fused, cond, layout))
    uniform = draws().uniform("path", 1)[:, 0]
    share = float(uniform.median()) + 1e-6
    some = model(x, cond, layout, routing("2-5@0.75", path_drop=share))
    dropped = uniform < share
    assert 0 < dropped.sum() < BATCH
    assert torch.allclose(some.x[dropped], out.x[dropped])
    assert not torch.allclose(some.x[~dropped], out.x[~dropped])
    with pytest.raises(RoutingError, match="a block that runs in this pass"):
        model(x, cond, layout, none, taps=(3,))


@pytest.mark.parametrize(
    ("route", "options", "message"),
    [
        ("2--3", {"remove": "after:7"}, "block 7 is not in route 2-5"),
        ("2-5", {"path_drop": 0.5}, "path_drop=.*this model has none; try path_drop=0"),
        ("2-5", {"draws": None}, "pass `draws` or `ids` to select tokens"),
        ("2-5", {"draws": draws(index=BATCH - 1)}, "draws for 2 samples: expected 3, the batch size"),
        ("2-5", {"ids": torch.arange(8).expand(2, 8)}, "ids of 2 samples for a batch of 3"),
        ("2-5", {"ids": torch.tensor([0, 1, 10**6])}, "distinct numbers from 0 to"),
        ("2-5", {"ids": torch.tensor([3, 0, 3])}, "distinct numbers from 0 to"),
        ("2-5", {"ids": [[0, 1]]}, r"ids .*: expected whole numbers \(K,\)"),
        ("2-5", {"ids": [torch.arange(0)]}, r"ids .*: expected whole numbers \(K,\)"),
        ("1-2+4-5", {"ids": [torch.arange(8)]}, "1 tensors of ids for the 2 segments"),
    ],
)
def test_options_that_cannot_run(route, options, message):
    x, cond, layout = inputs()
    with pytest.raises(UserError, match=message):
        stack()(x, cond, layout, routing(route, **options))


def test_a_batch_may_be_empty_but_tokens_must_be_those_of_the_layout():
    """Too many of them would be gathered from the wrong samples, without a word."""
    x, cond, layout = inputs()
    assert stack()(x[:0], cond[:0], layout, routing(draws=draws(index=0))).x.shape == (0, T, WIDTH)
    for tokens in (T - 1, T + 2):
        x = torch.zeros(BATCH, tokens, WIDTH, dtype=torch.float64)
        with pytest.raises(RoutingError, match=f"{tokens} tokens come in, and their layout has {T}"):
            stack()(x, cond, layout, routing("2-5"))
