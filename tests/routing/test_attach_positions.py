"""Blocks that place tokens by their index are refused, whatever their gates; arguments of any name are gathered."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import routing
from routing import AttachError

BATCH, TOKENS, WIDTH, HEADS = 3, 64, 32, 2
HEAD = WIDTH // HEADS


class Block(nn.Module):
    """Attention and an MLP, each behind a gate; subclasses change one thing."""

    def __init__(self, gate: float = 1.0):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.full((WIDTH,), gate))
        self.table = None

    def rotate(self, x):
        return x

    def mask(self, x):
        return {}

    def mix(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, **self.mask(x))
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.gate * self.mix(self.norm(x))
        return x + self.gate * self.mlp(x)


def order(x):
    i = torch.arange(x.shape[1])
    return i[:, None] - i[None]


def block(**methods) -> type[Block]:
    return type("Variant", (Block,), methods)


def own(**tensors):
    """An `__init__` that adds parameters, buffers or layers."""

    def init(self, gate=1.0):
        Block.__init__(self, gate)
        for name, value in tensors.items():
            made = value()
            if isinstance(made, nn.Module | nn.Parameter):
                setattr(self, name, made)
            elif made.dtype == torch.float64:
                self.register_buffer(name, made.float())
            else:
                setattr(self, name, made)  # a plain attribute

    return init


def learned(*shape):
    return lambda: nn.Parameter(torch.zeros(shape))


def windows(self, x, pad):
    rows = F.pad(x, (0, 0, 0, -x.shape[1] % 8)) if pad else x
    return Block.mix(self, rows.unflatten(1, (-1, 8)).flatten(0, 1)).reshape(rows.shape)[:, : x.shape[1]]


def loop(self, x):
    state, out = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.9 * state + token
        out.append(state)
    return torch.stack(out, 1)


def window_2d(self, x):
    side = math.isqrt(x.shape[1])
    grid = x.unflatten(1, (side // 2, 2, side // 2, 2)).transpose(2, 3)
    return Block.mix(self, grid.flatten(3, 4).flatten(0, 2)).reshape(grid.shape).transpose(2, 3).reshape(x.shape)


def registers(self, x):
    more = self.more.expand(len(x), -1, -1)
    return Block.mix(self, torch.cat((more, x), 1))[:, self.more.shape[1] :]


def experts(self, x):
    rows = x.flatten(0, 1)
    chosen, out = rows[:, :2].argmax(1), torch.zeros_like(rows)
    for k in range(2):
        here = (chosen == k).nonzero()[:, 0]
        out = out.index_add(0, here, self.out(rows[here]) * (k + 1))
    return out.view_as(x)


ACCEPTED = {
    "plain": Block,
    "causal": block(mask=lambda self, x: {"is_causal": True}),
    "causal by index": block(mask=lambda self, x: {"attn_mask": order(x) >= 0}),
    "causal, additive": block(mask=lambda self, x: {"attn_mask": torch.full((x.shape[1],) * 2, -math.inf).triu(1)}),
    "causal, a buffer": block(
        __init__=own(bias=lambda: torch.ones(256, 256).double().tril()),
        mask=lambda self, x: {"attn_mask": self.bias[: x.shape[1], : x.shape[1]] == 1},
    ),
    "not itself": block(mask=lambda self, x: {"attn_mask": ~torch.eye(x.shape[1], dtype=torch.bool)}),
    "linear, causal": block(mix=lambda self, x: self.out((x @ x.mT).tril() @ x)),
    "dropout": block(mix=lambda self, x: F.dropout(x, 0.1) * (torch.rand(*x.shape[:2], 1) < 0.9)),
    "registers": block(__init__=own(more=learned(1, 4, WIDTH)), mix=registers),
    "experts": block(mix=experts),
}
REFUSED = {
    "learned": (block(__init__=own(pos=learned(1, 256, WIDTH)), mix=lambda s, x: Block.mix(s, x + s.pos[:, : x.shape[1]])), "slice of self.pos"),
    "learned, of T rows": (block(__init__=own(pos=learned(1, TOKENS, WIDTH)), mix=lambda s, x: Block.mix(s, x + s.pos)), "depends on their number.*self.pos with 64 rows|self.pos with 64 rows.*depends on their number"),
    "embedding": (block(__init__=own(pos=lambda: nn.Embedding(256, WIDTH)), mix=lambda s, x: Block.mix(s, x + s.pos(torch.arange(x.shape[1])))), "embedding of self.pos.weight"),
    "rotary": (block(__init__=own(cos=lambda: torch.randn(256, HEAD)), rotate=lambda s, q: q * s.cos[: q.shape[2]]), "slice of self.cos"),
    "rotary, computed": (block(rotate=lambda s, q: q * torch.outer(torch.arange(q.shape[2]), torch.ones(HEAD)).cos()), "arange"),
    "relative bias": (block(__init__=own(bias=learned(511, HEADS)), mask=lambda s, x: {"attn_mask": s.bias[order(x) + 255].permute(2, 0, 1)}), "index of self.bias"),
    "distances": (block(mask=lambda s, x: {"attn_mask": -order(x).abs().float()}), "arange"),
    "decay": (block(mix=lambda s, x: (0.9 ** order(x)).tril() @ x), "arange"),
    "windowed": (block(mask=lambda s, x: {"attn_mask": order(x).abs() < 8}), "arange"),
    "windows": (block(mix=lambda s, x: windows(s, x, False)), "depends on their number"),
    "windows of a grid": (block(mix=window_2d), "depends on their number"),
    "reversed path": (block(mix=lambda s, x: Block.mix(s, x[:, torch.arange(x.shape[1]).flip(0)])), "arange"),
    "frequencies": (block(mix=lambda s, x: torch.fft.fft2(x).real), "_fft_c2c"),
    "over tokens": (block(__init__=own(w=lambda: nn.Linear(TOKENS, TOKENS)), mix=lambda s, x: s.w(x.mT).mT), "depends on their number"),
    "convolution": (block(__init__=own(conv=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), mix=lambda s, x: s.conv(x.mT).mT), "conv is a convolution"),
}  # fmt: skip
ORDERED = {
    "causal convolution": (block(__init__=own(conv=lambda: nn.Conv1d(WIDTH, WIDTH, 4, padding=3)), mix=lambda s, x: s.conv(x.mT)[..., : x.shape[1]].mT), "conv is a causal convolution"),
    "convolution of weights": (block(__init__=own(w=learned(WIDTH, 1, 4)), mix=lambda s, x: F.conv1d(F.pad(x.mT, (3, 0)), s.w, groups=WIDTH).mT), "padding along the tokens"),
    "shift": (block(mix=lambda s, x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)), "slice along the tokens"),
    "shift by padding": (block(mix=lambda s, x: F.pad(x, (0, 0, 1, -1))), "padding along the tokens"),
    "roll": (block(mix=lambda s, x: x.roll(1, 1)), "roll along the tokens"),
    "scan": (block(mix=lambda s, x: x.cumsum(1)), "cumsum along the tokens"),
    "scan in a loop": (block(mix=loop), "along the tokens"),
    "recurrence": (block(__init__=own(gru=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)), mix=lambda s, x: s.gru(x)[0]), "gru is a recurrence"),
    "padded windows": (block(mix=lambda s, x: windows(s, x, True)), "padding along the tokens"),
}  # fmt: skip


def route(kind: type[Block], gate: float = 1.0, **options):
    """Run four blocks with a route over two of them; return what came in, what came out and the attachment."""
    blocks, x = nn.ModuleList(kind(gate) for _ in range(4)), torch.randn(BATCH, TOKENS, WIDTH)
    with routing.attach(blocks, "1-2@0.75", **options) as attached:
        return x, nn.Sequential(*blocks)(x), attached


@pytest.mark.parametrize("gate", [0.0, 1.0])
@pytest.mark.parametrize("kind", ACCEPTED)
def test_blocks_that_do_not_know_the_index_of_a_token_are_routed(kind, gate):
    _, _, attached = route(ACCEPTED[kind], gate)
    assert attached.inner[0].tokens == TOKENS // 4


@pytest.mark.parametrize("gate", [0.0, 1.0])
@pytest.mark.parametrize("kind", REFUSED)
def test_positions_by_index_are_refused_with_their_name(kind, gate):
    variant, part = REFUSED[kind]
    for ordered in (False, True):
        with pytest.raises(AttachError, match=part):
            route(variant, gate, ordered=ordered)
    if kind in ("rotary", "learned", "windowed"):
        route(variant, gate, positions="own")


@pytest.mark.parametrize("gate", [0.0, 1.0])
@pytest.mark.parametrize("kind", ORDERED)
def test_what_mixes_tokens_along_the_sequence_is_routed_as_one_sequence_if_that_is_meant(kind, gate):
    variant, part = ORDERED[kind]
    with pytest.raises(AttachError, match=f"{part}.*ordered=True"):
        route(variant, gate)
    assert route(variant, gate, ordered=True)[2].inner[0].tokens == TOKENS // 4


def test_a_block_behind_the_first_of_a_route_is_looked_at_too():
    blocks = nn.ModuleList([Block(), Block(), REFUSED["windowed"][0]()])
    with routing.attach(blocks, "1-2"), pytest.raises(AttachError, match="block 2 .* places tokens by their index"):
        nn.Sequential(*blocks)(torch.randn(BATCH, TOKENS, WIDTH))


def test_looking_at_a_block_leaves_no_trace():
    class Counts(Block):
        def __init__(self):
            super().__init__()
            self.norm1, self.length = nn.BatchNorm1d(WIDTH), None

        def mix(self, x):
            if self.length != x.shape[1]:
                self.length, self.cache = x.shape[1], torch.ones(x.shape[1], 1)
            return F.dropout(self.norm1(x.mT).mT, 0.5) * self.cache

    torch.manual_seed(0)
    block, x, outputs = Counts(), torch.randn(BATCH, TOKENS, WIDTH), []
    for attached in (True, False):
        torch.manual_seed(1)
        if attached:
            with routing.attach([block], "0-0") as route_of:
                route_of.ids = torch.arange(TOKENS)  # all stay
                outputs.append(block(x))
            assert block.length == TOKENS and int(block.norm1.num_batches_tracked) == 1
            block.norm1.reset_running_stats()
        else:
            outputs.append(block(x))
    assert torch.equal(*outputs)


# --- arguments


class Given(Block):
    """Takes what comes as `forward` of a subclass says."""

    def turn(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def attend(self, x, turn=lambda q: q):
        self.rotate = turn
        return x + self.mix(self.norm(x))


class CosSin(Given):
    def forward(self, x, cos, sin):
        return self.attend(x, lambda q: self.turn(q, cos, sin))


class Named(Given):
    def forward(self, x, *, c, freqs):
        return self.attend(x * (1 + c[:, None, :WIDTH]), lambda q: q * freqs)


class Context(Given):
    def forward(self, x, context, pos):
        return self.attend(x + pos + F.scaled_dot_product_attention(x, context, context))


class Cut(Given):
    def forward(self, x, freqs):
        return self.attend(x, lambda q: q * freqs[: q.shape[2]])


class Ids(Given):
    def __init__(self):
        super().__init__()
        self.cos = torch.randn(TOKENS, HEAD)

    def forward(self, x, position_ids):
        return self.attend(x, lambda q: q * self.cos[position_ids])


class Joint(Given):
    """Joins text and tokens, and turns both by one table, as the published Flux."""

    text_first = True

    def forward(self, img, txt, pe):
        parts = (txt, img) if self.text_first else (img, txt)
        both = Given.attend(self, torch.cat(parts, 1), lambda q: q * pe)
        first = len(parts[0][0])
        return (both[:, first:], both[:, :first]) if self.text_first else (both[:, :first], both[:, first:])


class JointLast(Joint):
    text_first = False


class Kept(Given):
    """Only what was given as `own` is a table; the others keep their length."""

    def forward(self, x, many, freqs):
        return self.attend(x + many.mean(1, keepdim=True), lambda q: q * freqs)


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "given", "gathered"),
    [
        (CosSin, {"cos": rows(TOKENS, HEAD), "sin": rows(TOKENS, HEAD)}, ["cos", "sin"]),
        (CosSin, {"cos": rows(BATCH, 1, TOKENS, HEAD), "sin": rows(BATCH, 1, TOKENS, HEAD)}, ["cos", "sin"]),
        (Named, {"c": rows(BATCH, TOKENS), "freqs": rows(TOKENS, HEAD)}, ["freqs"]),  # as wide as there are tokens
        (Context, {"context": rows(BATCH, TOKENS, WIDTH), "pos": rows(1, TOKENS, WIDTH)}, ["pos"]),
        (Cut, {"freqs": rows(TOKENS, HEAD)}, ["freqs"]),
        (Ids, {"position_ids": torch.arange(TOKENS)}, ["position_ids"]),
        (Kept, {"many": rows(BATCH, TOKENS, WIDTH), "freqs": rows(TOKENS, HEAD)}, ["freqs"]),
        (Joint, {"txt": rows(BATCH, 9, WIDTH), "pe": rows(TOKENS + 9, HEAD)}, ["pe"]),
        (JointLast, {"txt": rows(BATCH, 9, WIDTH), "pe": rows(TOKENS + 9, HEAD)}, ["pe"]),
    ],
)
def test_arguments_of_any_name_go_with_their_tokens(kind, given, gathered):
    """Each kept token meets the row that it meets in a dense pass: those rows, given alone, are the reference."""
    block, x, seen = kind().double(), rows(BATCH, TOKENS, WIDTH).double(), {}
    given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    block.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
    with routing.attach([block], "0-0@0.75") as attached:
        handle = block.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
        block(x, **given)
        handle.remove()
    ids = attached.inner[0].ids
    assert sorted(attached._arguments[0].rows) == gathered
    for name, value in given.items():
        assert torch.equal(seen[name], expected_rows(value, ids, kind) if name in gathered else value), name


def expected_rows(value: Tensor, ids: Tensor, kind: type) -> Tensor:
    if value.shape[0] == TOKENS:
        return value[ids[0]]
    if value.shape[0] == TOKENS + 9:
        text, image = (value[:9], value[9:]) if kind is Joint else (value[-9:], value[:-9])
        return torch.cat((text, image[ids[0]]) if kind is Joint else (image[ids[0]], text))
    dim = value.dim() - 2
    return torch.stack([value[min(i, len(value) - 1)].index_select(dim - 1, row) for i, row in enumerate(ids)])


class Bias(Given):
    def forward(self, x, bias):
        return x + F.scaled_dot_product_attention(x, x, x, bias)


class Square(Given):
    def forward(self, x, freqs):
        return x + F.linear(x, freqs[:WIDTH, :WIDTH]) + freqs.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("kind", "given", "options", "part"),
    [
        (Bias, {"bias": rows(1, TOKENS, TOKENS)}, {}, "bias of shape .* relates all 64 tokens"),
        (Square, {"freqs": rows(TOKENS, TOKENS)}, {}, r'freqs of shape \(64, 64\) has a row for each .* extra=\("freqs",\)'),
        (Cut, {"freqs": rows(256, HEAD)}, {}, "slice of argument freqs"),
        (Named, {"c": rows(BATCH, WIDTH), "freqs": rows(TOKENS, HEAD)}, {"positions": "own"}, None),
        (Context, {"context": rows(BATCH, TOKENS, WIDTH), "pos": rows(1, TOKENS, WIDTH)}, {"positions": "own"}, None),
    ],
)
def test_arguments_that_are_unclear_are_refused_with_what_to_type(kind, given, options, part):
    blocks = nn.ModuleList([kind()])
    with routing.attach(blocks, "0-0@0.75", **options):
        if part is None:
            blocks[0](rows(BATCH, TOKENS, WIDTH), **given)
        else:
            with pytest.raises(AttachError, match=part):
                blocks[0](rows(BATCH, TOKENS, WIDTH), **given)


# --- values that blocks hand on


class Residual(nn.Module):
    """The layout of mamba_ssm's blocks: the residual goes on beside the tokens."""

    def __init__(self, index=0):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, residual=None, inference_params=None):
        residual = hidden_states if residual is None else hidden_states + residual
        return self.mixer(self.norm(residual)), residual


class ValueFirst(nn.Module):
    """The layout of fla's RWKV-7: the first block's values go on, beside what the tuple has too."""

    def __init__(self, index=0):
        super().__init__()
        self.value, self.index = nn.Linear(WIDTH, WIDTH), index

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, v_first=None, **kwargs):
        value = self.value(hidden_states)
        v_first = value if self.index == 0 else v_first
        outputs = (hidden_states + value * 0.5 + v_first, None, past_key_values, v_first)
        return outputs


def run_residual(blocks, x):
    residual = None
    for block in blocks:
        x, residual = block(x, residual)
    return x + residual


def run_value(blocks, x):
    v_first = None
    for block in blocks:
        x, _, _, v_first = block(x, v_first=v_first)
    return x


HANDED_ON = [(Residual, run_residual, "residual"), (ValueFirst, run_value, "v_first")]


@pytest.mark.parametrize(("kind", "run", "name"), HANDED_ON)
@pytest.mark.parametrize("span", ["1-2", "0-2", "2-3", "0-3"])
def test_values_that_blocks_hand_on_return_with_the_tokens(kind, run, name, span):
    """The reference: tokens do not mix, so those that stay are as in a dense pass; the others skip the blocks."""
    blocks = nn.ModuleList(kind(i) for i in range(4)).double()
    x, dense = rows(BATCH, TOKENS, WIDTH).double(), None
    dense = run(blocks, x)
    first, last = map(int, span.split("-"))
    with routing.attach(blocks, f"{span}@0.75", carry=(name,)) as attached:
        out = run(blocks, x)
        attached.ids = torch.randperm(TOKENS)
        assert torch.equal(run(blocks, x), dense)
        mask = attached.inner[0].mask()
    with routing.attach(blocks, f"{span}@0.75", carry=(name,)) as attached:
        assert torch.equal(run(blocks, x), out)
        mask = attached.inner[0].mask()
    others = [block for i, block in enumerate(blocks) if not first <= i <= last]
    if first > 0 or kind is Residual:
        skipped = run(others, x) if others else x
        torch.testing.assert_close(out[~mask], skipped[~mask])
    torch.testing.assert_close(out[mask], dense[mask])


@pytest.mark.parametrize(("kind", "run", "name"), HANDED_ON)
def test_values_that_are_handed_on_without_being_named_are_refused(kind, run, name):
    blocks, x = nn.ModuleList(kind(i) for i in range(4)), rows(BATCH, TOKENS, WIDTH)
    for span in ("1-2", "1-1", "0-3"):
        with routing.attach(blocks, span), pytest.raises(AttachError, match="carry="):
            run(blocks, x)
    with pytest.raises(AttachError, match="carry: the blocks have no argument residuall"):
        routing.attach(nn.ModuleList([Residual()]), "0-0", carry=("residuall",))


def test_values_that_are_handed_on_survive_checkpointing_and_an_end_that_is_left_out():
    from torch.utils.checkpoint import checkpoint

    x, grads = rows(BATCH, TOKENS, WIDTH).double(), []
    for kept in (False, True):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Residual() for _ in range(6)).double()
        with routing.attach(blocks, "1-4", carry=("residual",)):
            hidden, residual = x, None
            for i, block in enumerate(blocks):
                if i == 4:
                    continue
                if kept:
                    hidden, residual = checkpoint(block, hidden, residual, use_reentrant=False)
                else:
                    hidden, residual = block(hidden, residual)
            assert hidden.shape == residual.shape == x.shape
            (hidden + residual).square().sum().backward()
        grads.append([p.grad for i, block in enumerate(blocks) if i != 4 for p in block.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
