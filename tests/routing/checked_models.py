"""Models for the conformance kit: a plain implementation that can be broken, ours, attached ones."""

from __future__ import annotations

import itertools
from functools import partial

import torch
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

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, rotary_emb, encoder_hidden_states):
        rotary_emb = rotary_emb[..., : x.shape[1], :]  # as code that counts its tokens does
        turned = x * rotary_emb.cos()
        both = torch.cat((encoder_hidden_states, turned), 1)
        x = x + self.attention(turned, both, both, need_weights=False)[0]
        return x + self.mlp(x)


class Plain(nn.Module):
    """Routing written into a model's forward; `fault` breaks one property of it."""

    def __init__(self, seed, rate=0.75, fault=""):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.table = nn.Parameter(torch.randn(MOST_TOKENS, WIDTH), requires_grad=False)
        self.generator = torch.Generator().manual_seed(0 if fault == "seed unused" else seed)
        self.rate, self.fault, self.has_trained = rate, fault, False

    def select(self, batch, tokens):
        """Return the tokens that stay, `(B, K)`; token 0 always does."""
        fault = self.fault
        skipping = int((tokens - 1) * self.rate)
        count = skipping if fault == "rate counts kept" else tokens - 1 - skipping
        if fault == "fixed number":
            count = 4
        rows = 1 if fault == "one subset for the batch" else batch
        generator = None if fault.startswith("global random numbers") else self.generator
        if fault == "one subset for ever":
            generator = torch.Generator().manual_seed(1)
        first = 0 if fault == "protected tokens routed" else 1
        noise = torch.rand(rows, tokens - first, generator=generator)
        ids = noise.argsort(1)[:, : count + 1 - first] + first
        if first:
            ids = torch.cat((torch.zeros(rows, 1, dtype=torch.long), ids), 1)
        if fault != "unsorted":
            ids = ids.sort(1).values
        return ids.expand(batch, -1)

    def forward(self, images, text):
        x = self.embed(images)
        embedded, fault = x, self.fault
        complete_table = table = self.table[: x.shape[1]]
        routed = self.training or fault == "sparse in evaluation"
        end = END - 1 if fault == "end not included" else END
        if fault == "no route" or (fault == "first pass dense" and self.training and not self.has_trained):
            routed = False
        self.has_trained |= self.training
        full, kept_text = x, text
        for i, block in enumerate(self.blocks):
            if routed and i == START:
                ids = self.select(*x.shape[:2])
                index = ids.unsqueeze(-1).expand(-1, -1, WIDTH)
                full, x = x, x.gather(1, index)
                table = self.gather_table(complete_table, ids)
                if fault.startswith("text routed"):
                    kept_text = text[:, ::2]
            if fault == "text routed, positional":
                x = block(x, table, kept_text)
            else:
                x = block(x, table, encoder_hidden_states=kept_text)
            if routed and i == end:
                x = self.put_back(full, x, index, embedded)
                table, kept_text = complete_table, text
        if fault == "evaluation differs" and not self.training:
            x = x * (1 + 1e-6)
        return self.head(self.norm(x))

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
        elif fault == "bypass rounded":
            base = full.bfloat16().float()
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
        return base.scatter(1, index, x)


def plain(fault="", rate=0.75, ordered=True, lengths=None, evaluated=TOKENS):
    """Return a function that builds a plain model with a fault.

    With `lengths`, its training passes differ in tokens, samples and text.
    """

    def build(seed=0):
        if fault == "global random numbers, seeded":
            torch.manual_seed(seed)
        model, step = Plain(seed, rate, fault), itertools.count()
        images, text = torch.randn(BATCH, evaluated, 4), torch.randn(BATCH, 6, WIDTH)
        ignores_route = Plain(seed, rate)
        ignores_route.load_state_dict(model.state_dict())

        def train():
            if lengths is None:
                return model.train()(images, text)
            number = next(step)
            batch = BATCH + number % 2
            inputs = torch.randn(batch, lengths[number % len(lengths)], 4)
            return model.train()(inputs, torch.randn(batch, 5 + number, WIDTH))

        return RoutedModel(
            blocks=model.blocks,
            train=train,
            evaluate=lambda: model.eval()(images, text),
            dense=lambda: ignores_route.eval()(images, text),
            route=f"{START}-{END}@{rate}",
            protect=[0],
            ordered=ordered,
        )

    return build


# What is broken: the property that has to fail, and no other one (those that may fail with it).
FAULTS = {
    "no route": ("routed blocks", ()),
    "end not included": ("routed blocks", ()),
    "rate counts kept": ("rate", ()),
    "bypass rounded": ("bit for bit", ("gradient",)),
    "bypass from the input": ("bit for bit", ()),
    "bypass adds the input": ("bit for bit", ("gradient",)),
    "bypass is zero": ("bit for bit", ("gradient",)),
    "bypass moved": ("bit for bit", ("gradient",)),
    "tokens put back elsewhere": ("bit for bit", ("gradient",)),
    "unsorted": ("order", ()),
    "table not gathered": ("positions", ()),
    "first rows of the table": ("positions", ()),
    "table of sorted tokens": ("positions", ()),
    "protected tokens routed": ("protected tokens", ("rate",)),
    "text routed": ("protected tokens", ()),
    "bypass detached": ("gradient", ()),
    "sparse in evaluation": ("dense evaluation", ("equal evaluation",)),
    "evaluation differs": ("equal evaluation", ()),
    "one subset for the batch": ("samples differ", ()),
    "one subset for ever": ("steps differ", ("restart",)),
    "global random numbers": ("restart", ()),
    "global random numbers, seeded": ("restart", ()),
    "text routed, positional": ("protected tokens", ()),
    "seed unused": ("restart", ()),
}


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


def scan_by_length(seed=0):
    """A Mamba whose blocks take their scan path from the number of tokens, not from the positions."""
    described = ours("mamba", "1-4@0.5", mixers=1)(seed)
    for block in described.blocks:
        block.forward = partial(forward_by_length, block.forward)
    return described


def forward_by_length(forward, x, cond, layout):
    rows = 2 if x.shape[1] == TOKENS // 2 else SIDE
    return forward(x, cond, routing.Layout((rows, x.shape[1] // rows)))


def randomise(model):
    """Replace gates and heads that are zero at first, so that every block does something."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08)
