"""What alignment changes in dense and routed runs, from records with known scores."""

import pytest
from analysis_runs import lines, score, write

from analysis.comparison.alignment import alignment_table
from analysis.errors import AnalysisError


def scored(folder, fd, loss, macs, **over):
    run = write(folder, **over)
    lines(run / "metrics.jsonl", [{"step": 400, "macs": macs}])
    metrics = {"FD-2K (digits-classifier)": fd, "NN-distance ratio-2K (digits-classifier)": 1.0}
    rows = [score({}, 400, value, metric) for metric, value in metrics.items()]
    lines(run / "scores.jsonl", [*rows, score({}, 400, loss, "heldout-loss-500", key="heldout_loss")])


@pytest.fixture
def folder(tmp_path):
    """Three seeds. SRA lowers dense FD by 1 and routed FD by 3 points; its teacher adds 60 MACs to 100 and to 80."""
    for seed in range(3):
        scored(tmp_path, 20 + seed, 0.3, 100, seed=seed, train__encoder="none")
        scored(tmp_path, 19 + seed, 0.297, 160, seed=seed, train__encoder="ema")
        scored(tmp_path, 25 + seed, 0.4, 80, seed=seed, route="2-8", train__encoder="none")
        scored(tmp_path, 22 + seed, 0.4, 140, seed=seed, route="2-8", train__encoder="ema")
    return tmp_path


def test_an_aligned_run_is_compared_with_the_run_of_its_route_and_seed(folder):
    scored(folder, 9.0, 0.1, 140, seed=7, route="2-8", train__encoder="ema")  # without a partner
    scored(folder, 9.0, 0.1, 80, route="2-8", train__encoder="none", routing__reinsert="none")  # another method
    _, *rows = alignment_table(folder, 400)
    empty = ["", "", ""]  # precision, recall and accuracy were not scored
    assert rows == [
        ["dit", "TREAD + SRA 2-8", "2-8", "1.75x", "3", "-3.0 \u00b1 0.0", *empty, "+0.00 % [+0.00, +0.00]"],
        ["dit", "dense + SRA", "dense", "1.60x", "3", "-1.0 \u00b1 0.0", *empty, "-1.00 % [-1.00, -1.00]"],
    ]
    assert len(alignment_table(folder, 300)) == 1


def test_without_alignment_there_are_no_rows_and_two_learning_rates_are_refused(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("dense")
    scored(other, 20, 0.3, 100)
    assert len(alignment_table(other, 400)) == 1
    scored(folder, 1.0, 0.3, 160, train__encoder="ema", train__lr=1.0)
    with pytest.raises(AnalysisError, match="several scores of backbone dit"):
        alignment_table(folder, 400)
