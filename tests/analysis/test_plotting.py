"""`analysis.plot` draws the numbers that a loop gives, and the recipes of docs/dataframe.md run as printed."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from analysis_runs import write_pairs
from scipy import stats

import analysis
from analysis.errors import AnalysisError

PAGE = Path(__file__).parents[2] / "docs" / "dataframe.md"
RECIPES = re.findall(r"<!-- recipe -->\n```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_pairs(root, ("dit", "mamba"))
    return root


@pytest.fixture(scope="module")
def scores(folder):
    return analysis.scores(folder)


def test_means_and_bands_are_those_of_the_seeds(scores):
    plot = analysis.plot(scores, x="macs", y="accuracy", hue="route", col="backbone")
    assert len([ax for ax in plot.figure.axes if ax.get_visible()]) == 2
    chosen = scores[(scores["key"] == "accuracy") & (scores["backbone"] == "mamba") & (scores["route"] == "2-8")]
    values = chosen[chosen["step"] == 200]["value"].to_numpy(float)
    low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
    row = plot.data.query("backbone == 'mamba' and route == '2-8' and step == 200").iloc[0]
    assert (row["mean"], row["low"], row["high"], row["n"]) == pytest.approx((values.mean(), low, high, 3))
    assert row["macs"] == pytest.approx(chosen[chosen["step"] == 200]["macs"].mean())


def test_differences_are_paired_by_seed(scores):
    plot = analysis.plot(scores, y="accuracy", hue="route", baseline="none")
    part = scores[(scores["key"] == "accuracy") & (scores["backbone"] == "dit") & (scores["step"] == 400)]
    table = part.pivot(index="seed", columns="route", values="value").astype(float)
    difference = (table["2-8"] - table["none"]).to_numpy()
    low, high = stats.t.interval(0.95, 2, difference.mean(), stats.sem(difference))
    row = plot.data.query("backbone == 'dit' and step == 400").iloc[0]
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((difference.mean(), low, high))
    assert set(plot.data["route"]) == {"2-8"}


def test_the_bootstrap_is_one_of_seeds_and_repeats(scores):
    first, second = (analysis.plot(scores, y="accuracy", bootstrap=500).data for _ in range(2))
    pd.testing.assert_frame_equal(first, second)
    part = scores[(scores["key"] == "accuracy") & (scores["backbone"] == "dit") & (scores["route"] == "none")]
    values = part[part["step"] == 400]["value"].to_numpy(float)
    row = first.query("backbone == 'dit' and route == 'none' and step == 400").iloc[0]
    assert values.min() <= row["low"] <= values.mean() <= row["high"] <= values.max()
    # Of 27 equally likely resamples of three one is the smallest value alone: more than 2.5 %.
    assert row["low"] == pytest.approx(np.sort(values)[0])


def test_a_step_that_a_seed_lacks_is_not_drawn(scores):
    shorter = scores[~((scores["seed"] == 2) & (scores["step"] > 200))]
    assert analysis.plot(shorter, y="accuracy").data["step"].max() == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"y": "acuracy"}, "did you mean accuracy"),
        ({"y": "accuracy", "x": "mac"}, "did you mean macs"),
        ({"y": "accuracy", "baseline": "dense"}, "no route is 'dense'; there are"),
        ({"y": "accuracy", "col": None}, "would average runs of 2 groups"),
    ],
)
def test_a_mistake_is_one_sentence(scores, options, message):
    with pytest.raises(AnalysisError, match=message):
        analysis.plot(scores, **options)


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
def test_the_recipes_of_the_page_run(recipe, folder, scores, tmp_path, monkeypatch):
    assert len(RECIPES) == 5
    monkeypatch.chdir(tmp_path)
    values = {"analysis": analysis, "scores": scores, "curves": analysis.curves(folder)}
    for package in ("seaborn", "parquet"):
        if package in recipe:
            pytest.importorskip({"parquet": "pyarrow"}.get(package, package))
    exec(recipe, values)
    for suffix in re.findall(r'"(\w+\.(?:csv|parquet|pdf))"', recipe):
        assert (tmp_path / suffix).stat().st_size > 100
