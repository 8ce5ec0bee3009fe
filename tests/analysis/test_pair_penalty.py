"""The step penalty of a pair in the main table, the figure and `compare`: known curves give known penalties."""

import math

import pytest
from analysis_runs import heldout_losses, write

import analysis
from analysis.comparison import compare
from analysis.comparison.pair_penalty import pair_penalties
from analysis.comparison.results import Results

STEPS = (50, 100, 150, 200, 250, 300, 350, 400)


def logged(folder, slower, steps=STEPS):
    """Replace a run's scores by held-out losses that fall `slower` times as slowly as the dense one's."""
    # Linear in log(step), so that interpolation between logged steps is exact.
    heldout_losses(folder, {step: 0.9 - 0.1 * math.log(step / slower) for step in steps})


@pytest.fixture
def pairs(tmp_path):
    for seed in range(3):
        logged(write(tmp_path, "dit", "none", seed), 1.0)
        logged(write(tmp_path, "dit", "2-8", seed), 1.25 * 1.02**seed)
        logged(write(tmp_path, "mamba", "none", seed), 1.0)
        # Seed 2 is trained half as long and reaches few of the losses.
        logged(write(tmp_path, "mamba", "2-8", seed), 1.5, STEPS[: 8 if seed < 2 else 2])
    return tmp_path


def test_the_penalty_is_read_at_the_latest_step_that_every_seed_reaches(pairs):
    dit, mamba = pair_penalties(Results.of(pairs))
    # The slowest seed needs 1.3005 N steps, so 400 steps reach the loss after N = 300.
    assert dit.step == 300 and dit.penalty.censored == 0
    assert list(dit.penalty.seeds["s"]) == pytest.approx([1.25, 1.275, 1.3005])
    m = 1 - 7 / 12 * 0.5 * 0.98
    assert dit.m == pytest.approx(m, rel=1e-6)
    assert dit.penalty.sm.mean == pytest.approx(1.275 * m, rel=1e-3)
    # A seed that ends early is censored from then on, and never dropped.
    assert mamba.step == 50 and mamba.by_step[250].censored == 1
    assert len(mamba.by_step[250].seeds) == 3 and mamba.by_step[250].sm is None
    rows = mamba.rows()
    bound = rows[(rows["step"] == 250) & (rows["seed"] == 2)]["bound"]
    assert list(bound) == [pytest.approx(100 / 250)]


def test_of_two_runs_of_a_seed_the_longer_is_read(tmp_path):
    logged(write(tmp_path, "dit", "none", 0), 1.0)
    for steps, slower in ((STEPS, 1.25), (STEPS[:4], 2.0)):
        logged(write(tmp_path, "dit", "2-8", 0, train__steps=steps[-1]), slower, steps)
    runs = analysis.load(tmp_path)
    for frame in (runs, runs[::-1]):
        (pair,) = pair_penalties(Results.of(frame))
        assert pair.penalty.seeds["s"].tolist() == pytest.approx([1.25]) and pair.last_steps == {0: 400.0}


def test_the_main_table_has_a_column_where_losses_were_logged(pairs, tmp_path):
    table = analysis.tables.make("main", pairs)
    labels = [column.label for column in table.columns]
    assert labels[-2:] == ["s", "s\u00b7m"]
    row = next(row for row in table.rows if row.group.startswith("dit"))
    s, sm = row.entries[-2:]
    assert s.value == pytest.approx(1.275, rel=1e-3) and s.n == 3 and s.low < s.value < s.high
    assert sm.low < 1 < 1.275 and "N=300" in s.text
    assert any("censored, never dropped" in note for note in table.notes)


def test_two_seeds_are_in_the_figure_alone(tmp_path):
    for seed in range(2):
        logged(write(tmp_path, "dit", "none", seed), 1.0)
        logged(write(tmp_path, "dit", "2-8", seed), 1.25)
    assert len(analysis.tables.make("main", tmp_path).columns) == 4
    assert analysis.figures.make("step_penalty", tmp_path) is not None


def test_the_figure_has_the_line_of_equal_cost_and_arrows_above_the_bound_of_censored_seeds(pairs):
    plot = analysis.figures.make("step_penalty", pairs)
    first, second = (ax for ax in plot.figure.axes if ax.get_visible())
    m = 1 - 7 / 12 * 0.5 * 0.98
    for ax in (first, second):
        dotted = [line for line in ax.lines if line.get_linestyle() == ":"]
        assert dotted[0].get_ydata()[0] == pytest.approx(1 / m, rel=1e-6)
    censored = plot.data.query("censored and group.str.startswith('mamba')")
    bars = [line for line in second.lines if line.get_marker() == "_"]
    assert [bar.get_xydata().tolist() for bar in bars] == [[list(row)] for row in censored[["step", "bound"]].to_numpy()]
    arrows = [(text.xyann, text.xy) for text in second.texts]
    assert arrows == [(tuple(row), (row[0], 1)) for row in censored[["step", "bound"]].to_numpy().tolist()]
    (legend,) = plot.figure.legends
    labels = {text.get_text() for text in legend.get_texts()}
    assert labels == {"s, mean over seeds", "1/m: equal multiply-adds", "censored: s is above the bar"}


def test_no_line_leads_over_a_step_without_a_mean(tmp_path):
    logged(write(tmp_path, "dit", "none", 0), 1.0)
    heldout_losses(write(tmp_path, "dit", "2-8", 0), {50: 0.6, 100: 0.5, 200: 0.45})
    plot = analysis.figures.make("step_penalty", tmp_path)
    (line,) = [line for line in plot.figure.axes[0].lines if line.get_marker() == "s"]
    drawn = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    censored = plot.data[plot.data["censored"]]["step"]
    assert len(censored) and all(math.isnan(drawn[step]) for step in censored)
    assert {"step", "seed", "s", "m", "sm", "censored", "bound"} <= set(plot.data)


def test_compare_ends_with_the_penalty_of_one_pair(pairs):
    dense, routed = (next(pairs.glob(f"dit*{route}_s0*")) for route in ("none", "2-8"))
    line = compare.text(dense, routed).splitlines()[-1]
    assert line.startswith("step penalty of B over A (one seed): s 1.25, s*m 0.893 at N = 300")
    assert line.endswith("censored at N = 350, 400")
    other_seed = next(pairs.glob("dit*2-8_s1*"))
    assert "step penalty" not in compare.text(dense, other_seed)
