"""The set of scores side by side, and how it responds to guidance: tables and figure."""

import json

import pytest
from analysis_runs import append, as_published, evaluate, lines, score, stored_scale, write
from test_analysis_tables import find

import analysis
from analysis.comparison.guidance_settings import setting
from analysis.comparison.results import Results
from analysis.tables.main import score_set
from analysis.tables.table import markdown

SPACES = ("digits-classifier@1f2e3d4c", "autoencoder@99887766")
# Name, key, features and better end of every score; those that generate samples first.
SCORES = [
    ("FD-500 (digits-classifier)", "fd", SPACES[0], "lower"),
    ("accuracy-500 (digits-classifier)", "accuracy", SPACES[0], "higher"),
    ("FD-500 (autoencoder)", "fd", SPACES[1], "lower"),
    ("precision-500 (autoencoder)", "precision", SPACES[1], "higher"),
    ("recall-500 (digits-classifier)", "recall", SPACES[0], "higher"),
    ("precision-500 (digits-classifier)", "precision", SPACES[0], "higher"),
    ("heldout-loss-360", "heldout_loss", None, "lower"),
    ("heldout-loss-routed-360", "heldout_loss_routed", None, "lower"),
    ("KD-500 (digits-classifier)", "kid", SPACES[0], "lower"),
]
GUIDES = {
    "cfg scale=1.25": "CFG 1.25",
    "cfg scale=1.5": "CFG 1.5",
    "cfg scale=3.0": "CFG 3",
    "routed scale=1.5 strong=0 weak=0.5 route=auto": "SG 1.5",
    "routed scale=1.0 route=auto": "routed",
}


def guided_scores(unguided):
    """Scores of a run at 400 steps: a guidance has 1 less than the one before it."""
    rows = []
    for less, guidance in enumerate(("none scale=1.0", *GUIDES)):
        for name, key, features, better in SCORES if less < 4 else SCORES[:6]:
            about = {"key": key, "features": features, "better": better, "guidance": guidance}
            rows.append(score({}, 400, unguided - less, name, **about))
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two backbones with their set of scores: dense 50 + seed, routed 40 + 2 seed."""
    root = tmp_path_factory.mktemp("response")
    for backbone in ("dit", "mamba"):
        for seed in range(3):
            for place, route in enumerate(("none", "2-8")):
                folder = write(root, backbone, route, seed, guidance__name="none")
                lines(folder / "scores.jsonl", guided_scores(50 - 10 * place + seed * (1 + place)))
                if backbone == "mamba":
                    continue
                scales = [
                    {"pair": "dense", "level": 1.5, "plain": 9.0, "instrumented": 9.0},
                    {"pair": "dense", "level": None, "plain": 1 + place, "instrumented": 0.9},
                    {"pair": "routed", "level": None, "plain": 9.0, "instrumented": 9.0},
                ]
                stored = stored_scale(route, seed, scales, run=folder.name)
                (folder / "guidance_scale.json").write_text(json.dumps(stored))
    return Results.of(root)


def test_the_set_of_a_base_begins_with_its_own_metric_and_space(runs):
    dit, mamba = runs.groups
    names = list(score_set(dit))
    assert names == [
        "FD-500 (digits-classifier)",
        "FD-500 (autoencoder)",
        "precision-500 (digits-classifier)",
        "precision-500 (autoencoder)",
        "recall-500 (digits-classifier)",
        "accuracy-500 (digits-classifier)",
        "heldout-loss-360",
        "heldout-loss-routed-360",
        "w_eff (instrumented)",
        "w_eff (plain)",
    ]
    assert list(score_set(mamba)) == names[:8]


@pytest.mark.parametrize(
    "text, place",
    [
        *GUIDES.items(),
        ("none scale=1.0", "CFG 1"),
        ("cfg scale=1.5 low=0.3", None),
        ("routed scale=1.5", None),
        ("routed scale=1.5 strong=0 weak=0.8", None),
        ("routed scale=1.5 strong=0 weak=0.5 null_class=True", None),
        ("apg scale=4.0", None),
    ],
)
def test_where_a_guidance_stands_on_the_curve(text, place):
    assert setting(text) == place


def test_the_response_has_every_metric_under_every_setting(runs):
    table = analysis.tables.make("response", runs)
    settings = ["CFG 1", *GUIDES.values()]
    assert [c.label for c in table.columns] == ["Metric", "Tokens", *settings]
    assert table.groups[0].endswith(": after 400 steps, n = 3") and len(table.groups) == 2
    rows = {tuple(e.text for e in row.entries[:2]): row.entries[2:] for row in table.rows}
    dense = rows["FD-500 (autoencoder) \u2193", "dense"]
    assert [entry.value for entry in dense] == [51.0, 50.0, 49.0, 48.0, 47.0, 46.0]
    assert dense[0].std == pytest.approx(1.0)
    routed = rows["FD-500 (autoencoder) \u2193", "2-8"]
    assert [entry.value for entry in routed] == [42.0, 41.0, 40.0, 39.0, 38.0, 37.0]
    assert not any("heldout" in metric or "KD" in metric for metric, _ in rows)

    alone = analysis.tables.make("response", runs.runs[runs.runs.seed == 1])
    assert "nan" not in markdown(alone) and "50" in markdown(alone)


def test_guidance_table_has_cost_per_step_and_marks_the_best(made_runs):
    table = analysis.tables.make("guidance", as_published(made_runs))
    sparse = find(table, "dit-T/1", "routed scale=1.5 strong=0.3 weak=0.8")
    assert sparse["Score"].best and sparse["Paper FID-50K"].value == 1.58
    assert sparse["GMACs per step"].value == pytest.approx(3.1 / 12)
    flops = find(table, "dit-T/1", "routed scale=1.5")
    assert flops["Paper GMACs per step"].value == 97.67
    assert find(table, "dit-T/1", "none scale=1.0")["Paper FID-50K"].value == 4.89


def test_guidance_with_a_checkpoint_per_seed_is_one_row(tmp_path):
    for seed in range(3):
        folder = write(tmp_path, route="2-8", seed=seed)
        append(folder, score({}, 400, 7.0 + seed, guidance=f"autoguidance scale=1.5 checkpoint={folder}@50"))
    row = find(analysis.tables.make("guidance", tmp_path), "dit", "autoguidance scale=1.5 checkpoint=run@50")
    assert row["Score"].n == 3


@pytest.mark.parametrize("other", [{"sampler": "euler steps=4"}, {"reference": "mine.npz@0"}, {"weights": "raw"}])
def test_guidance_averages_no_two_ways_of_measuring(tmp_path, other):
    folder = write(tmp_path, route="2-8")
    guides = ("none scale=1.0", "cfg scale=2.0")
    for name, guided, value, more in (("a", guides, 10.0, {}), ("b", guides[:1], 50.0, other)):
        scores = [score({}, 400, value, guidance=text, **more) for text in guided]
        kind = scores[0].pop("weights") if "weights" in more else "ema"  # as evaluate.py writes it
        evaluate(folder, name, scores, kind)
    assert find(analysis.tables.make("guidance", tmp_path), "dit", guides[0])["Score"].value == 10.0
