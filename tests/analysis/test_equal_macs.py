"""Routed against dense at equal multiply-adds: curves by hand, published records, a CSV file, wrong files."""

import math

import pandas as pd
import pytest
from suite import RESULTS

from analysis.command import main
from analysis.comparison.equal_macs import comparisons, curves_of_runs
from analysis.comparison.results import Results
from analysis.figures import make as draw
from analysis.runs.archives import PUBLISHED, unpack
from analysis.runs.loss_csv import curves_of_csv


def rows(variant, dense, macs, loss, steps=(500, 1000, 2000, 4000), seeds=(0, 1, 2)):
    """Curves whose loss falls as a power of the multiply-adds, with a factor for each seed."""
    result = []
    for seed in seeds:
        for step in steps:
            value = loss * (1 + 0.01 * seed) * (step * macs) ** -0.2
            result.append([f"{variant}_s{seed}", seed, variant, dense, step, value, macs])
    return result


def write(path, *parts):
    columns = ["run", "seed", "variant", "dense", "step", "loss", "macs_per_step"]
    pd.DataFrame([row for part in parts for row in part], columns=columns).to_csv(path, index=False)
    return path


def test_a_route_is_compared_with_its_own_network_and_with_cheaper_dense_models(tmp_path):
    path = write(
        tmp_path / "mine.csv",
        rows("12 blocks", 1, 1e9, 1.0),
        rows("6 blocks", 1, 5e8, 0.95, steps=(1000, 2000, 4000, 8000)),
        rows("16 blocks at batch 8", 1, 9e8, 1.1),
        rows("2-8", 0, 7e8, 0.98, steps=(700, 1400, 2800, 5700)),
    )
    pairs = {pair.opponent: pair for pair in comparisons(curves_of_csv(path))}
    assert list(pairs) == ["12 blocks", "16 blocks at batch 8", "6 blocks"]
    own, shallow = pairs["12 blocks"], pairs["6 blocks"]
    assert own.own and not shallow.own and own.m == pytest.approx(0.7)
    # Equal slopes: the change is that of the factors at any number of multiply-adds.
    assert own.change[-1].mean == pytest.approx(math.log(0.98), abs=2e-3)
    assert own.trend.mean == pytest.approx(0, abs=2e-3) and own.verdict == "pays so far"
    # A loss that falls as MACs ** -0.2 is reached with 0.98 ** 5 of the MACs.
    assert own.penalty.mean == pytest.approx(0.98**5, rel=0.02)
    assert shallow.verdict == "does not pay" and shallow.penalty is None and shallow.censored == 3


def test_one_seed_decides_nothing_and_other_seeds_are_no_pair(tmp_path):
    dense, routed = rows("dense", 1, 1.0, 1.0, seeds=(0, 1)), rows("2-8", 0, 0.7, 0.9, seeds=(1, 5))
    (pair,) = comparisons(curves_of_csv(write(tmp_path / "a.csv", dense, routed)))
    assert pair.change[-1].n == 1 and pair.verdict == "undecided"
    apart = rows("2-8", 0, 0.7, 0.9, seeds=(7,))
    assert comparisons(curves_of_csv(write(tmp_path / "b.csv", dense, apart))) == []


def test_published_records_give_the_published_changes():
    results = Results.of(unpack(RESULTS / "study_equal_macs.tar.gz", PUBLISHED))
    by_name = {}
    for pair in comparisons(curves_of_runs(results)):
        by_name[pair.heading.split(",")[0], pair.opponent] = round(100 * math.expm1(pair.change[-1].mean), 2)
    assert by_name == {
        ("dit", "dense, 12 blocks, batch 16"): -0.93,
        ("dit", "dense, 12 blocks, batch 11"): -1.27,
        ("dit", "dense, 8 blocks, batch 16"): 2.34,
        ("mamba", "dense, lr 0.002"): -0.65,
        ("rwkv", "dense"): -0.33,
    }
    plot = draw("equal_macs", results)
    assert len(plot.data["setting"].unique()) == 3


def test_the_command_reads_a_csv_file(tmp_path, capsys):
    path = write(tmp_path / "mine.csv", rows("dense", 1, 1e9, 1.0), rows("2-8", 0, 7e8, 0.98))
    assert main(["tables", str(path), "--only", "equal_macs", "--print"]) == 0
    assert "pays so far" in capsys.readouterr().out
    assert main(["figures", str(path), "--only", "equal_macs", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "equal_macs.png").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b\n1,2\n", "column run"),
        ("run,seed,variant,dense,step,loss,macs_per_step\nr,0,v,1,10,nan,5\n", "loss=nan"),
        ("run,seed,variant,dense,step,loss,macs_per_step\nr,0,v,2,10,1,5\n", "dense 0 or 1"),
        ("", "CSV"),
    ],
)
def test_a_wrong_csv_file_is_one_sentence(text, named, tmp_path, capsys):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    assert main(["tables", str(path), "--only", "equal_macs", "--print"]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert main(["tables", str(path), "--print"]) == 2


def test_a_second_run_of_a_seed_and_a_place_to_write_are_asked_about(tmp_path, capsys):
    again = [["again", *row[1:]] for row in rows("2-8", 0, 7e8, 0.98, seeds=(1,))]
    path = write(tmp_path / "two.csv", rows("dense", 1, 1e9, 1.0), rows("2-8", 0, 7e8, 0.98), again)
    for words, named in ((["--print"], "variant=2-8 seed=1"), ([], "--out")):
        assert main(["tables", str(path), "--only", "equal_macs", *words]) == 2
        assert named in capsys.readouterr().err
    assert main(["report", str(path), "--out", str(tmp_path / "x.html")]) == 2
    assert "--only equal_macs" in capsys.readouterr().err
