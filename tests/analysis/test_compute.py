"""Blocks of the results pages: arms, step penalties and endpoints, against numbers by hand."""

import dataclasses
import math

import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from analysis.comparison.aggregation import holm
from analysis.comparison.arms import (
    Arm,
    arms,
    arms_table,
    baseline_arm,
    endpoints_table,
    seeds_table,
    with_details,
)
from analysis.errors import AnalysisError

GROUP = "dit-T/4, fashion, edm, scale tiny"
DENSE = Arm("fashion", "dit", "edm", 0, 12, 16, "dense", 2e-3, GROUP)
ROUTED = dataclasses.replace(DENSE, variant="2-8")
SHALLOW = dataclasses.replace(DENSE, depth=8, group=f"{GROUP} (backbone.depth=8)")


def curve(losses, macs_per_step, first=500):
    """A run that was scored every 500 steps."""
    steps = [first + 500 * index for index in range(len(losses))]
    macs = [step * macs_per_step for step in steps]
    return pd.DataFrame({"step": steps, "macs": macs, "loss": losses, "routed_loss": math.nan}).astype(float)


def test_records_of_a_continued_run_are_one_curve(records):
    dense = arms(records("runs").runs)[DENSE]
    assert list(dense[0]["step"]) == [1000, 2000, 3000, 6000]
    assert {seed: len(points) for seed, points in dense.items()} == {0: 4, 1: 1, 2: 1, 3: 1, 4: 1}


def test_arms_that_differ_in_an_option_without_a_column_are_named_and_paired_by_it():
    pairs = []
    for rate in (0.001, 0.002):
        dense = dataclasses.replace(DENSE, group=f"{GROUP} (train.muon_lr={rate})")
        pairs += [dense, dataclasses.replace(dense, variant="2-8")]
    pairs = with_details(pairs)
    assert [arm.label for arm in pairs] == [
        "dense, train.muon_lr=0.001", "route 2-8, train.muon_lr=0.001",
        "dense, train.muon_lr=0.002", "route 2-8, train.muon_lr=0.002",
    ]  # fmt: skip
    table = dict.fromkeys(pairs, {})
    assert baseline_arm(pairs[1], table) == pairs[0] and baseline_arm(pairs[3], table) == pairs[2]
    # Never with the dense arm of another such option.
    assert baseline_arm(pairs[3], {pairs[0]: {}, pairs[3]: {}}) is None


def test_arms_are_read_at_the_length_that_all_seeds_have():
    curves = {0: curve([0.4, 0.3, 0.2], 1e9), 1: curve([0.5, 0.3], 1e9)}
    (row,) = arms_table({DENSE: curves})[1:]
    assert row == ["dit", "dense", "0.002", "1000", "1.00T", "0, 1", "0.3000 \u00b1 0.0000", ""]


def test_endpoints_name_the_run_that_was_trained_too_briefly_and_how_to_train_it():
    dense, routed = {0: curve([0.4, 0.3, 0.2], 2e9)}, {0: curve([0.5, 0.4, 0.3], 1e9), 1: curve([0.5], 1e9)}
    with pytest.raises(AnalysisError) as caught:
        endpoints_table({DENSE: dense, ROUTED: routed}, 1500)
    message = str(caught.value)
    assert message.startswith("1500 dense steps cost 3T MACs, but dit route 2-8, seed 0, was scored only at 0.5T to 1.5T;")
    assert message.endswith("train.steps=1500 --compare-at flops")
    with pytest.raises(AnalysisError, match="dit dense, seed 0, .*; try --steps N with N up to 1500"):
        endpoints_table({DENSE: dense, ROUTED: routed}, 3000)


def test_endpoints_are_log_ratios_at_equal_macs_with_holm():
    # m = .5: 6 routed scores cost as much as 3 dense ones; the losses there are .21 and .2, .22 and .2.
    dense = {0: curve([0.4, 0.3, 0.2], 2e9), 1: curve([0.4, 0.3, 0.2], 2e9)}
    routed = {}
    for seed, last in ((0, 0.21), (1, 0.22)):
        routed[seed] = curve([0.5, 0.4, 0.35, 0.3, 0.25, last], 1e9)
    head, *rows = endpoints_table({DENSE: dense, ROUTED: routed, SHALLOW: dense}, 1500)
    by_arms = {(row[1], row[2]): row for row in rows}
    change, p_text, saving = by_arms["route 2-8", "dense"][4:]
    mean = math.sqrt(1.05 * 1.10) - 1
    assert change.startswith(f"{100 * mean:+.2f} %")
    p = ttest_1samp([math.log(1.05), math.log(1.10)], 0).pvalue
    assert head[5] == "p (uncorrected)" and p_text == f"{p:.3f}"  # one of three backbones
    assert saving == "loss not reached by 2 of 2"
    interim = endpoints_table({DENSE: dense, ROUTED: routed}, 1500, declared_pairs=3)
    assert len(interim[0]) == len(head) - 1 and "p" not in "".join(interim[0][5:])  # no interim test
    assert all(len(row) == len(interim[0]) for row in interim)
    assert by_arms["dense, 8 blocks", "dense"][5] == ""  # no primary endpoint
    # The gate: the routed arm against the cheap dense one, here as good as the dense baseline.
    assert by_arms["route 2-8", "dense, 8 blocks"][4] == change


def test_changes_by_seed_and_their_median():
    dense = {seed: curve([0.4, 0.3, 0.2], 1e9) for seed in (0, 1, 3)}
    routed = {seed: curve([0.4, 0.3, last], 1e9) for seed, last in ((0, 0.21), (1, 0.23), (2, 0.5), (3, 0.19))}
    head, row = seeds_table({DENSE: dense, ROUTED: routed}, 1500)
    assert head[3:] == ["seed 0", "seed 1", "seed 3", "median"]  # seed 2 has no pair
    assert row == ["dit", "route 2-8", "dense", "+5.00", "+15.00", "-5.00", "+5.00"]
    faster = dataclasses.replace(ROUTED, lr=4e-3, group=f"{GROUP} (train.lr=0.004)")
    rows = seeds_table({DENSE: dense, ROUTED: routed, faster: routed}, 1500)[1:]
    assert [row[1] for row in rows] == ["route 2-8, learning rate 0.002", "route 2-8, learning rate 0.004"]


def test_three_backbones_are_corrected_together():
    lasts = {"dit": (0.21, 0.22), "mamba": (0.19, 0.21), "rwkv": (0.2, 0.23)}
    table, p_values = {}, {}
    for backbone, losses in lasts.items():
        own = {"backbone": backbone, "group": GROUP.replace("dit", backbone)}
        table[dataclasses.replace(DENSE, **own)] = dict.fromkeys((0, 1), curve([0.4, 0.3, 0.2], 1e9))
        routed = {seed: curve([0.4, 0.3, last], 1e9) for seed, last in enumerate(losses)}
        table[dataclasses.replace(ROUTED, **own)] = routed
        p_values[backbone] = ttest_1samp([math.log(last / 0.2) for last in losses], 0).pvalue
    head, *rows = endpoints_table(table, 1500)
    assert head[5] == "p (Holm)"
    assert [row[5] for row in rows] == [f"{holm(p_values)[backbone]:.3f}" for backbone in lasts]


def test_holm_by_hand():
    assert holm({1: 0.01, 2: 0.04, 3: 0.03}) == pytest.approx({1: 0.03, 3: 0.06, 2: 0.06})


def test_an_arm_at_another_rate_is_paired_with_the_dense_run_of_its_rate_or_the_only_one():
    dense_faster = dataclasses.replace(DENSE, lr=4e-3, group=f"{GROUP} (train.lr=0.004)")
    faster = dataclasses.replace(dense_faster, variant="2-8")
    assert baseline_arm(faster, {DENSE: {}, faster: {}}) == DENSE
    assert baseline_arm(faster, {DENSE: {}, dense_faster: {}}) == dense_faster
    third = dataclasses.replace(faster, lr=8e-3, group=f"{GROUP} (train.lr=0.008)")
    assert baseline_arm(third, {DENSE: {}, dense_faster: {}}) is None
