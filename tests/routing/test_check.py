"""The conformance kit: what its evidence says, what it refuses, its command and its page."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from checked_models import by_length, ours, plain
from documents import blocks
from small import ROOT
from torch import nn
from torch.utils.checkpoint import checkpoint

import routing
from routing.check import CheckError, RoutedModel
from routing.check.__main__ import main

PAGE = ROOT / "docs" / "check.md"

def absent(report):
    return [finding.name for finding in report.findings if finding.result == "n/a"]


def described(usual=None, **changes):
    """Return a function that builds a model, by default a correct one, but for what is said about it."""

    def build(seed=0):
        model = (usual or plain())(seed)
        for key, value in changes.items():
            setattr(model, key, value)
        return model

    return build


def test_what_is_not_said_is_not_judged():
    report = routing.check(described(evaluate=None, dense=None, route=None, protect=()))
    assert report.ok
    assert absent(report) == ["handed on", "dense evaluation", "equal evaluation", "ranks differ"]
    assert report["rate"].evidence == "11 of 16 tokens skip (0.688)"


def test_the_route_none_is_that_of_a_dense_model():
    report = routing.check(described(plain("no route"), route="none"))
    assert report.ok, str(report)
    assert report["routed blocks"].evidence == "no block saw fewer tokens in training, as intended (route none)"
    report = routing.check(described(route="none"))
    assert report.failed == ("routed blocks",) and report["rate"].result == "n/a"
    assert report["routed blocks"].evidence.endswith("blocks 4-5 saw all; the route none skips no blocks")


def test_a_pass_without_a_route_among_others_is_named():
    evidence = routing.check(plain("first pass dense"))["routed blocks"].evidence
    assert re.match("blocks 0-5 saw all in 1 of [2-9] passes; the route 1-3 skips blocks 1-3", evidence), evidence
    evidence = routing.check(described(plain("first pass dense"), route=None))["routed blocks"].evidence
    assert re.search("; 1 of [2-9] passes had no route", evidence), evidence


@pytest.mark.parametrize(
    ("build", "name", "result", "evidence"),
    [
        (described(protect=()), "rate", "FAIL",
         "11 of 16 tokens skip (0.688): 0.75 is neither the skipped nor the kept share; TREAD counts those that skip; "
         "text or class tokens? state protect="),
        (plain("rate counts kept", rate=0.5), "rate", "n/a",
         "8 of 15 tokens skip (0.533): 0.5 of 15 is as many skipped as kept, to one token; check at a rate such as 0.75"),
        (plain("unsorted"), "order", "FAIL", "if the blocks are plain attention, state ordered=False"),
        (plain("end not included"), "routed blocks", "FAIL", "the end of the route is counted exclusively"),
        (plain("schedule ignored", until=3), "routed blocks", "FAIL",
         "pass 3: block 0 saw all 16 tokens, blocks 1-3 saw 5 of 16, blocks 4-5 saw all in 3 of 6 passes; the route none"),
        (plain(until=3), "routed blocks", "pass", "6 passes follow the route 1-3@0.75/0.5:none"),
        (plain(lengths=(16, 25, 9), evaluated=36), "protected tokens", "pass", "all 5 or 6 or 7 or 8 rows"),
        (plain("unsorted", ordered=False), "order", "n/a", "ordered=False"),
        (by_length, "order", "FAIL", "scans token"),
        (ours("mamba", "1-4@0.5", mixers=1), "order", "pass",
         "; 4 of them scan along the same path as with all tokens"),
        (described(protect=slice(0, 2)), "protected tokens", "FAIL", "positions 1 skipped blocks"),
        (plain("one subset for the batch"), "samples differ", "FAIL",
         "the samples of a batch kept the same tokens in 4 of 4 passes; "
         "if that is meant, as with one rotary table for the batch, state shared=True"),
        (described(plain("one subset for the batch"), shared=True), "samples differ", "n/a", "they are meant to"),
        (described(shared=True), "samples differ", "FAIL", "in 0 of 4 passes; shared=True: they are meant to"),
    ],
)  # fmt: skip
def test_the_evidence_says_what_was_seen_and_what_may_be_stated(build, name, result, evidence):
    report = routing.check(build)
    assert report[name].result == result and evidence in report[name].evidence
    assert report.failed == ((name,) if result == "FAIL" else ()), str(report)


def protected(protect):
    """Return the positions that a description protects, of 3 samples of 16 tokens."""
    model = RoutedModel(blocks=[nn.Linear(2, 2)], train=lambda: None, protect=protect)
    return model.protected(3, 16).any(0).nonzero().flatten().tolist()


def test_protected_tokens_may_be_given_as_attach_takes_them():
    first = torch.arange(16) == 0
    for protect in (slice(0, 1), [slice(0, 1)], first, first.expand(3, 16), torch.tensor([0]), range(1), [-16]):
        assert protected(protect) == [0], protect
    for wrong, part in (
        (slice(17, None), r"protect=slice\(17, None, None\) protects none of the 16 tokens"),
        (3, "protect=3: expected positions below 16"),
        ([16], r"protect=\[16\]: expected positions below 16"),
        (torch.zeros(7, dtype=torch.bool), r"protect of shape \(7,\): expected \(16,\) or \(3, 16\)"),
    ):
        with pytest.raises(CheckError, match=part):
            protected(wrong)


def test_random_numbers_and_hooks_are_put_back():
    models = []

    def build(seed=0):
        models.append(plain()(seed))
        return models[-1]

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    routing.check(build)
    assert torch.equal(torch.rand(1), expected)
    for model in models:
        for block in model.blocks:
            assert not block._forward_hooks and not block._forward_pre_hooks


def linear_blocks(train, width=8, dtype=torch.float32):
    """Return a function that builds three linear blocks; `train` runs them on tokens (2, 8, D)."""

    def build(seed=0):
        blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).to(dtype)
        x = torch.randn(2, 8, width, dtype=dtype)
        return RoutedModel(blocks=blocks, train=lambda: train(blocks, x))

    return build


def dense(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def attached_blocks(run, when="training"):
    """Return a function that builds four blocks with a route; `run` calls them."""

    def build(seed=0):
        blocks, x = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), torch.randn(2, 8, 8)
        routing.attach(blocks, "1-2@0.75", seed=seed, when=when)
        return RoutedModel(
            blocks=blocks,
            train=lambda: run(blocks.train(), x),
            evaluate=lambda: run(blocks.eval(), x),
            dense=lambda: x,
        )

    return build


def test_routing_that_is_left_on_in_evaluation_is_named_beside_dropout():
    report = routing.check(attached_blocks(dense, when="always"))
    assert report.failed == ("dense evaluation", "equal evaluation")
    assert "is routing (see dense evaluation) or dropout still active?" in report["equal evaluation"].evidence


def test_blocks_under_activation_checkpointing_are_followed():
    def checkpointed(blocks, x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    report = routing.check(attached_blocks(checkpointed))
    assert report.failed == ("equal evaluation",) and report["gradient"].result == "pass", str(report)


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (linear_blocks(lambda b, x: [dense(b, x), dense(b, x)]), "the blocks ran twice in one pass"),
        (linear_blocks(lambda b, x: None), "did not run the blocks"),
        (linear_blocks(lambda b, x: dense(b[1:], 2 * b[0](x))), "no marked token comes into block 1"),
        (linear_blocks(lambda b, x: dense(b[1:], b[0](x).flip(1))), "the model reorders its tokens between block 0 and"),
        (linear_blocks(lambda b, x: dense(b[1:], b[0](x)[:, ::2])), "a route ends with the last block 2.* pass after="),
        (linear_blocks(dense, width=4), "marks of 3 blocks need 5"),
        (lambda: 3, "returns a int; expected"),
        (lambda model, seed=0: 3, "missing a required argument: 'model'; expected one that needs no argument"),
    ],
)
def test_a_model_that_cannot_be_followed_is_refused_with_the_reason(build, part):
    with pytest.raises(CheckError, match=part):
        routing.check(build)


def test_a_description_that_cannot_be_right_is_refused():
    block = nn.Linear(2, 2)
    for wrong, part in (
        ({"blocks": []}, "expected a list of modules"),
        ({"blocks": [block, block]}, "twice"),
        ({"train": torch.zeros(2)}, "train is a Tensor; expected a function"),
        ({"dense": 3}, "dense is a int; expected a function"),
        ({"before": "norm"}, "before is a str; expected a module"),
        ({"tables": "freqs"}, r"tables='freqs': expected names in a sequence: \('freqs',\)"),
        ({"route": "0-0/0.5:none"}, "steps=None: expected the number of training passes in a short run, 1 to 64"),
    ):
        with pytest.raises(CheckError, match=part):
            RoutedModel(**{"blocks": [block], "train": lambda: None, **wrong})


# --- the command and its page


def row_of(name, report):
    """Return a model's row of the table on the page."""
    results = {}
    for finding in report.findings:
        results.setdefault(finding.result, []).append(finding.name)
    everywhere = ("handed on", "ranks differ")  # not applicable to any of these models
    absent = ", ".join(name for name in results.get("n/a", []) if name not in everywhere) or "-"
    passed = len(results.get("pass", []))
    return f"| {name} | {passed} | {', '.join(report.failed) or '-'} | {absent} |"


def without_draws(text):
    """Return an output without the tokens that happened to be drawn, and its line breaks."""
    return re.sub(r"in the order [\d, ]+", "in the order ", " ".join(text.split()))


@pytest.mark.parametrize(("function", "code"), [("vit", 0), ("rewrite", 1)])
def test_the_page_shows_what_the_command_prints(function, code, capsys):
    pytest.importorskip("timm")
    assert main([f"{ROOT}/examples/check_routing.py:{function}"]) == code
    printed = capsys.readouterr().out
    assert without_draws(printed) in [without_draws(text) for text in blocks(PAGE, "text")], printed
    if function == "rewrite":
        report = routing.check(sys.modules["check_routing"].rewrite)
        assert report.failed == ("order", "restart")
        row = row_of("rewrite of the released structure", report)
        assert row in PAGE.read_text().splitlines()


def broken_builder(seed=0):
    raise TypeError("of the user's own code")


def test_an_error_of_the_models_own_code_is_shown(capsys):
    assert main([f"{__file__}:broken_builder"]) == 2
    printed = capsys.readouterr()
    assert "TypeError: of the user's own code" in printed.err and not printed.out
