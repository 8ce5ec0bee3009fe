"""Relative cost against training length, from curves with known answers."""

import math

import pandas as pd
import pytest
from scipy.stats import ttest_1samp
from test_compute import DENSE, ROUTED

from analysis.comparison.training_length import length_trends, lengths_table, slopes_table

M = 0.7


def curve(exponent, penalty=1.0, growth=0.0, macs=1.0, steps=12000):
    """A run whose loss after n steps is that of a dense run after N, where n = penalty * N ** (1 + growth)."""
    points = list(range(500, steps + 1, 500))
    losses = [(n / penalty) ** (exponent / (1 + growth)) for n in points]
    return pd.DataFrame({"step": points, "macs": [n * macs for n in points], "loss": losses, "routed_loss": math.nan})


def test_the_slope_of_a_known_power_law_is_found_and_tested():
    growths = {5: 0.05, 6: 0.10, 7: 0.12}
    # Logged losses are on a straight line in log-log axes; interpolation between steps adds a little.
    dense = {seed: curve(-0.1) for seed in growths}
    routed = {seed: curve(-0.1, 0.7, growth, M, 30000) for seed, growth in growths.items()}
    (trend,) = length_trends({DENSE: dense, ROUTED: routed})
    slopes = trend.slopes()
    assert slopes == pytest.approx(growths, abs=2e-3)
    for steps, penalty in trend.penalties.items():
        for seed, growth in growths.items():
            assert penalty.seeds["sm"][seed] == pytest.approx(0.7 * steps**growth * M, rel=5e-3)
    (_, row) = slopes_table({DENSE: dense, ROUTED: routed})
    assert row[:3] == ["dit", "route 2-8", "5, 6, 7"]
    assert float(row[5]) == pytest.approx(ttest_1samp(list(slopes.values()), 0).pvalue, abs=5e-4)
    assert float(row[6].split(" ")[0]) == pytest.approx(0.09, abs=2e-3)


def test_a_target_that_is_not_reached_is_a_bound_and_outside_the_slope():
    dense = {seed: curve(-0.1) for seed in (5, 6)}
    routed = {5: curve(-0.1, 1.2, 0.0, M, 17400), 6: curve(-0.1, 1.6, 0.0, M, 17400)}
    for number, run in enumerate(routed.values()):
        run["routed_loss"] = run["loss"] * (1.01 + 0.02 * number)
    head, *rows = lengths_table({DENSE: dense, ROUTED: routed})
    assert [row[2] for row in rows] == ["1,000", "2,000", "3,000", "4,500", "6,000", "9,000", "12,000"]
    # 12,000 dense steps are 14,400 routed ones of seed 5, and 19,200 of seed 6, which ends at 17,000.
    assert rows[-1][3:5] == [f"0.84, > {17000 / 12000 * M:.2f}", "undecided: 1 of 2 seeds censored"]
    assert (rows[0][3], rows[0][6]) == ("0.84, 1.12", "2.00 %")
    # At the MACs of 3,000 dense steps the routed runs have the losses of 3,000 / 0.84 and 3,000 / 1.12 dense steps.
    logarithms = [-0.1 * math.log(1 / 0.84), -0.1 * math.log(1 / 1.12)]
    assert float(rows[2][5].split(" ")[0]) == pytest.approx(100 * math.expm1(sum(logarithms) / 2), abs=0.02)
    (trend,) = length_trends({DENSE: dense, ROUTED: routed})
    assert trend.slopes() == pytest.approx({5: 0, 6: 0}, abs=5e-3)


def test_a_run_of_another_length_shows_the_steps_that_all_pairs_have():
    dense = {5: curve(-0.1), 6: curve(-0.1, steps=3000)}
    routed = {seed: curve(-0.1, 0.9, 0.0, M) for seed in (5, 6)}
    (trend,) = length_trends({DENSE: dense, ROUTED: routed})
    assert list(trend.penalties) == [1000, 2000, 3000]
    assert not list(length_trends({DENSE: dense, ROUTED: {9: routed[5]}}))
