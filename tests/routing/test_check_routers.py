"""Broken routers fail the property that they break, and no other; right ones pass: one table of each."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
from checked_models import (
    Causal,
    Renamed,
    Residual,
    Sliced,
    Windowed,
    by_length,
    other_layout,
    ours,
    plain,
)
from small import ROOT
from torch import nn
from torch.utils.checkpoint import checkpoint

import routing
from routing.check import RoutedModel

TWICE = ((1, 2), (4, 4))  # two routes, one after the other
HALF = torch.bfloat16

# The router; the property that has to fail; those that may fail with it.
BROKEN = {
    "no route": (plain("no route"), "routed blocks", ()),
    "first pass dense": (plain("first pass dense"), "routed blocks", ()),
    "end not included": (plain("end not included"), "routed blocks", ()),
    "end one too many": (plain("end one too many"), "routed blocks", ()),
    "start one late": (plain("start one late"), "routed blocks", ()),
    "schedule ignored": (plain("schedule ignored", until=3), "routed blocks", ()),
    "schedule ends early": (plain("schedule ends early", until=3), "routed blocks", ()),
    "rate counts kept": (plain("rate counts kept"), "rate", ()),
    "fixed number of kept tokens": (plain("fixed number", lengths=(16, 25)), "rate", ("samples differ", "steps differ")),
    "bypass rounded": (plain("bypass rounded"), "bit for bit", ("gradient",)),
    "bypass rounded, bf16": (plain("bypass rounded", dtype=HALF), "bit for bit", ("gradient",)),
    "bypass from the input": (plain("bypass from the input"), "bit for bit", ()),
    "bypass adds the input": (plain("bypass adds the input"), "bit for bit", ("gradient",)),
    "bypass is zero": (plain("bypass is zero"), "bit for bit", ("gradient",)),
    "bypass moved": (plain("bypass moved"), "bit for bit", ("gradient",)),
    "tokens put back elsewhere": (plain("tokens put back elsewhere"), "bit for bit", ("gradient",)),
    "kept tokens scaled": (plain("kept tokens scaled"), "bit for bit", ()),
    "second route returns to the first": (plain("returns to the first start", spans=TWICE), "bit for bit", ()),
    "a token twice": (plain("a token twice", ordered=False), "order", ()),
    "unsorted": (plain("unsorted"), "order", ()),
    "unsorted, causal blocks": (plain("unsorted", block=Causal, ordered=False), "order", ()),
    "scan path by length": (by_length, "order", ("positions",)),
    "table not gathered": (plain("table not gathered"), "positions", ()),
    "table not gathered, any name": (plain("table not gathered", block=Renamed), "positions", ()),
    "first rows of the table": (plain("first rows of the table"), "positions", ()),
    "table of sorted tokens": (plain("table of sorted tokens"), "positions", ()),
    "table shifted after the route": (plain("table shifted after the route"), "positions", ()),
    "table shifted, any name": (plain("table shifted after the route", block=Renamed), "positions", ()),
    "table sliced in the block": (plain(block=Sliced), "positions", ()),
    "window in the block": (plain(block=Windowed), "positions", ()),
    "layout of other tokens": (other_layout, "positions", ()),
    "residual of other tokens": (plain("residual of other tokens", block=Residual), "handed on", ()),
    "residual not restored": (plain("residual not restored", block=Residual), "handed on", ()),
    "protected tokens routed": (plain("protected tokens routed"), "protected tokens", ("rate",)),
    "text routed": (plain("text routed"), "protected tokens", ()),
    "text routed, positional": (plain("text routed, positional"), "protected tokens", ()),
    "text routed, any name": (plain("text routed", block=Renamed), "protected tokens", ()),
    "bypass detached": (plain("bypass detached"), "gradient", ()),
    "gradient halved": (plain("gradient halved"), "gradient", ()),
    "sparse in evaluation": (plain("sparse in evaluation"), "dense evaluation", ("equal evaluation",)),
    "evaluation differs": (plain("evaluation differs"), "equal evaluation", ()),
    "one subset for the batch": (plain("one subset for the batch"), "samples differ", ()),
    "one subset for ever": (plain("one subset for ever"), "steps differ", ("restart",)),
    "global random numbers": (plain("global random numbers"), "restart", ()),
    "global random numbers, seeded": (plain("global random numbers, seeded"), "restart", ()),
    "seed unused": (plain("seed unused"), "restart", ()),
}  # fmt: skip


def attached(route="1-2@0.75", run=None, kind=nn.Identity, **options):
    """Return a function that builds four blocks with `routing.attach`."""

    def forward(blocks, x):
        for block in blocks:
            x = block(x) if run is None else run(block, x)
        return x

    def build(seed=0):
        layer = nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True)
        blocks, x = nn.ModuleList(copy.deepcopy(layer) for _ in range(4)), torch.randn(2, 16, 16)
        original = copy.deepcopy(blocks).eval()
        routing.attach(blocks, route, seed=seed, **options)
        return RoutedModel(
            blocks=blocks,
            train=lambda: forward(blocks.train(), x),
            evaluate=lambda: forward(blocks.eval(), x),
            dense=lambda: forward(original, x),
            route=route,
            steps=options.get("steps"),
        )

    return build


def recomputed(block, x):
    return checkpoint(block, x, use_reentrant=False) if block.training else block(x)


RIGHT = {
    "plain": plain(),
    "another rate": plain(rate=0.8),
    "two routes": plain(spans=TWICE),
    "one subset for the batch, stated": plain("one subset for the batch", shared=True),
    "unsorted, plain attention": plain("unsorted", ordered=False),
    "causal blocks": plain(block=Causal),
    "arguments of any name": plain(block=Renamed),
    "a residual beside the tokens": plain(block=Residual),
    "a schedule": plain(until=3),
    "bf16": plain(dtype=HALF),
    "fp16": plain(dtype=torch.float16),
    "passes of other lengths": plain(lengths=(16, 25, 9), evaluated=36),
    "our dit, all blocks": ours("dit", "0-5@0.25"),
    "our mamba, two routes": ours("mamba", "0-1+3-4@0.75"),
    "our rwkv, all blocks": ours("rwkv", "0-5@0.25"),
    "attached": attached(),
    "attached, checkpointed": attached(run=recomputed),
    "attached, a schedule": attached("1-2@0.75/0.5:none", steps=6),
    "compiled": pytest.param(plain(compiled=True), marks=pytest.mark.slow),
}
compiles = pytest.mark.filterwarnings("ignore")  # dynamo hides its own warnings only from the printer


@pytest.mark.parametrize("router", BROKEN)
def test_a_broken_router_fails_what_it_breaks(router):
    build, name, others = BROKEN[router]
    report = routing.check(build)
    assert name in report.failed, str(report)
    assert set(report.failed) <= {name, *others}, str(report)


@compiles
@pytest.mark.parametrize("build", [*RIGHT.values()], ids=[*RIGHT])
def test_a_right_router_passes(build):
    report = routing.check(build, seed=7)
    assert report.ok, str(report)


def test_the_tables_are_long_enough():
    assert len(BROKEN) >= 30 and len(RIGHT) >= 12


CONVENTIONS = {
    "this suite": (plain(), ()),
    "[TREAD]": (plain("unsorted, global random numbers"), ("order", "restart")),
    "[SimpleTuner]": (plain("unsorted"), ("order",)),
    "PRX, part 3": (plain(), ()),
    "Fizgig": (plain("end not included"), ("routed blocks",)),
    "Rengu-Flow": (plain("one subset for the batch"), ("samples differ",)),
    "OneTrainer fork": (plain(block=Renamed), ()),
}


def test_the_page_says_what_the_check_says_of_each_convention():
    page = (ROOT / "docs" / "check.md").read_text().split("## Conventions of public projects")[1]
    rows = [line for line in page.split("## Results")[0].splitlines() if line.count("|") == 9][2:]
    assert len(rows) == len(CONVENTIONS)
    for row, (name, (build, failed)) in zip(rows, CONVENTIONS.items(), strict=True):
        assert row.startswith(f"| {name}"), row
        report, said = routing.check(build), row.split("|")[-2]
        assert report.failed == failed, str(report)
        assert tuple(re.findall('"([^"]+)" fails', said)) == failed and ("passes" in said) == (not failed)


@compiles
@pytest.mark.slow
def test_faults_show_in_compiled_models_too():
    for fault, name in (("global random numbers", "restart"), ("bypass moved", "bit for bit")):
        assert name in routing.check(plain(fault, compiled=True)).failed


@pytest.mark.slow
@pytest.mark.parametrize(("build", "failed"), [("right", ()), ("same", ("ranks differ",))])
def test_two_processes_keep_different_tokens(build, failed):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "routing.check", f"{ROOT}/tests/routing/ranked_routers.py:{build}"]
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "routing"), str(ROOT / "tests")))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    failures = re.findall(r"^(\w+(?: \w+)*) +FAIL", done.stdout, re.MULTILINE)
    assert tuple(failures) == failed, done.stdout + done.stderr
    assert done.stdout.count("property") == 1 and (done.returncode == 0) == (not failed)
