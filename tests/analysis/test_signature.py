"""Scores under guidance, routed against dense, from records with known scores."""

import pytest
from analysis_runs import evaluate, lines, score, write

from analysis.comparison.signature import signature_table
from analysis.errors import AnalysisError

NONE, CFG, ROUTED = "none scale=1.0", "cfg scale=1.5", "routed scale=1 strong=0.5 route=auto"


def scored(folder, seed, route, accuracy, step=400):
    run = write(folder, seed=seed, route=route)
    lines(run / "scores.jsonl", [score({}, step, 0.3, "heldout-loss-500", key="heldout_loss")])
    for guidance, value in accuracy.items():
        name = f"{guidance.replace(' ', '-')}-{step}"
        evaluate(run, name, [score({}, step, value, "accuracy-500 (digits-classifier)", guidance=guidance)])


@pytest.fixture
def folder(tmp_path):
    """Three seeds: the route raises accuracy by .02, CFG dense accuracy by .1 and routed accuracy by .04."""
    for seed in range(3):
        base = 0.7 + 0.01 * seed
        scored(tmp_path, seed, "none", {NONE: base, CFG: base + 0.1})
        scored(tmp_path, seed, "2-8", {NONE: base + 0.02, CFG: base + 0.06, ROUTED: base + 0.01})
    return tmp_path


def accuracies(table):
    head, *rows = table
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_differences_and_responses_are_paired_by_seed(folder):
    scored(folder, 7, "2-8", {NONE: 0.1, CFG: 0.2})  # without a dense run: counts in its own response alone
    rows = accuracies(signature_table(folder))
    assert {row["Difference"]: (row["Pairs"], row["accuracy"]) for row in rows} == {
        "2-8 - dense": ("3", "+0.020 ± 0.000"),
        "2-8 - dense under CFG 1.5": ("3", "-0.040 ± 0.000"),
        "2-8, change by CFG 1.5": ("4", "+0.055 ± 0.048"),
        "dense, change by CFG 1.5": ("3", "+0.100 ± 0.000"),
        "2-8 - dense, change by CFG 1.5": ("3", "-0.060 ± 0.000"),
        "2-8, change by routed inference": ("3", "-0.010 ± 0.000"),
    }
    assert {row["Samples"] for row in rows} == {"500"} and {row["FD"] for row in rows} == {""}


def test_each_number_of_steps_has_its_rows(folder):
    run = next(path for path in folder.iterdir() if "none" in path.name)
    evaluate(run, "early", [score({}, 200, 0.5, "accuracy-500 (digits-classifier)", guidance=CFG)])
    evaluate(run, "early-none", [score({}, 200, 0.4, "accuracy-500 (digits-classifier)", guidance=NONE)])
    rows = [row for row in accuracies(signature_table(folder)) if row["Steps"] == "200"]
    assert [(row["Difference"], row["Pairs"], row["accuracy"]) for row in rows] == [
        ("dense, change by CFG 1.5", "1", "+0.100")
    ]


def test_samples_without_guidance_alone_give_no_rows(tmp_path):
    scored(tmp_path, 0, "none", {NONE: 0.7})
    scored(tmp_path, 0, "2-8", {NONE: 0.8})
    assert len(signature_table(tmp_path)) == 1


def test_scores_that_cannot_be_told_apart_are_refused(folder):
    run = next(path for path in folder.iterdir() if "none" in path.name)
    again = score({}, 400, 0.9, "accuracy-500 (digits-classifier)", guidance="cfg scale=1.0")
    evaluate(run, "again", [again])
    with pytest.raises(AnalysisError, match=r"dense: several scores of one seed under CFG 1; expected one"):
        signature_table(folder)
    evaluate(run, "again", [{**again, "guidance": "cfg scale=2", "features": "digits-classifier@deadbeef"}])
    with pytest.raises(AnalysisError, match=r"features .* and digits-classifier@deadbeef; expected one"):
        signature_table(folder)


def test_a_score_that_fewer_pairs_have_says_so(folder):
    for run in sorted(folder.iterdir())[:5]:
        evaluate(run, "fd", [score({}, 400, 20.0, "FD-500 (digits-classifier)", guidance=NONE)])
    difference = accuracies(signature_table(folder))[0]
    assert (difference["Pairs"], difference["FD"]) == ("3", "+0.0 ± 0.0 (n=2)")
