"""Names and options of scores: what can be asked for, what is said when it cannot, and which six a run prints."""

from pathlib import Path

import pytest

from backbones.validation import validate
from experiments.evaluation.headline import headline, one_line
from experiments.options.evaluation import (
    METRICS,
    EvalOptions,
    MetricError,
    Score,
    defaults_for,
    full_name,
    plan_scores,
)

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
def test_full_names(metric, n, features, name):
    assert full_name(metric, n, features) == name


def options_of(values):
    options: EvalOptions = validate(EvalOptions, values, "eval.")
    return options


@pytest.mark.parametrize("path", sorted(p for p in CONF.glob("*.yaml") if p.stem != "none"), ids=lambda p: p.stem)
def test_every_preset_is_valid_and_can_be_measured(path):
    options = options_of(defaults_for(path.stem))
    if path.stem != "latents":  # an alias of inception
        assert options.name == path.stem
    plan = plan_scores(options, path.stem, labelled=True, sizes={})
    assert plan or options.metrics == ("heldout_loss",)  # which needs no features


def test_one_name_is_a_list_of_one():
    options = options_of({"metrics": "fd", "features": "autoencoder"})
    assert (options.metrics, options.features) == (("fd",), ("autoencoder",))


def test_a_metric_needs_features_that_can_measure_it():
    def assign(metrics, *features):
        return plan_scores(EvalOptions(metrics=metrics, features=features), "digits", True, {})

    plan = assign(("fd", "sfid", "accuracy"), "inception-adm", "digits-classifier")
    assert plan == {"inception-adm": ("fd", "sfid"), "digits-classifier": ("fd", "accuracy")}
    with pytest.raises(MetricError, match="metric sfid cannot be measured .* use inception-adm"):
        assign(("fd", "sfid"), "digits-classifier")
    with pytest.raises(MetricError, match="metric accuracy .* use digits-classifier"):
        assign(("accuracy",), "dinov2-vitl14")
    with pytest.raises(MetricError, match="is for data=mnist, here is the data set digits"):
        assign(("fd",), "mnist-classifier")


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(MetricError, match="is nan: the samples"):
        Score("FD-2 (x)", "fd", float("nan"), 2, None, None)


def entry(key, value, features="a-classifier@12345678"):
    name = full_name(key, 300, features and features.partition("@")[0])
    better = METRICS[key].better if key in METRICS else "higher"
    return {"key": key, "metric": name, "value": value, "features": features, "better": better}


ALL = [
    entry("fd", 12.345),
    entry("accuracy", 0.5),
    entry("precision", 0.6),
    entry("recall", 0.0789),
    entry("memorisation", 0.91),
    entry("memorisation_heldout", 0.8123),
    entry("fd", 99.0, "autoencoder@87654321"),
    entry("precision", 0.1, "autoencoder@87654321"),
    entry("memorisation_pixels", 0.7, None),
    entry("heldout_loss", 0.1234, None),
    entry("heldout_loss_routed", 0.2, None),
]


def test_six_scores_of_the_data_sets_own_network_are_printed():
    rows = [(score.name, score.value) for score in headline(ALL)]
    assert rows == [
        ("FD ↓", "12.3"),
        ("accuracy ↑", "0.5"),
        ("precision ↑", "0.6"),
        ("recall ↑", "0.0789"),
        ("held-out loss ↓", "0.123"),
        ("memorisation", "0.91"),
    ]
    assert headline(ALL)[-1].meaning.endswith("unseen images 0.81")
    assert headline(ALL, classes=10)[1].meaning == "share classified as requested (chance 0.1)"
    assert one_line(ALL) == "FD 12.3  accuracy 0.5  recall 0.0789  held-out loss 0.123"
    assert headline([]) == []


def test_names_of_published_metrics_stay():
    features = "inception-adm@6726825d"
    scores = [entry(key, 2.0, features) for key in ("fd", "sfid", "is", "precision", "recall")]
    scores.append(entry("heldout_loss", 0.1, None))
    names = [score.short_name for score in headline(scores)]
    assert names == ["FID", "sFID", "IS", "precision", "recall", "held-out loss"]
