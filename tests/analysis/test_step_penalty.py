"""Step penalty, relative cost and gap: by hand, censored seeds, and the values of the published records."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
from analysis_runs import lines, score, write
from scipy.stats import ttest_1samp

from analysis.comparison import step_penalty as penalty
from analysis.comparison.aggregation import holm, interval, two_sided_p
from analysis.errors import AnalysisError


def curve(losses, macs=10.0):
    """A curve from losses by step, at `macs` multiply-adds per step."""
    frame = pd.DataFrame({"step": list(losses), "loss": list(losses.values())})
    return frame.assign(macs=macs * frame["step"])


DENSE = {1000: 0.3, 2000: 0.25, 4000: 0.2}


def test_the_step_is_interpolated_linearly_in_its_logarithm():
    # Halfway between the losses at 1,000 and 4,000 lies the geometric mean of the steps.
    variant = curve({1000: 0.3, 4000: 0.2})
    assert penalty.steps_to_reach(variant, 0.25) == pytest.approx(2000)
    assert penalty.loss_at(variant, "step", 2000) == pytest.approx(0.25)
    assert penalty.steps_to_reach(variant, 0.2) == 4000


def test_the_first_crossing_counts_where_a_curve_rises_again():
    noisy = curve({1000: 0.3, 2000: 0.24, 3000: 0.26, 4000: 0.2})
    assert 1000 < penalty.steps_to_reach(noisy, 0.25) < 2000


def test_a_target_that_was_passed_before_the_first_logged_step_is_refused():
    with pytest.raises(AnalysisError, match="log earlier steps"):
        penalty.steps_to_reach(curve(DENSE), 0.31)


@pytest.mark.parametrize("step", [500, 5000])
def test_a_loss_outside_the_logged_steps_is_refused(step):
    with pytest.raises(AnalysisError, match="expected a value between 1000 and 4000"):
        penalty.loss_at(curve(DENSE), "step", step)


def test_the_interval_is_that_of_the_logarithm():
    slower = {s: curve({step * s: loss for step, loss in DENSE.items()}, 7.0) for s in (1.2, 1.3, 1.4)}
    result = penalty.paired_penalty({s: curve(DENSE) for s in slower}, slower, 2000)
    assert list(result.seeds["sm"]) == pytest.approx([0.84, 0.91, 0.98])
    logs = [math.log(value) for value in (0.84, 0.91, 0.98)]
    mean = sum(logs) / 3
    std = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    half = 4.302653 * std / math.sqrt(3)
    assert result.sm is not None
    expected = [math.exp(mean), math.exp(mean - half), math.exp(mean + half)]
    assert [result.sm.mean, result.sm.low, result.sm.high] == pytest.approx(expected, rel=1e-6)
    assert result.censored == 0


def test_a_censored_seed_is_counted_and_leaves_no_mean():
    variants = {0: curve(DENSE, 7.0), 1: curve({1000: 0.4, 4000: 0.26}, 7.0)}
    result = penalty.paired_penalty({seed: curve(DENSE) for seed in (0, 1, 2)}, variants, 2000)
    assert list(result.seeds.index) == [0, 1]
    assert list(result.seeds["censored"]) == [False, True] and math.isnan(result.seeds["sm"][1])
    assert result.sm is None and result.s is None and result.censored == 1
    assert result.censored_text == "undecided: 1 of 2 seeds censored"


def test_curves_are_read_from_run_folders(tmp_path):
    folder, rows = write(tmp_path, route="2-8"), []
    for step in (100, 200, 400):
        for key, loss in (("heldout_loss", 30 / step), ("heldout_loss_routed", 33 / step)):
            rows.append(score({}, step, loss, key, key=key, features=None))
    lines(folder / "scores.jsonl", rows)
    (curve,) = penalty.loss_curves(tmp_path).values()
    logged = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert curve["macs"].tolist() == [line["macs"] for line in logged if line["step"] in (100, 200, 400)]
    assert curve[["step", "loss", "routed_loss"]].values.tolist() == [[100, 0.3, 0.33], [200, 0.15, 0.165], [400, 0.075, 0.0825]]


# --- the published records ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(records):
    """Curves of the published pairs by backbone, route and seed; runs that went on are one curve."""
    frame = records("runs").runs
    frame = frame[(frame["data"] == "fashion") & (frame["step"] >= 3000)]
    frame = frame[frame["method"].isin(["dense", "TREAD"]) & frame["route"].isin(["none", "2-8"])]
    curves = penalty.loss_curves(frame)
    merged = {}
    for key, runs in frame.groupby(["backbone", "route", "seed"]):
        parts = [curves[run] for run in runs["run"]]
        merged[key] = pd.concat(parts).drop_duplicates("step").sort_values("step").reset_index(drop=True)
    return merged


@pytest.mark.parametrize(
    ("backbone", "penalties", "m", "sm", "low", "high"),
    [
        ("dit", [1.253, 1.305, 1.260], 0.69, 0.879, 0.831, 0.929),
        ("mamba", [1.305, 1.264, 1.266], 0.71, 0.909, 0.869, 0.950),
    ],
)
def test_the_published_records_give_the_declared_values(published, backbone, penalties, m, sm, low, high):
    arms = [{seed: published[backbone, route, seed] for seed in range(3)} for route in ("none", "2-8")]
    result = penalty.paired_penalty(*arms, 3000)
    assert list(result.seeds["s"]) == pytest.approx(penalties, abs=1e-3)
    assert list(result.seeds["m"]) == pytest.approx([m] * 3, abs=5e-3)
    assert result.sm is not None
    assert [result.sm.mean, result.sm.low, result.sm.high] == pytest.approx([sm, low, high], abs=1e-3)


def test_one_published_pair_is_censored(published):
    arms = [{seed: published["rwkv", route, seed] for seed in range(3)} for route in ("none", "2-8")]
    result = penalty.paired_penalty(*arms, 3000)
    assert list(result.seeds["censored"]) == [True, False, False] and result.sm is None
    assert list(result.seeds["s"])[1:] == pytest.approx([1.357, 1.264], abs=1e-3)


def test_holm_by_hand():
    assert holm({1: 0.01, 2: 0.04, 3: 0.03}) == pytest.approx({1: 0.03, 3: 0.06, 2: 0.06})


def test_the_p_value_is_that_of_a_t_test():
    values = [0.05, 0.02, 0.09]
    assert two_sided_p(interval(values)) == pytest.approx(ttest_1samp(values, 0).pvalue)
