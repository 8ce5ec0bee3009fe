"""Tables: the numbers in them, what they say about missing ones, and their four formats."""

import csv
import io
import json
import math
import re
import shutil

import analysis_runs
import pandas as pd
import pytest
from analysis_runs import (
    ACCURACY,
    METRIC,
    append,
    as_published,
    heldout_losses,
    lines,
    score,
    write,
    write_pairs,
)
from scipy import stats

import analysis
from analysis import figures
from analysis.command import main
from analysis.comparison import aggregation
from analysis.comparison.results import Results
from analysis.tables import make, make_all, render
from analysis.tables.speedup import reach
from analysis.tables.table import Column, build, markdown, measured, plain


def find(table, group, first):
    """The entries of one row by its group (part of it) and its first cell, as a dict of column label."""
    for row in table.rows:
        if group in row.group and row.entries[0].text == first:
            return dict(zip([c.label for c in table.columns], row.entries, strict=True))
    raise AssertionError(f"no row {first!r} in {group!r}: {[(r.group, r.entries[0].text) for r in table.rows]}")


def scored(root, route, seed, values, **over):
    """Write a run that ended after the last of the steps, with its scores after each."""
    folder = write(root, route=route, seed=seed, train__steps=max(values), **over)
    lines(folder / "scores.jsonl", [score({}, step, value) for step, value in values.items()])


def test_means_and_paired_differences_of_scores_by_hand(tmp_path):
    for seed, (dense, routed) in enumerate([(10.0, 9.0), (12.0, 10.0), (11.0, 8.0)]):
        scored(tmp_path, "none", seed, {400: dense})
        scored(tmp_path, "2-8", seed, {400: routed})
    scored(tmp_path, "2-8", 3, {400: 99.0})  # without a dense run
    scores = analysis.scores(analysis.load(tmp_path))
    means = analysis.aggregate(scores).set_index("variant")
    assert means.loc["dense", ["mean", "std", "n"]].tolist() == [11, 1, 3] and means.loc["2-8", "n"] == 4
    half = 4.302653 / math.sqrt(3)
    for baseline, other, mean in (("dense", "2-8", -2), ("2-8", "dense", 2)):
        (row,) = analysis.paired_difference(scores, baseline).to_dict("records")
        assert (row["variant"], row["step"], row["mean"], row["n"]) == (other, 400, mean, 3)
        assert (row["low"], row["high"]) == pytest.approx((mean - half, mean + half))


def test_of_two_runs_of_a_seed_the_longer_counts_in_whatever_order_they_are_read(tmp_path):
    scored(tmp_path, "none", 0, {400: 9.0})
    scored(tmp_path, "none", 0, {400: 7.0, 800: 6.0})
    scores = analysis.scores(analysis.load(tmp_path))
    for frame in (scores, scores[::-1]):
        assert analysis.aggregate(frame).set_index("step")["mean"].to_dict() == {400: 7.0, 800: 6.0}


def test_a_variant_is_read_after_the_steps_at_which_most_seeds_pair(tmp_path):
    for seed in range(4):
        for route in ("none", "2-8"):
            scored(tmp_path, route, seed, {400: 9.0, 800: 8.0} if seed == 0 else {400: 9.0})
    (group,) = Results.of(tmp_path).groups
    assert [(variant.step, len(variant.by_seed())) for variant in group.variants] == [(400, 4)] * 2


def test_a_tail_is_held_against_runs_that_went_on_as_they_were(tmp_path):
    write_pairs(tmp_path)
    parents = "/somewhere/runs/dit-T1-digits_{}_s{}-0123abcd@400"
    ends = {("none", "none"): (9, 10, 12), ("2-8", "2-8"): (8, 9, 9), ("2-8", "none"): (7, 7, 8)}
    for (parent, route), values in ends.items():
        for seed, value in enumerate(values):
            scored(tmp_path, route, seed, {40: value}, train__lr=1e-5, init=parents.format(parent, seed))
    table = make("tails", tmp_path)
    # Routed runs with a parent are a control, and no pair of their own.
    assert len({row.group for row in table.rows}) == 1
    row = find(table, "dit-T/1", f"{METRIC} \u2193")
    shown = [row[name] for name in ("Dense + same", "Routed + same", "+ tail")]
    assert [entry.value for entry in shown] == pytest.approx([31 / 3, 26 / 3, 22 / 3])
    assert all(entry.n == 3 for entry in shown)
    for name, differences in (("dense + same", (-2, -3, -4)), ("routed + same", (-1, -2, -1))):
        change, expected = row[f"\u0394 tail, {name}"], aggregation.interval(differences)
        assert (change.value, change.low) == pytest.approx((expected.mean, expected.low))


def test_equal_cost_may_be_just_above_one_and_is_the_nearest_pair(tmp_path):
    # A routed step costs 0.714 of a dense one: 274 cost 0.979, 281 cost 1.004 and 286 cost 1.022 of 200 dense steps.
    for seed in (0, 1, 2):
        scored(tmp_path, "none", seed, {100: 9.0, 200: 8.0})
        scored(tmp_path, "2-8", seed, {100: 9.5, 274: 8.2, 281: 7.9, 286: 7.8})
    table = make("steps", tmp_path)
    assert [row.entries[0].text for row in table.rows] == ["100", "200 \u2192 281"]
    _, seeds, share, fd, *_ = table.rows[1].entries
    assert (seeds.value, share.value) == (3, pytest.approx(1.0036, abs=1e-3))
    assert fd.text == "8.00 \u2192 7.90 (-0.10 \u00b1 0.00)"
    # Kinds that no run was scored by have no column, and a note.
    assert [column.label for column in table.columns][3:] == ["FD"]
    assert any("precision, recall, accuracy, heldout_loss, w_eff. Scores of a later" in note for note in table.notes)


def test_equal_cost_is_that_of_most_seeds_where_one_run_is_nearer(tmp_path):
    for seed in range(4):
        scored(tmp_path, "none", seed, {100: 9.0, 200: 8.0})
        scored(tmp_path, "2-8", seed, {100: 9.5, 281 if seed == 3 else 274: 8.2})
    rows = [(row.entries[0].text, row.entries[1].value) for row in make("steps", tmp_path).rows]
    assert rows == [("100", 4), ("200 \u2192 274", 3)]


def test_placement_shows_all_sixteen_routes_and_leaves_out_those_not_run_if_asked(made_runs):
    table = make("route_placement", as_published(made_runs, "FID-5K"))
    rows = [row for row in table.rows if row.group.startswith("rwkv")]
    assert len(rows) == 17
    seen = find(table, "rwkv", "2-8")
    assert seen["Ours"].best and seen["Paper"].value == 28.02 and seen["Paper \u0394"].value == -21.87
    unseen = find(table, "rwkv", "0-5")
    assert unseen["Ours"].is_missing and unseen["Paper"].value == 50.81
    assert any(note.startswith("missing") for note in table.notes)
    ours = table.only(ours=True)
    routes = [row.entries[0].text for row in ours.rows if row.group.startswith("rwkv")]
    assert routes == ["dense", "0-8", "0-10", "4-8", "3-8", "2-8"]
    assert not any(note.startswith("missing") for note in ours.notes)
    # What only others measured is no row that misses ours.
    assert make("followups", made_runs).only(ours=True) == make("followups", made_runs)


def test_rate_scan_order_routes_and_cost(made_runs):
    published = as_published(made_runs)
    rate = make("selection_rate", published)
    assert find(rate, "dit", "0.75 on 2-8")["Paper"].value == 49.29
    assert find(rate, "dit", "0 (dense)")["Paper"].value == 43.47
    selection = make("scan_order", made_runs)
    control = find(selection, "mamba", "unsorted (control)")
    assert control["\u0394 to random"].value > 0 and control["\u0394 to random"].low > 0
    routes = make("one_two_routes", published)
    assert find(routes, "dit", "0-4+6-9")["Paper"].value == 28.80
    cost = make("throughput", made_runs)
    dense, routed = (find(cost, "rwkv", name) for name in ("dense", "2-8"))
    allowed = dense["GMACs per image"].value / routed["GMACs per image"].value
    assert routed["MACs allow"].value == pytest.approx(allowed) and allowed > 1


def test_headline_counts_first_scored_step_that_is_as_good(tmp_path):
    for seed in range(3):
        scored(tmp_path, "none", seed, {100: 9.0, 200: 5.0, 400: 5.5})
        scored(tmp_path, "2-8", seed, {100: 5.0, 200: 4.0, 400: 4.5})
        scored(tmp_path, "0-10", seed, {400: 6.0})
        scored(tmp_path, "4-8", seed, {400: 4.0})
    source = Results.of(analysis.load(tmp_path))
    table = make("speedup", source)
    row = find(table, "dit", "2-8")
    # The dense best stands at step 200; the routed run is there at 100: twice as fast in steps.
    assert row["Speed-up, steps"].value == pytest.approx(2.0)
    macs = source.runs.set_index("route")
    factor = 2 * macs.loc["none", "macs_dense"].iloc[0] / macs.loc["2-8", "macs_routed"].iloc[0]
    assert row["Speed-up, FLOPs"].value == pytest.approx(factor, rel=1e-6)
    assert row["Seeds that reach it, scored steps"].text.startswith("3 of 3, ")
    never = find(table, "dit", "0-10")
    assert never["Speed-up, FLOPs"].text == "not reached"
    assert never["Seeds that reach it, scored steps"].text.startswith("0 of 3, ")
    # The runs of 4-8 are as good at their only scored step: nobody knows since when.
    assert [row.entries[0].text for row in table.rows] == ["0-10", "2-8"]


def test_headline_works_for_a_metric_where_higher_is_better(made_runs):
    source = Results.of(made_runs.runs, ACCURACY)
    base = next(b for b in source.groups if b.label.startswith("rwkv"))
    assert base.better == "higher"
    found = reach(base, base.baseline, base.guideline())
    assert len(found) == 3 and (found["step"] > 1).all()


def test_every_table_is_made_from_nothing_and_says_missing(tmp_path):
    without_paper = ("main", "sota", "followups", "differences", "all_scores")
    for table in make_all(tmp_path):
        assert table.rows and not table.covered, table.name
        assert "missing" in render.markdown(table) or table.name in without_paper
    # Published rows in columns that our runs share do not make a table one of ours.
    heldout_losses(write(tmp_path), {400: 0.3})
    covered = {table.name: table.covered for table in make_all(tmp_path)}
    assert covered["all_scores"] and not covered["sota"]


def test_scaling_and_resolution_find_their_runs(tmp_path):
    write_pairs(tmp_path, routes=("none", "4-16", "2-20"), backbone__depth=24)
    write_pairs(tmp_path, task="text", data__name="scenes", size="M/2")
    source = Results.of(analysis.load(tmp_path))
    scaling = make("relative_absolute", as_published(source))
    assert find(scaling, "dit", "relative: 4-16 of 24 blocks")["Paper"].value == 18.81
    assert find(scaling, "dit", "absolute: 2-20 of 24 blocks")["Ours"].n == 3
    coco = find(make("text", as_published(source, "FID-10K", "coco")), "scenes", "dit-M/2, scenes, edm, scale tiny")
    assert coco["Paper dense"].value == 35.68 and coco["Dense"].n == 3


@pytest.mark.parametrize("values", [[2.0, 3.0, 4.0], [2.0, 2.5], [7.0]])
def test_behind_plus_minus_stands_half_of_the_t_interval_everywhere(values, tmp_path):
    n, mean = len(values), sum(values) / len(values)
    half = f" \u00b1 {stats.t.ppf(0.975, n - 1) * stats.sem(values):.2f}" if n > 1 else ""
    guides = {"none scale=1.0": 0.0, "cfg scale=1.5": 1.0, "cfg scale=3.0": 2.0}
    guides |= {f"routed scale=1.5 strong={strong} weak=0.8": 1.0 for strong in (0, 0.1, 0.2, 0.3)}
    for seed, value in enumerate(values):
        for route in ("none", "2-8"):
            run = write(tmp_path, route=route, seed=seed)
            lines(run / "scores.jsonl", [score({}, 400, value + more, guidance=text) for text, more in guides.items()])
    results = Results.of(tmp_path)
    expected = f"{mean:.2f}{half} (n={n})" + ("" if n >= 3 else "\u2020")
    main_table = make("main", results)
    shown = main_table.rows[0].entries[1], find(make("guidance", results), "dit", "none scale=1.0")["Score"]
    assert {plain(entry) for entry in shown} == {expected}
    assert any("half-width of its 95 % t-interval" in note for note in main_table.notes) == (n > 1)
    assert plain(make("response", results).rows[0].entries[2]) == f"{mean:.2f}{half}"
    plot = figures.make("guidance", results)
    cells = {text.get_text() for text in plot.figure.axes[0].texts}
    assert f"{mean + 1:.2f}{half}".replace(" \u00b1 ", "\n\u00b1") in cells
    assert "\u00b1 half-width of its 95 % t-interval" in plot.caption


@pytest.mark.parametrize(
    ("metric", "data", "tables"),
    [
        (METRIC, "imagenet256", ()),
        ("FID-50K", "photos", ()),
        ("FID-2K", "imagenet256", ()),
        ("FID-50K", "imagenet512", ()),
        ("FID-50K", "ImageNet-256", ("main", "sota", "selection_rate", "one_two_routes", "masking", "guidance")),
        ("FID-5K", "imagenet256", ("route_placement",)),
    ],
)
def test_a_number_of_the_paper_stands_beside_ours_where_data_and_metric_match_alone(metric, data, tables, made_runs):
    results = as_published(made_runs, metric, data) if metric != METRIC else made_runs
    for name in ("main", "sota", "route_placement", "selection_rate", "one_two_routes", "masking", "guidance"):
        table = make(name, results)
        pairs = [pair for row in table.rows for pair in zip(table.columns, row.entries, strict=True)]
        numbers = [e for column, e in pairs if (column.published or e.published) and e.value is not None]
        assert bool(numbers) == any("Paper: " in note for note in table.notes) == (name in tables), name
    for name in ("route_placement", "selection_rate"):
        titles = [ax.get_title("left") for ax in figures.make(name, results).figure.axes]
        assert any(title.startswith("Paper") for title in titles) == (name in tables), name


@pytest.mark.parametrize(
    ("text", "written"),
    [("-0.5", "-0.5"), ("+ TREAD", "+ TREAD"), ("=1+1", "'=1+1"), ("+ tail|A0", "'+ tail|A0"), ("\t=1", "'\t=1")],
)
def test_no_csv_holds_a_formula(text, written):
    frame = pd.DataFrame({"a": pd.Series([text], dtype="string"), text: [-1.5], "n": [None]})
    rows = list(csv.reader(io.StringIO(render.frame_csv(frame), newline="")))
    assert rows == [["a", written, "n"], [written, "-1.5", ""]]
    table = build("t", "t", [Column(text, numeric=False)], [(text, [text])])
    rows = list(csv.reader(io.StringIO(render.to_csv(table), newline="")))
    assert rows == [["group", written], [written, written]]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="pdflatex is not installed (texlive-latex-base, texlive-science)"
)
def test_all_tables_compile_in_latex_and_stay_inside_their_column(made_runs, tmp_path):
    assert main(["tables", str(made_runs.folder), "--all", "--out", str(tmp_path)]) == 0
    printed = analysis_runs.compile_latex(tmp_path)
    assert (tmp_path / "tables.pdf").stat().st_size > 10_000
    assert "Missing character" not in printed and "Overfull" not in printed


def test_a_long_latex_table_goes_on_over_pages():
    columns = [Column("Metric", numeric=False), Column("Dense"), Column("Dense")]
    entry = measured(aggregation.mean_std([2.0, 3.0, 4.0]))
    table = build("long", "Long", columns, [("a 50 %", [str(k), entry, 1.5]) for k in range(41)])
    text = render.latex(table)
    assert r"\begin{longtable}" in text and text.count(r"\endhead") == 1
    assert text.count(r"\num{3.00 +- 2.48} {\scriptsize ($n{=}$3)} & \num{1.50} \\") == 41
    # The heading of a group stands alone in its line.
    assert re.search(r"(?m)^\\multicolumn\{3\}.*\\emph\{a 50 \\%\}\} \\\\$", text)


def test_more_tokens_of_the_same_pictures_stand_in_one_group(tmp_path):
    for size in ("M/2", "M/1"):
        for folder in write_pairs(tmp_path, seeds=1, size=size, data__name="scenes"):
            analysis_runs.write_weights(folder, model={"name": "dit", "size": size, "input_size": [32, 32]})
    table = make("tokens", tmp_path)
    assert len(table.groups) == 1
    assert [row.entries[1].value for row in table.rows] == [256, 1024]


def test_memorisation_stands_beside_the_score_in_the_features_of_the_score(tmp_path):
    for seed in range(3):
        for route, offset in (("none", 0.01), ("2-8", 0.0), ("0-8", 0.0)):
            more = {"metric": "memorisation-500", "key": "memorisation", "better": "higher"}
            unseen = more | {"metric": "memorisation-500 held-out", "key": "memorisation_heldout"}
            lines = [score({}, 400, 0.5 + 0.1 * seed + offset, **more), score({}, 400, 0.8, **unseen)]
            append(write(tmp_path, route=route, seed=seed), *lines)
    row = find(make("main", tmp_path), "dit", "NN-distance ratio-500")
    dense, routed = row["Dense"], row["+ TREAD"]
    assert (dense.n, dense.decimals) == (3, 3) and dense.value == pytest.approx(0.61)
    assert dense.std == pytest.approx(0.1) and routed.value == pytest.approx(0.6)
    table = make("route_placement", tmp_path)
    assert find(table, "dit", "dense")["NN-distance ratio"].value == pytest.approx(0.61)
    assert any("never seen get 0.800 on digits" in note for note in table.notes)
    differences = find(make("differences", tmp_path), "dit", "2-8")
    assert differences["\u0394 NN-distance ratio-500"].value == pytest.approx(-0.01)
    assert not any("held-out" in label for label in differences)
    # Records keep their name; pages say what it is, and no end of it is called the better one.
    assert "score.memorisation-500" in analysis.load(tmp_path)
    for each in make_all(tmp_path):
        assert "emorisation" not in markdown(each), each.name


def test_masking_has_paired_differences_at_every_budget(tmp_path):
    # Seeds lie far apart, the treatment moves each by the same: only pairs can see it.
    shift = {"none": 0.0, "2-8": -1.0, "drop": 2.0}
    for seed in range(3):
        for name, move in shift.items():
            values = {step: 50.0 + 20 * seed - step / 100 + move for step in (100, 200, 300, 400)}
            over = {"routing__reinsert": "none"} if name == "drop" else {}
            scored(tmp_path, "2-8" if name == "drop" else name, seed, values, **over)
    table = make("masking", tmp_path)
    routed = find(table, "dit", "2-8")
    for label in ("\u0394 steps", "\u0394 own end"):
        entry = routed[label]
        assert (entry.n, entry.value) == (3, pytest.approx(-1.0))
        assert entry.low == pytest.approx(-1.0) and entry.high == pytest.approx(-1.0)
    # At equal cost the dense run has come less far: the difference is larger, and still paired.
    assert routed["\u0394 FLOPs"].value < -1.1
    assert routed["\u0394 FLOPs"].high - routed["\u0394 FLOPs"].low < 1e-6
    assert find(table, "dit", "dropping 2-8")["\u0394 steps"].value == pytest.approx(2.0)
    assert find(table, "dit", "dense")["\u0394 steps"].value is None


def test_benchmark_shows_timed_steps_beside_the_plain_step_of_the_same_shape(tmp_path):
    step = {"backbone": "dit", "size": "T/2", "tokens": 16, "route": "none", "seconds": 1.0}
    record = {
        "options": {"batch": 2, "precision": "fp32", "compile": "none", "depth": None, "clock": "cpu"},
        "environment": {"device_name": "a CPU", "threads": 1, "torch": "2"},
        "steps": [
            step,
            step | {"route": "2-8", "seconds": 0.8, "speedup": 1.25, "allowed": 1.4},
            step | {"backbone": "plain", "ours_faster_by": 2.0},
        ],
        "variants": [step | {"faster": {"compiled": 1.1}, "over_plain": {"both compiled": 1.2}}],
    }
    write(tmp_path)
    # The sweep's files lie in its folder; one that cannot be read is named.
    outputs = tmp_path / ".sweeps" / "bench" / "outputs"
    outputs.mkdir(parents=True)
    (outputs / "bench-0123456789ab.json").write_text(json.dumps(record))
    (tmp_path / "bench.json").write_text("{half")
    table = make("benchmark", tmp_path)
    assert table.covered and any("bench.json" in note for note in table.notes)
    dense, routed = (find(table, "batch 2, fp32", f"dit-T/2, 16 tokens, {name}") for name in ("dense", "2-8"))
    assert (dense["ms"].value, dense["Over plain DiT"].value) == (1000.0, 2.0)
    assert (dense["Compiled"].value, dense["Both compiled"].value) == (1.1, 1.2)
    assert routed["Share of it"].value == pytest.approx(1.25 / 1.4)
    # No benchmark timed ours eager beside theirs compiled: no column.
    assert "Over compiled plain DiT" not in dense


def test_a_key_that_was_added_later_does_not_part_old_runs_from_new_ones(tmp_path):
    def forget(folder):
        lines = (folder / "config.yaml").read_text().splitlines(keepends=True)
        (folder / "config.yaml").write_text("".join(line for line in lines if "clip:" not in line))

    forget(write(tmp_path, seed=0))
    write(tmp_path, seed=1, train__clip=1.0)
    assert len(Results.of(tmp_path).groups) == 1
    write(tmp_path, seed=2, train__clip=None)
    # Now the newer runs differ among themselves, and what the old one did is not known.
    assert len(Results.of(tmp_path).groups) > 1


def test_a_seed_that_ran_twice_is_read_by_its_curve(tmp_path):
    for seed in (0, 1):
        write(tmp_path, seed=seed, evaluations=1)
    write(tmp_path, seed=0, evaluations=4, train__log_every=5)
    study = Results.of(tmp_path)
    (base,) = study.groups
    paths = base.baseline.curves
    assert {seed: len(path) for seed, path in paths.items()} == {0: 4, 1: 1}


# What stands in runs/ besides: route, seed, scores by step. Dense ends after 30 steps at 105.
@pytest.mark.parametrize(
    "more, dense, routed, delta, said",
    [
        # Nothing else: one difference, after the steps of both.
        ([], 105.0, 90.0, -15.0, ", after 30 steps"),
        # An unrelated run of another length takes nothing away.
        ([("2-8", 11, {60: 5.0})], 105.0, 90.0, -15.0, ", after 30 steps (left out: runs of 2-8 with 60 steps)"),
        # The same pair went on together: the longer one counts.
        ([("2-8", 1, {60: 50.0}), ("none", 1, {60: 52.0})], 52.0, 50.0, -2.0, ", after 60 steps"),
    ],
)  # fmt: skip
def test_differences_pair_seed_and_step(tmp_path, more, dense, routed, delta, said):
    taken = {(route, seed) for route, seed, _ in more}
    for route, value in (("none", 105.0), ("2-8", 90.0)):
        if (route, 1) not in taken:
            scored(tmp_path, route, 1, {30: value})
    for route, seed, values in more:
        scored(tmp_path, route, seed, values)
    row = find(make("main", tmp_path), "dit", f"{METRIC} \u2193")
    shown = [row[label].value for label in ("Dense", "+ TREAD", "\u0394")]
    assert shown == [dense, routed, delta]
    (group,) = {row.group for row in make("main", tmp_path).rows if "T/1" in row.group}
    assert group.endswith(said)


@pytest.mark.parametrize("known, delta", [({30: 100.0}, None), ({20: 107.0, 30: 100.0}, -2.0)])
def test_no_difference_spans_unequal_steps(tmp_path, known, delta):
    scored(tmp_path, "none", 0, known)
    scored(tmp_path, "4-8", 0, {20: 105.0})
    # Dense runs that went on are read where the route ended, if they were scored there.
    for name, label in (
        ("route_placement", "\u0394 to dense"), ("differences", f"\u0394 {METRIC}"),
    ):  # fmt: skip
        scored(tmp_path / name, "3-8", 0, {20: 106.0})
        table = make(name, tmp_path)
        entry = find(table, "dit", "4-8")[label]
        assert entry.value == delta and entry.is_missing == (delta is None), name
    assert find(table, "dit", "4-8")["Steps"].text == "20"
    plot = analysis.figures.make("route_placement", tmp_path)
    assert (plot is None) == (delta is None)
    if plot is not None:
        assert "after 20 steps" in plot.figure.axes[0].get_xlabel()
        assert set(plot.data[plot.data["backbone"] == "dit"]["step"]) == {20}


@pytest.mark.parametrize(
    "seeds, there, text, bold",
    [(1, 1, "(n=1)\u2020", False), (3, 3, "(n=3)", True), (3, 1, "(n=1 of 3)\u2020", False),
     (6, 3, "(n=3 of 6)\u2020", False), (5, 3, "(n=3 of 5)", True)],
)  # fmt: skip
def test_a_headline_needs_three_seeds_and_most_of_them(tmp_path, seeds, there, text, bold):
    for seed in range(seeds):
        scored(tmp_path, "none", seed, {50: 9.0, 100: 5.0})
        scored(tmp_path, "2-8", seed, {50: 4.0 if seed < there else 9.0, 100: 6.0})
        scored(tmp_path, "3-8", seed, {50: 9.0, 100: 4.0})
    table = make("speedup", tmp_path)
    entry = find(table, "dit", "2-8")["Speed-up, steps"]
    assert entry.value == pytest.approx(2.0) and text in render.plain(entry)
    assert entry.best == bold and entry.few != bold
    assert (r"{\bfseries\boldmath \num{2.00}x}" in render.latex(table)) == bold
