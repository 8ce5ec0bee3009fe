"""The six scores that a run prints, chosen by hand here."""

from __future__ import annotations

import yaml
from small import ROOT

from experiments.evaluation.headline import MEANINGS, headline, one_line
from experiments.options.evaluation import METRICS, full_name


def entry(key: str, value: float, features: str | None = "a-classifier@12345678") -> dict[str, object]:
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


def test_six_scores_of_the_data_sets_own_network_are_printed() -> None:
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


def test_the_short_form_fits_a_terminal() -> None:
    text = one_line(ALL)
    assert text == "FD 12.3  accuracy 0.5  recall 0.0789  held-out loss 0.123"
    assert len(f"step 400000:  {text}") <= 80


def test_names_of_published_metrics_stay() -> None:
    features = "inception-adm@6726825d"
    scores = [entry(key, 2.0, features) for key in ("fd", "sfid", "is", "precision", "recall")]
    scores.append(entry("heldout_loss", 0.1, None))
    names = [score.short_name for score in headline(scores)]
    assert names == ["FID", "sFID", "IS", "precision", "recall", "held-out loss"]
    assert headline([]) == [] and one_line([]) == ""


def test_every_preset_has_its_scores_explained() -> None:
    """A line of the table: name, value and meaning within 80 columns."""
    assert max(map(len, MEANINGS.values())) + len(", unseen images 0.81") <= 80
    assert all(len(meaning) <= 48 for meaning in MEANINGS.values())
    presets = (ROOT / "experiments" / "conf" / "eval").glob("*.yaml")
    for preset in presets:
        for metric in yaml.safe_load(preset.read_text()).get("metrics", ()):
            assert metric in MEANINGS or metric in ("kid", "memorisation_pixels"), (preset, metric)
