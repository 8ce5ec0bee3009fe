"""The conformance kit: every broken property is caught, and nothing correct is called broken."""

from __future__ import annotations

import pytest
from checked_models import FAULTS, ours, plain, scan_by_length, several_lengths

import routing

PROPERTIES = [
    "routed blocks", "rate", "bit for bit", "order", "positions", "protected tokens", "gradient",
    "dense evaluation", "equal evaluation", "samples differ", "steps differ", "restart",
]  # fmt: skip


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_a_correct_implementation_passes_every_property(rate):
    report = routing.check(plain(rate=rate), seed=7)
    assert [finding.name for finding in report.findings] == PROPERTIES
    absent = ["rate"] if rate == 0.5 else []  # where as many skip as stay
    assert [finding.name for finding in report.findings if finding.result == "n/a"] == absent
    assert report.ok, str(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_property_is_caught(fault):
    name, others = FAULTS[fault]
    report = routing.check(plain(fault))
    assert name in report.failed, str(report)
    assert set(report.failed) <= {name, *others}, str(report)


@pytest.mark.parametrize(
    ("backbone", "route"), [("dit", "0-5@0.25"), ("mamba", "0-1+3-4@0.75"), ("rwkv", "0-5@0.25")]
)
def test_our_models_pass(backbone, route):
    report = routing.check(ours(backbone, route))
    assert report.ok, str(report)
    assert [f.name for f in report.findings if f.result != "pass"] == ["protected tokens"]


def test_a_scan_path_computed_from_the_number_of_tokens_is_caught():
    report = routing.check(scan_by_length)
    assert report.failed == ("order",), str(report)
    assert "scans token" in report["order"].evidence
    correct = routing.check(ours("mamba", "1-4@0.5", mixers=1))
    assert "; 4 of them scan along the same path as with all tokens" in correct["order"].evidence


def test_passes_may_differ_in_tokens_samples_and_text():
    report = routing.check(several_lengths())
    assert report.ok, str(report)
    assert "all 5 or 6 or 7 or 8 rows" in report["protected tokens"].evidence
    absent = [finding.name for finding in report.findings if finding.result == "n/a"]
    assert absent == ["steps differ"]  # no two of these passes have the same shape


@pytest.mark.parametrize(
    ("fault", "name"), [("fixed number", "rate"), ("one subset for each length", "steps differ")]
)
def test_a_fault_in_passes_of_other_lengths_is_caught(fault, name):
    report = routing.check(several_lengths(fault, lengths=(16, 25), evaluated=16))
    assert name in report.failed, str(report)
