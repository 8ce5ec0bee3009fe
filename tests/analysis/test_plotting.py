"""`analysis.plot` draws the numbers that a loop gives, and the recipes of docs/dataframe.md run as printed."""

import itertools
import re
from pathlib import Path

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


@pytest.mark.parametrize(
    ("curves", "panels"),
    [
        ({"first": ["none"], "second": ["2-8"], "third": ["none", "0-8"]}, ["first", "second", "third"]),
        ({"a": [f"{start}-{start + 4}" for start in range(14)]}, ["a"]),
        ({f"a label of a group in many words, scale {part}": ["none", "2-8"] for part in range(5)}, None),
        ({"a": [f"SPRINT 2-8@0.75, selection=quad, path_drop=0.{part}" for part in range(6)]}, ["a"]),
    ],
    ids=["other curves in each panel", "more curves than colours", "long titles", "long labels"],
)
def test_every_curve_is_in_the_legend_and_no_text_covers_another(curves, panels):
    rows = []
    for panel, routes in curves.items():
        for route in routes:
            for step in (10, 20, 30, 40):
                rows.append({"panel": panel, "route": route, "step": step, "seed": 0, "fd": 1000.5 * step})
    figure = analysis.plot(pd.DataFrame(rows), col="panel").figure
    drawn = [ax for ax in figure.axes if ax.get_visible()]
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == list(dict.fromkeys(route for routes in curves.values() for route in routes))
    looks = [(line.get_color(), line.get_marker()) for line in legend.get_lines()]
    assert len(set(looks)) == len(labels)
    if panels:
        assert [ax.get_title("left") for ax in drawn] == panels
    figure.canvas.draw()
    boxes = [legend.get_window_extent()]
    for ax in drawn:
        assert ax.get_position().height * figure.get_figheight() > 1  # inches
        low, high = ax.get_xlim()
        ticks = [text for text in ax.get_xticklabels() if low <= text.get_position()[0] <= high]
        texts = [ax._left_title, ax.xaxis.label, *ticks]
        boxes += [text.get_window_extent() for text in texts if text.get_text()]
    assert not [(one, other) for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


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
