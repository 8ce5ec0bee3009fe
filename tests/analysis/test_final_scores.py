"""Scores of a study's arms after the last step, against records and numbers by hand."""

import dataclasses
import json

import pandas as pd
import pytest
from analysis_runs import METRIC, evaluate, lines, score, write
from scipy.stats import t
from suite import RESULTS
from test_compute import DENSE, ROUTED, SHALLOW

from analysis.comparison.final_scores import final_scores, scores_table
from analysis.runs.archives import unpack


def test_scores_are_those_of_the_evaluations_at_the_last_step(tmp_path):
    scores = final_scores(unpack(RESULTS / "study_equal_macs.tar.gz", tmp_path))
    frames = {arm.label: frame for arm, frame in scores.items() if arm.backbone == "dit"}
    assert frames["dense"].loc[5, "FD"] == pytest.approx(20.529, abs=1e-3)
    assert frames["route 2-8"].loc[6, "FD"] == pytest.approx(19.712, abs=1e-3)
    assert frames["dense, 8 blocks"].loc[5, "accuracy"] == pytest.approx(0.767, abs=1e-3)


def test_differences_are_paired_by_seed():
    columns = {"precision": 0.7, "recall": 0.6, "accuracy": 0.75}
    frames = {
        DENSE: pd.DataFrame({"FD": [20.0, 22.0, 30.0], **columns}, index=[5, 6, 7]),
        ROUTED: pd.DataFrame({"FD": [21.0, 25.0], **columns}, index=[5, 6]),
        SHALLOW: pd.DataFrame({"FD": [19.0], **columns}, index=[5]),
    }
    _, dense, routed, shallow = scores_table(frames)
    assert dense[:4] == ["dit", "dense", "5, 6, 7", "24.0"]
    half = t.ppf(0.975, 1) * 2**0.5 / 2**0.5  # differences 1 and 3: deviation sqrt(2), two pairs
    assert routed[2:4] == ["5, 6", f"23.0 (+2.0 ± {half:.1f})"]
    assert shallow[3] == "19.0"  # one pair has no interval


def test_the_longer_of_two_runs_of_one_seed_counts(tmp_path):
    expected = []
    for seed in range(6):
        write(tmp_path, seed=seed)
        longer = write(tmp_path, seed=seed, train__steps=800)
        expected.append(json.loads((longer / "summary.json").read_text())["scores"][METRIC])
    (frame,) = final_scores(tmp_path).values()
    assert frame["FD"].to_list() == expected


def test_runs_that_were_scored_with_the_same_two_samplers_in_another_order_are_compared_under_one(tmp_path):
    for seed, samplers in enumerate([(24, 250), (250, 24), (250, 24)]):
        run = write(tmp_path, seed=seed)
        lines(run / "scores.jsonl", [score({}, 400, 0.3, "heldout-loss-500", key="heldout_loss")])
        for order, steps in enumerate(samplers):
            evaluate(run, str(order), [score({}, 400, float(steps), sampler=f"ddpm steps={steps}")])
    (frame,) = final_scores(tmp_path).values()
    assert frame["FD"].nunique() == 1


def test_a_score_on_the_way_is_not_the_final_one(tmp_path):
    for seed, steps in enumerate([(200, 400), (200,)]):
        lines(write(tmp_path, seed=seed) / "scores.jsonl", [score({}, step, float(step)) for step in steps])
    (frame,) = final_scores(tmp_path).values()
    assert frame["FD"].dropna().to_dict() == {0: 400.0}


def test_scores_of_a_run_are_of_one_protocol_its_own_if_it_has_one(tmp_path):
    scored, evaluated = write(tmp_path, seed=0), write(tmp_path, seed=1)
    lines(evaluated / "scores.jsonl", [score({}, 400, 0.3, "heldout-loss-500", key="heldout_loss")])
    for folder, first in ((scored, 1.0), (evaluated, 2.0)):
        evaluate(folder, "a", [score({}, 400, first, guidance="none scale=1.0")])
        evaluate(folder, "b", [score({}, 400, 9.0, guidance="cfg scale=3.0")])
        evaluate(folder, "c", [score({}, 400, 9.0, "FD-2K (digits-classifier)", guidance="none scale=1.0", n=2000)])
    own = json.loads((scored / "summary.json").read_text())["scores"][METRIC]
    (frame,) = final_scores(tmp_path).values()
    assert frame["FD"].to_dict() == {0: own, 1: 2.0}


def test_arms_name_their_options_and_a_missing_metric_is_empty():
    frame = pd.DataFrame({"FD": {0: 2.0}}).reindex(columns=["FD", "precision", "recall", "accuracy"])
    arm = dataclasses.replace(DENSE, batch=32, objective="flow", width=32)
    (row,) = scores_table({arm: frame})[1:]
    assert row == ["dit", "dense, batch 32, flow, width 32", "0", "2.0", "", "", ""]
