"""Names, options and YAML: what can be asked for, and what is said when it cannot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backbones.validation import validate
from experiments.options.evaluation import (
    EvalOptions,
    MetricError,
    Score,
    defaults_for,
    full_name,
    options_for,
    plan_scores,
)
from routing.errors import UserError

CONF = Path(__file__).resolve().parents[3] / "experiments" / "conf" / "eval"


@pytest.mark.parametrize(
    ("metric", "n", "features", "name"),
    [
        ("fd", 5000, "inception-adm", "FID-5K (inception-adm)"),
        ("fd", 50000, "dinov2-vitl14", "FD-DINOv2-50K (dinov2-vitl14)"),
        ("fd", 500, "digits-classifier", "FD-500 (digits-classifier)"),
        ("memorisation_pixels", 100, None, "memorisation-pixels-100"),
        ("adherence_colour", 1000, "scenes-probe", "adherence-colour-1K (scenes-probe)"),
    ],
)
def test_full_names(metric: str, n: int, features: str | None, name: str) -> None:
    assert full_name(metric, n, features) == name


def options_of(values: dict[str, Any]) -> EvalOptions:
    options: EvalOptions = validate(EvalOptions, values, "eval.")
    return options


@pytest.mark.parametrize("path", sorted(p for p in CONF.glob("*.yaml") if p.stem != "none"), ids=lambda p: p.stem)
def test_every_preset_is_valid_and_can_be_measured(path: Path) -> None:
    options = options_of(defaults_for(path.stem))
    if path.stem != "latents":  # an alias of inception
        assert options.name == path.stem
    plan = plan_scores(options, path.stem, labelled=True, sizes={})
    assert plan or options.metrics == ("heldout_loss",)  # which needs no features


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"metrics": ("fdi",)},
            r"eval.metrics=\[fdi\]: expected one of fd, sfid, .*, or a list of these; did you mean fd",
        ),
        ({"metrics": ()}, r"eval.metrics=\[\]: expected some of fd, sfid"),
        ({"features": ("inception",)}, "did you mean inception-adm"),
        ({"samples": 1}, "eval.samples=1: expected an integer >= 2"),
    ],
)
def test_wrong_options_are_one_sentence(values: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        options_of(values)
    assert "\n" not in str(caught.value)


def test_one_name_is_a_list_of_one() -> None:
    options = options_of({"metrics": "fd", "features": "autoencoder"})
    assert (options.metrics, options.features) == (("fd",), ("autoencoder",))


def test_a_run_without_conditions_loses_what_compares_with_them() -> None:
    config = SimpleNamespace(data={"name": "digits"}, eval={"name": "none"}, task="none")
    assert "accuracy" not in options_for(config).metrics
    assert options_for(config, metrics=["accuracy"]).metrics == ("accuracy",)
    config.eval = {"metrics": ["accuracy"]}
    with pytest.raises(MetricError, match="expected some of"):
        options_for(config)


def test_a_metric_needs_features_that_can_measure_it() -> None:
    def assign(metrics: tuple[str, ...], *features: str) -> dict:
        return plan_scores(EvalOptions(metrics=metrics, features=features), "digits", True, {})

    plan = assign(("fd", "sfid", "accuracy"), "inception-adm", "digits-classifier")
    assert plan == {"inception-adm": ("fd", "sfid"), "digits-classifier": ("fd", "accuracy")}
    with pytest.raises(MetricError, match="metric sfid cannot be measured .* use inception-adm"):
        assign(("fd", "sfid"), "digits-classifier")
    with pytest.raises(MetricError, match="metric accuracy .* use digits-classifier"):
        assign(("accuracy",), "dinov2-vitl14")


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(MetricError, match="is nan: the samples"):
        Score("FD-2 (x)", "fd", float("nan"), 2, None, None)
