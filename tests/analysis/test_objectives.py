"""Declared differences between objectives and routes, from records with known scores."""

import pytest
from analysis_runs import evaluate, lines, score, write
from scipy.stats import t

from analysis.comparison.objectives import contrasts_table, objective_scores, objectives_table
from analysis.errors import AnalysisError

SAMPLERS = {"edm": ["heun steps=12"], "ddpm": ["ddpm steps=24", "ddpm steps=250"], "flow": ["heun steps=12"]}
FD = {"edm": 20.0, "ddpm": 30.0, "flow": 25.0}


@pytest.fixture
def folder(tmp_path):
    """Three seeds; routed runs are 1 point worse, and 2 for seed 2; DDPM gains 5 points from 250 evaluations."""
    for objective, samplers in SAMPLERS.items():
        for seed in range(3):
            for route in ("none", "2-8"):
                penalty = (1 + (seed == 2)) * (route != "none")
                values = {}
                for index, sampler in enumerate(samplers):
                    values[sampler] = FD[objective] + seed - 5 * index + penalty
                evaluated(tmp_path, values, seed=seed, route=route, objective={"name": objective})
    return tmp_path


def evaluated(folder, values, **over):
    """Write a run that was scored by `evaluate` alone, with an FD for each sampler."""
    run = write(folder, **over)
    lines(run / "scores.jsonl", [score({}, 400, 0.3 if over.get("route") != "2-8" else 0.306, "heldout-loss-500", key="heldout_loss")])
    for index, (sampler, value) in enumerate(values.items()):
        metric = "FD-2K (digits-classifier)"
        evaluate(run, str(index), [score({}, 400, value, metric, sampler=sampler, n=2000)])


def test_declared_differences_are_paired_by_seed_and_sampler(folder):
    frame = objective_scores(folder, 400)
    _, *means = objectives_table(frame)
    assert ["dit", "ddpm", "dense", "ddpm steps=250", "0, 1, 2", "26.0"] in [row[:6] for row in means]
    _, *rows = contrasts_table(frame)
    half = t.ppf(0.975, 2) * (1 / 3) ** 0.5 / 3**0.5  # differences 1, 1 and 2
    routed = f"+1.3 \u00b1 {half:.1f}"
    assert [row[1:5] for row in rows] == [
        ["dense edm - dense ddpm", "heun steps=12 against ddpm steps=24", "3", "-10.0 \u00b1 0.0"],
        ["dense edm - dense ddpm", "heun steps=12 against ddpm steps=250", "3", "-5.0 \u00b1 0.0"],
        ["routed edm - dense edm", "heun steps=12", "3", routed],
        ["routed ddpm - dense ddpm", "ddpm steps=24", "3", routed],
        ["routed ddpm - dense ddpm", "ddpm steps=250", "3", routed],
        ["routed flow - dense flow", "heun steps=12", "3", routed],
    ]
    assert {row[-1] for row in rows[:2]} == {""} and {row[-1] for row in rows[2:]} == {"+2.00 % [+2.00, +2.00]"}


def test_scores_of_another_step_do_not_count_and_two_runs_of_one_arm_are_refused(folder):
    assert objective_scores(folder, 300).empty
    # A run without scores of samples is no arm; its held-out loss replaces none.
    lines(write(folder, train__lr=9.0) / "scores.jsonl", [score({}, 400, 99.0, "heldout-loss-500", key="heldout_loss")])
    assert objective_scores(folder, 400)["loss"].max() < 1
    evaluated(folder, {"heun steps=12": 1.0}, train__lr=1.0)
    with pytest.raises(AnalysisError, match="several scores of backbone dit, objective edm, routed (False|True)"):
        objective_scores(folder, 400)


def test_a_dense_fine_tune_is_no_routed_model(tmp_path):
    evaluated(tmp_path, {"heun steps=12": 1.0}, init="runs/dit-T1-digits_2-8_s0-0123abcd@400")
    assert not objective_scores(tmp_path, 400)["routed"].any()
