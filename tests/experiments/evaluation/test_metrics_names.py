"""Names, options and YAML: what can be asked for, and what is said when it cannot."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments.options.evaluation import (
    FEATURES,
    METRICS,
    UNSEEN,
    EvalOptions,
    MetricError,
    Score,
    defaults_for,
    full_name,
    measurable,
    plan_scores,
)

CONF = Path(__file__).resolve().parents[3] / "experiments" / "conf" / "eval"


@pytest.mark.parametrize(
    ("metric", "n", "features", "name"),
    [
        ("fd", 5000, "inception-adm", "FID-5K (inception-adm)"),
        ("fd", 50000, "dinov2-vitl14", "FD-DINOv2-50K (dinov2-vitl14)"),
        ("fd", 500, "digits-classifier", "FD-500 (digits-classifier)"),
        ("kid", 1500, "inception-adm", "KID-1500 (inception-adm)"),
        ("accuracy", 200, "digits-classifier", "accuracy-200 (digits-classifier)"),
        ("memorisation_pixels", 100, None, "memorisation-pixels-100"),
        ("adherence_colour", 1000, "scenes-probe", "adherence-colour-1K (scenes-probe)"),
    ],
)
def test_full_names(metric: str, n: int, features: str | None, name: str) -> None:
    assert full_name(metric, n, features) == name


@pytest.mark.parametrize(
    "path", sorted(p for p in CONF.glob("*.yaml") if p.stem != "none"), ids=lambda p: p.stem
)
def test_yaml_has_every_option_with_a_comment(path: Path) -> None:
    text = path.read_text()
    values = yaml.safe_load(text)
    if "defaults" in values:
        # What it does not say itself stands in a file beside it.
        (parent,) = values.pop("defaults")
        assert EvalOptions(**defaults_for(path.stem)) == EvalOptions(
            **defaults_for(parent) | values
        )
        return
    assert set(values) == {f.name for f in dataclasses.fields(EvalOptions)}
    assert values["name"] == path.stem
    options = EvalOptions(**values)
    assert all(
        any(measurable(m, f) for f in options.features) or UNSEEN & set(METRICS[m].needs)
        for m in options.metrics
    )
    lines = text.splitlines()
    assert sum(line.startswith("#") for line in lines) >= 10


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"metrics": ("fdi",)},
            "eval.metrics 'fdi': expected one of fd, sfid, .*; did you mean fd",
        ),
        ({"metrics": ("precison",)}, "did you mean precision"),
        ({"metrics": ()}, "no metric was asked for"),
        ({"metrics": 5}, "eval.metrics=5: expected a list of names"),
        ({"features": [None]}, "eval.features 'None'"),
        ({"features": ("inception",)}, "did you mean inception-adm"),
        ({"labels": "balance"}, "did you mean balanced"),
        ({"samples": 1}, "eval.samples=1: expected a whole number of at least 2"),
        ({"samples": 2.5}, "expected a whole number"),
        ({"neighbours": 0}, "eval.neighbours=0"),
        ({"batch": True}, "eval.batch=True"),
    ],
)
def test_wrong_options_are_one_sentence(values: dict, sentence: str) -> None:
    with pytest.raises(MetricError, match=sentence) as caught:
        EvalOptions(**values)
    assert "\n" not in str(caught.value)


def test_a_metric_needs_features_that_can_measure_it() -> None:
    def assign(metrics: tuple[str, ...], *features: str) -> dict:
        return plan_scores(EvalOptions(metrics=metrics, features=features), "digits", True, {})

    plan = assign(("fd", "sfid", "accuracy"), "inception-adm", "digits-classifier")
    assert plan == {"inception-adm": ("fd", "sfid"), "digits-classifier": ("fd", "accuracy")}
    with pytest.raises(MetricError, match="metric sfid cannot be measured .* use inception-adm"):
        assign(("fd", "sfid"), "digits-classifier")
    with pytest.raises(MetricError, match="metric accuracy .* use digits-classifier"):
        assign(("accuracy",), "dinov2-vitl14")


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_can_be_measured_on_something(metric: str) -> None:
    alone = UNSEEN & set(METRICS[metric].needs)
    assert alone or any(measurable(metric, f) for f in FEATURES)


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(MetricError, match="came out as nan"):
        Score("FD-2 (x)", "fd", float("nan"), 2, None, None)


def test_names_options_and_help_need_no_torch() -> None:
    code = (
        "import sys, experiments.options.evaluation, experiments.options.evaluation, experiments.evaluate as e;"
        "e.parser(); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("data", ["digits", "scenes", "latents", None, "images"])
def test_the_options_that_fit_a_data_set_are_options(data: str | None) -> None:
    from experiments.options.evaluation import EvalOptions, defaults_for

    found = EvalOptions(**defaults_for(data))
    own = {"digits": ("digits-classifier", "autoencoder"), "scenes": ("scenes-probe",)}
    assert found.features == own.get(str(data), ("inception-adm",))
