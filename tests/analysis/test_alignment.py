"""What alignment changes in dense and routed runs, from records with known scores."""

import pytest
from analysis_runs import evaluate, lines, score, write

from analysis.comparison.alignment import alignment_table
from analysis.runs.grouping import shared_label, short_labels


def scored(folder, fd, loss, macs, **over):
    run = write(folder, **over)
    lines(run / "metrics.jsonl", [{"step": 400, "macs": macs}])
    metrics = {"FD-2K (digits-classifier)": fd, "NN-distance ratio-2K (digits-classifier)": 1.0}
    rows = [score({}, 400, value, metric) for metric, value in metrics.items()]
    if loss is not None:
        rows.append(score({}, 400, loss, "heldout-loss-500", key="heldout_loss"))
    lines(run / "scores.jsonl", rows)


@pytest.fixture
def folder(tmp_path):
    """Three seeds. SRA lowers dense FD by 1 and routed FD by 3 points; its teacher adds 60 MACs to 100 and to 80."""
    for seed in range(3):
        scored(tmp_path, 20 + seed, 0.3, 100, seed=seed, train__encoder="none")
        scored(tmp_path, 19 + seed, 0.297, 160, seed=seed, train__encoder="ema")
        scored(tmp_path, 25 + seed, 0.4, 80, seed=seed, route="2-8", train__encoder="none")
        scored(tmp_path, 22 + seed, 0.4, 140, seed=seed, route="2-8", train__encoder="ema")
    return tmp_path


def test_an_aligned_run_is_compared_with_the_run_that_routes_in_the_same_way(folder):
    scored(folder, 9.0, 0.1, 140, seed=7, route="2-8", train__encoder="ema")  # without a partner
    scored(folder, 9.0, 0.1, 160, train__encoder="ema", train__lr=1.0)  # of another group
    for encoder, fd in {"none": 40, "ema": 39}.items():
        scored(folder, fd, 0.4, 80, route="2-8", train__encoder=encoder, routing__selection="rows")
    _, *rows = alignment_table(folder, 400)
    empty = ["", "", ""]  # precision, recall and accuracy were not scored
    model = rows[0][0]
    sra, rows_sra = "TREAD + SRA 2-8", "TREAD + SRA 2-8, selection=rows"
    assert rows == [
        [model, sra, "2-8", "1.75x", "3", "-3.0 \u00b1 0.0", *empty, "+0.00 % [+0.00, +0.00]"],
        [model, rows_sra, "2-8, selection=rows", "1.00x", "1", "-1.0", *empty, "+0.00 %"],
        [model, "dense + SRA", "dense", "1.60x", "3", "-1.0 \u00b1 0.0", *empty, "-1.00 % [-1.00, -1.00]"],
    ]
    assert len(alignment_table(folder, 300)) == 1


def test_a_later_evaluation_and_a_missing_loss_change_no_pair(folder):
    for run in sorted(folder.iterdir()):
        evaluate(run, "more", [score({}, 400, 99.0, "FD-2K (digits-classifier)", sampler="euler steps=50")])
    scored(folder, 18, None, 160, seed=3, train__encoder="ema")
    scored(folder, 20, None, 100, seed=3, train__encoder="none")
    _, _, dense = alignment_table(folder, 400)
    assert dense[4:6] == ["4", "-1.2 \u00b1 0.8"] and dense[-1] == "-1.00 % [-1.00, -1.00]"


def test_runs_without_alignment_give_no_rows(tmp_path):
    scored(tmp_path, 20, 0.3, 100)
    assert len(alignment_table(tmp_path, 400)) == 1


def test_a_list_is_one_part_of_a_label():
    labels = ["dit, edm (train.betas=[0.9, 0.95], train.lr=1.0)", "dit, edm (train.betas=[0.9, 0.99], train.lr=1.0)"]
    assert list(short_labels(labels).values()) == ["dit, train.betas=[0.9, 0.95]", "dit, train.betas=[0.9, 0.99]"]
    assert shared_label(labels) == "edm, train.lr=1.0"
