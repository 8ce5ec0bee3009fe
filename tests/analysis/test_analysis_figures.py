"""Figures: what is drawn is what was measured, in one style, saved as PDF, PNG and CSV."""


import analysis_runs
import numpy as np
import pandas as pd
import pytest
from analysis_runs import (
    METRIC,
    append,
    as_published,
    lines,
    score,
    similarity_map,
    write,
    write_pairs,
)
from matplotlib.text import Text
from PIL import Image
from scipy import stats

import analysis
from analysis import figures
from analysis.comparison.results import Results
from analysis.errors import AnalysisError
from analysis.figures import style
from analysis.figures.convergence import paired_curves
from analysis.figures.scans import ORDERS


def weights(folder, **arguments):
    """Write the header of weights that the cost figure reads."""
    model = {"name": "dit", "size": "T/1", "in_channels": 1, "input_size": [8, 8], "num_classes": 10}
    analysis_runs.write_weights(folder, model=model | arguments)


def test_placement_draws_the_paired_differences(made_runs):
    plot = figures.make("route_placement", as_published(made_runs, "FID-5K"))
    ours = plot.data[plot.data["backbone"] == "mamba"].set_index("route")["delta"]
    frame = made_runs.runs[made_runs.runs.backbone == "mamba"]
    frame = frame[frame["config.routing.selection"] == "random"].pivot_table(index="route", values=f"score.{METRIC}")
    for route in ("2-8", "0-10"):
        expected = frame.loc[route].item() - frame.loc["none"].item()
        assert ours[route] == pytest.approx(expected)
    assert (plot.data["panel"].str.startswith("Paper")).sum() == 16
    text = {t.get_text() for ax in plot.figure.axes for t in ax.texts}
    assert "-21.87" in text and any(t.startswith(f"{ours['2-8']:+.2f}") for t in text)


def test_convergence_has_two_costs_and_labels_the_speedup(made_runs, tmp_path):
    plot = figures.make("convergence", made_runs)
    labels, said = zip(*(ax.get_xlabel().split("\n") for ax in plot.figure.axes[:2]), strict=True)
    assert labels == ("training steps", "training multiply-adds")
    table = analysis.tables.make("speedup", made_runs)
    row = next(r for r in table.rows if r.group.startswith("dit-T/1, digits, edm") and r.entries[0].text == "2-8")
    assert said[0] == f"{row.entries[3].value:.1f}x to dense best (3 of 3 seeds)"
    # Two seeds are too few for a factor.
    write_pairs(tmp_path, seeds=2)
    few = figures.make("convergence", tmp_path).figure.axes[0].get_xlabel().split("\n")[1]
    assert few == "dense best reached by 2 of 2 seeds"
    drawn = plot.data.groupby("panel")["variant"].unique().map(list)
    assert all(variants == ["dense", "2-8"] for variants in drawn)


def test_a_mean_curve_has_the_same_seeds_at_every_step_and_of_two_runs_of_a_seed_the_longer(tmp_path):
    for route in ("none", "2-8"):
        for seed, ends in enumerate([(300,), (300,), (200, 400)]):
            for end in ends:
                run = write(tmp_path, route=route, seed=seed, train__steps=end)
                lines(run / "scores.jsonl", [score({}, step, float(end)) for step in range(100, end + 1, 100)])
    runs = analysis.load(tmp_path)
    for frame in (runs, runs[::-1]):
        (group,) = Results.of(frame).groups
        for _, means in paired_curves(*group.pair()):
            assert means["step"].tolist() == [100, 200, 300] and set(means["n"]) == {3}
            assert means["mean"].tolist() == pytest.approx([1000 / 3] * 3)  # 300, 300, and 400 of the longer


@pytest.mark.parametrize(
    ("dense", "routed", "seeds"),
    [
        ({0: 4, 1: 4, 2: 4}, {0: 4, 1: 4, 2: 4}, [0, 1, 2]),
        ({0: 4, 1: 1, 2: 1}, {0: 4, 1: 4, 2: 4}, [0]),  # others scored at their end alone
        ({0: 4, 1: 4}, {1: 4, 2: 4}, [1]),  # others have no partner
        ({0: 4}, {1: 4}, None),
        ({0: 4, 1: 4}, {0: 1, 1: 1}, None),
    ],
)
def test_convergence_draws_the_same_seeds_dense_and_routed(dense, routed, seeds, tmp_path):
    for route, scored in (("none", dense), ("2-8", routed)):
        for seed, evaluations in scored.items():
            write(tmp_path, route=route, seed=seed, evaluations=evaluations)
    plot = figures.make("convergence", tmp_path)
    if seeds is None:
        assert plot is None
        return
    scores = analysis.scores(tmp_path).query("key == 'fd' and seed in @seeds")
    for variant, drawn in plot.data.groupby("variant"):
        values = scores[(scores["variant"] == variant) & (scores["step"] == 200)]["value"].to_numpy(float)
        point = drawn[drawn["step"] == 200].iloc[0]
        assert (point["mean"], point["n"]) == (pytest.approx(values.mean()), len(seeds))
        if len(seeds) > 1:
            half = stats.t.ppf(0.975, len(seeds) - 1) * stats.sem(values)
            assert point["high"] - point["mean"] == pytest.approx(half)


def test_rate_and_guidance_draw_the_data_of_the_runs(made_runs):
    rate = figures.make("selection_rate", made_runs).data.set_index("rate")["mean"]
    assert sorted(rate.index) == [0.25, 0.5, 0.75]
    table = analysis.tables.make("selection_rate", made_runs)
    half = next(row for row in table.rows if row.entries[0].text == "0.5 on 2-8")
    assert rate[0.5] == pytest.approx(half.entries[2].value)
    plot = figures.make("guidance", made_runs)
    assert set(zip(plot.data["strong"], plot.data["weak"], strict=True)) >= {(0.5, 0.9), (0.3, 0.8), (0.0, 0.7)}
    drawn = next(ax for ax in plot.figure.axes if ax.images).images[0].get_array()
    assert drawn.min() == pytest.approx(plot.data["value"].min())
    assert (plot.data["n"] == 3).all() and plot.data["std"].notna().all()


def test_only_scores_under_the_two_rates_alone_stand_in_their_map(tmp_path):
    folder = write(tmp_path, route="2-8", guidance=True)
    for more in ("low=0.3 high=2.0", "checkpoint=run@5", "null_class=True", "subsets=nested"):
        append(folder, score({}, 400, 1.0, guidance=f"routed scale=1.5 strong=0.3 weak=0.8 {more}"))
    plot = figures.make("guidance", tmp_path)
    assert len(plot.data) == 5 and plot.data["value"].min() > 1


@pytest.mark.parametrize(
    ("data", "names"),
    [("digits", ["0", "1"]), ("fashion", ["T-shirt/top", "Trouser"]), ("folder", ["a long name o\u2026"] * 2)],
)
def test_sample_grids_name_their_classes(data, names, tmp_path):
    """From the metadata of the weights, of Fashion-MNIST without them, else by number."""
    for run in write_pairs(tmp_path, seeds=1, samples=True, data__name=data):
        Image.new("RGB", (64, 80)).save(run / "samples" / "final.png")
        if data == "folder":
            analysis_runs.write_weights(run, data={"class_names": [f"a long name of class {number}" for number in range(10)]})
    axes = [ax for ax in figures.make("samples", tmp_path).figure.axes if ax.get_visible()]
    below = [[text.get_text() for text in ax.get_xticklabels()] for ax in axes]
    assert below[0] == []  # dense and routed columns share the names below
    assert below[1][:2] == names


@pytest.mark.slow
def test_every_figure_fits_a_paper_as_it_is(made_runs, tmp_path):
    """The width of one column or two, a page's height, 7 points, nothing cut off, fonts inside."""
    for backbone in ("dit", "mamba", "rwkv"):
        for run in write_pairs(tmp_path, (backbone,), seeds=1):
            weights(run, name=backbone)
        for route in ("none", "2-8"):
            similarity_map(SIMILAR, route, backbone).save(tmp_path / f"{backbone}{route}.npz")
    plots = [*figures.make_all(made_runs), figures.make("cost", tmp_path)]
    plots += [figures.similarity(sorted(tmp_path.glob("*.npz")))]
    # These want a measurement, or losses on the way: they have tests of their own.
    others = {"guidance_scale", "step_penalty", "equal_macs"}
    assert {plot.name for plot in plots} == set(figures.FIGURES) - others
    for plot in plots:
        content = plot._drawn(format="pdf")
        plot.figure.canvas.draw()
        assert b"/FontFile2" in content and b"/Type3" not in content
        width, height = plot.figure.get_size_inches()
        assert width in (style.SINGLE, style.DOUBLE) and height <= 9, (plot.name, height)
        page = plot.figure.bbox.padded(3)
        beyond = set()  # labels of ticks beyond the limits of their axis, which are not drawn
        for axis in [axis for ax in plot.figure.axes for axis in (ax.xaxis, ax.yaxis)]:
            low, high = sorted(axis.get_view_interval())
            for tick in axis.majorTicks + axis.minorTicks:
                if not low <= tick.get_loc() <= high:
                    beyond |= {tick.label1, tick.label2}
        for text in plot.figure.findobj(Text):
            box = text.get_window_extent()
            if text.get_text().strip() and text.get_visible():
                where = (plot.name, text.get_text(), box)
                assert text.get_fontsize() >= 7, where
                drawn = text.axes is None or text.axes.get_visible()
                inside = page.x0 <= box.x0 and box.x1 <= page.x1 and box.y1 <= page.y1
                assert text in beyond or not drawn or inside, where


def test_cost_per_block_is_the_cost_models(tmp_path):
    from backbones.cost import cost

    for run in write_pairs(tmp_path, seeds=1):
        weights(run)
    plot = figures.make("cost", tmp_path)
    exact = cost("dit", "T/1", in_channels=1, input_size=8, num_classes=10, route="2-8")
    assert plot.data["routed_macs"].tolist() == list(exact.per_block)
    inside = plot.data["routed_macs"] < plot.data["dense_macs"]
    assert plot.data["block"][inside].tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert figures.make("cost", write(tmp_path / "other", route="2-8")) is None
    # Models that this suite cannot build have no cost per block, and take no table away.
    for run in write_pairs(tmp_path / "latents", seeds=1, data__name="latents"):
        weights(run, name="nobody")
    assert figures.make("cost", tmp_path / "latents") is None
    assert analysis.tables.make("high_res", tmp_path / "latents").rows


def test_scan_paths_walk_every_order_and_the_subset_keeps_it():
    plot = figures.scan_paths(side=4)
    for name, part in plot.data.groupby("order"):
        full = part[part["tokens"] == "all tokens"].sort_values("place")
        kept = part[part["tokens"] == "routed subset"].sort_values("place")
        walk = list(zip(full["row"], full["column"], strict=True))
        assert len(set(walk)) == 16
        subset = list(zip(kept["row"], kept["column"], strict=True))
        assert len(subset) == 8 and subset == [place for place in walk if place in set(subset)], name
        if name.startswith("zigzag"):
            assert (np.abs(np.diff(walk, axis=0)).sum(axis=1) == 1).all()
    assert set(plot.data["order"]) == set(ORDERS)


SIMILAR = np.full((13, 13), 0.6) + 0.4 * np.eye(13)  # the input and twelve blocks


def test_similarity_maps_share_one_scale_and_outline_the_route(tmp_path):
    similarity_map(SIMILAR, "none").save(tmp_path / "a.npz")
    similarity_map(SIMILAR, "2-8").save(tmp_path / "b.npz")
    plot = figures.similarity([tmp_path / "a.npz", tmp_path / "b.npz"])
    maps = [ax for ax in plot.figure.axes if ax.images]
    assert len({ax.images[0].get_clim() for ax in maps[:2]}) == 1 and maps[0].images[0].get_clim()[1] == 1.0
    assert [len(ax.patches) for ax in maps[:2]] == [0, 1]
    frame = maps[1].patches[0]
    # Block i is drawn at i + 1, because 0 is the input: blocks 2..8 fill 2.5 to 9.5.
    assert (frame.get_x(), frame.get_width()) == (2.5, 7)
    with pytest.raises(AnalysisError, match="no similarity file"):
        figures.similarity([])


def test_figures_are_saved_as_pdf_png_and_csv(tmp_path, made_runs):
    plot = figures.make("selection_rate", made_runs)
    paths = plot.save(tmp_path)
    assert [path.suffix for path in paths] == [".pdf", ".png", ".csv"]
    with Image.open(paths[1]) as image:
        width, height = plot.figure.get_size_inches()
        assert image.size == (round(width * 200), round(height * 200))
    pd.testing.assert_frame_equal(pd.read_csv(paths[2]), plot.data.reset_index(drop=True), check_dtype=False)
    assert paths[0].read_bytes().startswith(b"%PDF")
    assert plot.svg().startswith("<?xml") and "<svg" in plot.svg()


def test_figures_that_the_runs_do_not_give_are_none_and_unknown_ones_refused(tmp_path):
    (write(tmp_path, samples=True) / "samples" / "final.png").write_bytes(b"\x89PNG nonsense")
    for name in ("convergence", "route_placement", "selection_rate", "samples", "guidance", "cost", "similarity"):
        assert figures.make(name, tmp_path) is None
    with pytest.raises(AnalysisError, match="did you mean route_placement"):
        figures.make("route_placment", tmp_path)


def test_runs_that_logged_no_cost_are_drawn_over_their_steps_alone(tmp_path):
    for run in write_pairs(tmp_path, samples=True):
        (run / "metrics.jsonl").unlink()
    plot = figures.make("convergence", tmp_path)
    said = [ax.get_xlabel().split("\n")[1] for ax in plot.figure.axes[:2]]
    assert "to dense best" in said[0] and said[1] == "cost not logged"
    assert plot.png(dpi=40).startswith(b"\x89PNG")


def test_no_line_of_samples_mixes_configurations_or_lengths(tmp_path):
    write_pairs(tmp_path, ("dit", "mamba"), samples=True)
    # Longer, at a rate that the other backbone lacks, and without dense runs.
    write_pairs(tmp_path, seeds=4, samples=True, train__steps=800, train__lr=1e-4)
    write_pairs(tmp_path, routes=("2-8",), samples=True, objective__name="flow")
    plot = figures.make("samples", tmp_path)
    shown = [ax for ax in plot.figure.axes if ax.get_visible()]
    lines = {}
    for ax in shown:
        title, line = ax.get_title("left"), ax.get_subplotspec().rowspan.start
        assert ("\ndense, step" in title) == (line % 2 == 0), title
        lines.setdefault(line // 2, set()).add(title)
    assert sorted(len(titles) for titles in lines.values()) == [2, 4] and "flow" not in str(lines)
    assert all(len({"step 800" in title for title in titles}) == 1 for titles in lines.values())


def test_a_curve_over_rates_is_of_one_recipe_and_one_number_of_steps(tmp_path):
    for over in ({}, {"train__lr": 1e-4}):
        write_pairs(tmp_path, seeds=1, routes=("none", "2-8@0.25", "2-8"), **over)
        write(tmp_path, route="2-8@0.75", train__steps=80, **over)
    plot = figures.make("selection_rate", tmp_path)
    assert set(plot.data["step"]) == {400} and set(plot.data["rate"]) == {0.25, 0.5}
    labels = [text.get_text() for text in plot.figure.axes[0].get_legend().get_texts()]
    assert len(set(labels)) == 2 and all("2-8, step 400 (n=1)" in label for label in labels)
