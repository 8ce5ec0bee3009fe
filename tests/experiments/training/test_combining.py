"""docs/combining.md says the truth: every "yes" of its tables trains and samples, every "no" is refused."""

import json

import pytest
import torch
from small import ROOT, small
from suite import registered

from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.trained_model import load_model
from experiments.options.guidance import GUIDANCE as GUIDANCE_OPTIONS
from experiments.training.session import train
from routing.errors import UserError

PAGE = (ROOT / "docs" / "combining.md").read_text(encoding="utf-8")
# The words of the page on four blocks and 64 tokens.
SMALLER = {"route=auto": "route=1-2", "route=2--4@0.75": "route=1-2@0.75"}
SMALLER["backbone.decoder={depth:8,width:512,heads:16}"] = "backbone.decoder={depth: 1, width: 32, heads: 2}"


def table(heading):
    """The columns after the words, and for each row its words and what it says in each column."""
    lines = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    columns, entries = rows[0][2:], {}
    for name, words, *answers in rows[2:]:
        assert set(answers) <= {"yes", "no"}, name
        verdicts = {column: answer == "yes" for column, answer in zip(columns, answers, strict=True)}
        entries[name] = [SMALLER.get(word, word) for word in words.strip("`").split()], verdicts
    return columns, entries


BACKBONES, TOKENS = table("What happens to tokens")
_, ADDED = table("What is added to the training")
_, GUIDANCE = table("Guidance at sampling")


def two_steps(folder, *words):
    config = small(folder, *words, "train.steps=2", "train.keep_every=1", "train.save_every=1")
    return config, train(config, quiet=True)


def sample(config, run, words):
    """Two images of a trained run under some guidance, with one Heun step and an Euler step."""
    options = {key.removeprefix("guidance."): value for key, value in (word.split("=", 1) for word in words)}
    options["name"] = options.pop("guidance")
    for key in ("strong", "weak", "high"):
        if key in options:
            options[key] = float(options[key])
    if "checkpoint" in options:
        options["checkpoint"] = f"{run}@1"
    pipeline = SamplingPipeline.make(load_model(run).model, config, guidance=options)
    images = pipeline.generate(torch.arange(2), batch=2)
    assert images.shape == (2, 1, 8, 8) and images.isfinite().all()


def test_the_page_has_every_method_and_guidance():
    assert sorted(BACKBONES) == registered("backbone"), "a column of docs/combining.md for each backbone"
    assert list(TOKENS) == ["none", "TREAD", "SPRINT", "MaskDiT"]
    assert {"REPA", "SRA", "Muon", "x-prediction"} <= set(ADDED)
    assert {words[0].partition("=")[2] for words, _ in GUIDANCE.values()} == set(GUIDANCE_OPTIONS)


def combinations():
    """Every pair of backbone and tokens and of tokens and addition, in a run each."""
    runs = []
    for row, tokens in enumerate(TOKENS):
        for column in range(max(len(BACKBONES), len(ADDED))):
            backbone = BACKBONES[(row + column) % len(BACKBONES)]
            runs.append((backbone, tokens, list(ADDED)[column % len(ADDED)]))
    return runs


def test_the_page_refuses_nothing_that_is_not_tried():
    assert all(all(verdicts.values()) for _, verdicts in [*TOKENS.values(), *ADDED.values()])
    pairs = {(backbone, tokens) for backbone, tokens, _ in combinations()}
    assert len(pairs) == len(BACKBONES) * len(TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "tokens", "added"), combinations())
def test_a_combination_trains(backbone, tokens, added, tmp_path):
    config, run = two_steps(tmp_path, f"backbone={backbone}", *TOKENS[tokens][0], *ADDED[added][0])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done" and summary["step"] == 2 and summary["skipped"] == 0
    if added in ("nothing", "x-prediction"):
        for words, verdicts in GUIDANCE.values():
            if verdicts[tokens]:
                sample(config, run, words)
            else:
                with pytest.raises(UserError):
                    sample(config, run, words)
