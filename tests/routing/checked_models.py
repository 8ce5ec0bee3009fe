"""Models for the conformance kit: a plain implementation that can be broken, ours, attached ones."""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import backbones
import routing
from backbones.heads import unpatchify
from routing.check import RoutedModel

WIDTH, DEPTH, SIDE, BATCH = 16, 6, 4, 3
TOKENS, MOST_TOKENS = SIDE * SIDE, 36
START, END = 1, 3


class Block(nn.Module):
    """Attention with a rotary-like table for each token, and text in an argument of its own."""

    causal = False

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.own = nn.Parameter(torch.zeros(MOST_TOKENS, WIDTH))

    def attend(self, x, text):
        if self.causal:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)
        both = torch.cat((text, x), 1)
        return self.attention(x, both, both, need_weights=False)[0]

    def forward(self, x, rotary_emb, encoder_hidden_states):
        rotary_emb = rotary_emb[..., : x.shape[1], :]  # as code that counts its tokens does
        x = x + self.attend(x * rotary_emb.cos(), encoder_hidden_states)
        return x + self.mlp(x)


class Causal(Block):
    causal = True


class Sliced(Block):
    """Slices a table of its own by the number of its tokens; it is zero yet, so no output shows it."""

    def forward(self, x, rotary_emb, encoder_hidden_states):
        return super().forward(x + self.own[: x.shape[1]], rotary_emb, encoder_hidden_states)


class Windowed(Block):
    def attend(self, x, text):
        i = torch.arange(x.shape[1])
        return F.scaled_dot_product_attention(x, x, x, (i[:, None] - i).abs() < 4)


class Renamed(Block):
    """The same with other names of its arguments."""

    def forward(self, x, freqs, context):
        return super().forward(x, freqs, context)


class Residual(Block):
    """Hands its residual on beside its tokens, as mamba_ssm's blocks do."""

    def forward(self, x, residual, rotary_emb, encoder_hidden_states):
        residual = x if residual is None else x + residual
        return super().forward(residual, rotary_emb, encoder_hidden_states), residual


class Plain(nn.Module):
    """Routing written into a model's forward; `fault` breaks one property of it.

    It routes the spans of blocks until pass `until` of training.
    """

    def __init__(self, seed, rate=0.75, fault="", block=Block, spans=((START, END),), until=None):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.table = nn.Parameter(torch.randn(MOST_TOKENS, WIDTH), requires_grad=False)
        self.generator = torch.Generator().manual_seed(0 if fault == "seed unused" else seed)
        self.rate, self.fault, self.spans, self.until, self.trained = rate, fault, spans, until, 0

    def select(self, batch, tokens):
        """Return the tokens that stay, `(B, K)`; token 0 always does."""
        fault = self.fault
        skipping = int((tokens - 1) * self.rate)
        count = skipping if fault == "rate counts kept" else tokens - 1 - skipping
        if fault == "fixed number":
            count = 4
        rows = 1 if fault == "one subset for the batch" else batch
        generator = None if "global random numbers" in fault else self.generator
        if fault == "one subset for ever":
            generator = torch.Generator().manual_seed(1)
        first = 0 if fault == "protected tokens routed" else 1
        noise = torch.rand(rows, tokens - first, generator=generator)
        ids = noise.argsort(1)[:, : count + 1 - first] + first
        if first:
            ids = torch.cat((torch.zeros(rows, 1, dtype=torch.long), ids), 1)
        if fault == "a token twice":
            ids[:, 2] = ids[:, 1]
        if not fault.startswith("unsorted"):
            ids = ids.sort(1).values
        return ids.expand(batch, -1)

    def ends(self):
        """Return the first and the last block of each stretch that it really routes."""
        shift = {"end not included": (0, -1), "start one late": (1, 0), "end one too many": (0, 1)}.get(self.fault, (0, 0))
        return {start + shift[0]: end + shift[1] for start, end in self.spans}

    def routes(self):
        fault, number = self.fault, self.trained
        if not self.training:
            return fault == "sparse in evaluation"
        self.trained += 1
        if fault == "no route" or (fault == "first pass dense" and number == 0):
            return False
        until = {"schedule ignored": None, "schedule ends early": self.until and self.until - 1}.get(fault, self.until)
        return until is None or number < until

    def forward(self, images, text):
        x, fault = self.embed(images), self.fault
        embedded, complete_table = x, self.table[: x.shape[1]]
        ends = self.ends() if self.routes() else {}
        table, kept_text, residual, end, full = complete_table, text, None, None, None
        for i, block in enumerate(self.blocks):
            if i in ends:
                end, ids = ends[i], self.select(*x.shape[:2])
                index = ids.unsqueeze(-1).expand(-1, -1, WIDTH)
                if full is None or fault != "returns to the first start":
                    full = x
                x, all_residuals = x.gather(1, index), residual
                if residual is not None:
                    wrong = fault == "residual of other tokens"
                    residual = residual.gather(1, index.flip(1) if wrong else index)
                table = self.gather_table(complete_table, ids)
                if fault.startswith("text routed"):
                    kept_text = text[:, ::2]
            if isinstance(block, Residual):
                x, residual = block(x, residual, table, kept_text)
            elif isinstance(block, Renamed):
                x = block(x, freqs=table, context=kept_text)
            elif fault == "text routed, positional":
                x = block(x, table, kept_text)
            else:
                x = block(x, table, encoder_hidden_states=kept_text)
            if i == end:
                x = self.put_back(full, x, index, embedded)
                table, kept_text = complete_table, text
                if residual is not None:
                    base = torch.zeros_like(full) if fault == "residual not restored" else all_residuals
                    residual = base.scatter(1, index, residual)
                if fault == "table shifted after the route":
                    table = complete_table.roll(1, 0)
        if fault == "evaluation differs" and not self.training:
            x = x * (1 + 1e-6)
        return self.head(self.norm(x if residual is None else x + residual))

    def gather_table(self, table, ids):
        if self.fault == "table not gathered":
            return table
        if self.fault == "first rows of the table":
            return table[: ids.shape[1]]
        if self.fault == "table of sorted tokens":
            ids = ids.flip(1)
        return table[ids]

    def put_back(self, full, x, index, embedded):
        fault = self.fault
        base = full
        if fault == "bypass detached":
            base = full.detach()
        elif fault == "gradient halved":
            base = full.detach() / 2 + full / 2
        elif fault == "bypass rounded":
            base = full.bfloat16().float() if full.dtype == torch.float32 else (full * 1.01).to(full.dtype)
        elif fault == "bypass from the input":
            base = embedded
        elif fault == "bypass adds the input":
            base = full + embedded
        elif fault == "bypass is zero":
            base = torch.zeros_like(full)
        elif fault == "bypass moved":
            base = full.roll(1, 1)
        elif fault == "tokens put back elsewhere":
            index = index.flip(1)
        elif fault == "kept tokens scaled":
            x = x * 1.5
        return base.scatter(1, index, x)


def plain(
    fault="", rate=0.75, lengths=None, evaluated=TOKENS, block=Block, dtype=torch.float32, compiled=False,
    spans=((START, END),), until=None, **stated,
):  # fmt: skip
    """Return a function that builds a plain model with a fault; `stated` is said of it.

    With `lengths`, its training passes differ in tokens, samples and text.
    """

    def build(seed=0):
        if fault == "global random numbers, seeded":
            torch.manual_seed(seed)
        options = {"block": block, "spans": spans, "until": until}
        model, step = Plain(seed, rate, fault, **options).to(dtype), itertools.count()
        images, text = torch.randn(BATCH, evaluated, 4, dtype=dtype), torch.randn(BATCH, 6, WIDTH, dtype=dtype)
        ignores_route = Plain(seed, rate, **options).to(dtype)
        ignores_route.load_state_dict(model.state_dict())
        run = torch.compile(model, backend="aot_eager") if compiled else model

        def train():
            model.train()
            if lengths is None:
                return run(images, text)
            number = next(step)
            batch = BATCH + number % 2
            inputs = torch.randn(batch, lengths[number % len(lengths)], 4)
            return run(inputs, torch.randn(batch, 5 + number, WIDTH))

        described = {"route": "+".join(f"{start}-{end}@{rate}" for start, end in spans), "protect": [0]}
        if block is Residual:
            described["carry"] = ("residual",)
        if until is not None:
            described |= {"route": f"{START}-{END}@{rate}/0.5:none", "steps": 2 * until}
        model.eval()
        return RoutedModel(
            blocks=model.blocks,
            train=train,
            evaluate=lambda: model.eval() and run(images, text),
            dense=lambda: ignores_route.eval()(images, text),
            **(described | stated),
        )

    return build


def ours(backbone, route="1-4@0.75", **options):
    """Return a function that builds one of this suite's models with a route."""

    def build(seed=0):
        model = backbones.create(
            backbone, "T/1", input_size=SIDE, width=32, depth=DEPTH, num_classes=3, **options
        )
        randomise(model)
        x = torch.randn(BATCH, model.in_channels, SIDE, SIDE)
        time, labels, step = torch.rand(BATCH), torch.arange(BATCH), itertools.count()

        def train():
            draws = routing.Draws(seed, next(step), torch.arange(BATCH))
            parsed = routing.Route.parse(route)
            return model.train()(x, time, labels, routing=routing.Routing(parsed, draws=draws))

        def dense():
            tokens, cond = model.eval().embed(x, time, labels)
            for block, cond_of_block in zip(model.stack.blocks, model.modulate(cond), strict=True):
                tokens = block(tokens, cond_of_block, model.layout())
            rows = model.head(tokens, cond)
            return unpatchify(rows, model.grid, 1)

        return RoutedModel(
            blocks=model.stack.blocks,
            train=train,
            evaluate=lambda: model.eval()(x, time, labels),
            dense=dense,
            route=route,
            before=model.stack,
            after=model.head,
        )

    return build


def by_length(seed=0):
    """Mamba whose blocks take their scan path from the number of tokens, not from the positions."""
    described = ours("mamba", "1-4@0.5", mixers=1)(seed)
    for block in described.blocks:
        block.forward = partial(_forward_by_length, block.forward)
    return described


def _forward_by_length(forward, x, cond, layout):
    rows = 2 if x.shape[1] == TOKENS // 2 else SIDE
    return forward(x, cond, routing.Layout((rows, x.shape[1] // rows)))


def other_layout(seed=0):
    """DiT whose blocks in the route get the layout of other tokens."""
    described = ours("dit", "1-4@0.75")(seed)
    for block in described.blocks:
        block.register_forward_pre_hook(_first_tokens)
    return described


def _first_tokens(block, args):
    x, cond, layout = args
    if not layout.is_full:
        return x, cond, routing.Layout(layout.grid, torch.arange(layout.tokens).expand_as(layout.ids))


def randomise(model):
    """Replace gates and heads that are zero at first, so that every block does something."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08)
