"""`python -m analysis`: what it prints, what it writes, and how it refuses."""

import os
import re
import subprocess
import sys

import pytest
from analysis_runs import ACCURACY, METRIC, write, write_pairs
from suite import RESULTS, ROOT

from analysis.command import main, parser
from analysis.comparison import compare


@pytest.fixture
def runs(tmp_path):
    write_pairs(tmp_path, seeds=2)
    return tmp_path


def folders(root):
    return sorted(path for path in root.iterdir() if path.is_dir())


def test_compare_prints_what_differs_and_every_score(runs, capsys):
    dense, routed = (next(p for p in folders(runs) if part in p.name) for part in ("_none_s0", "_2-8_s0"))
    assert main(["compare", str(dense), str(routed)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^training speed  \d+  ->  \d+ images/s ", text, re.M)
    assert "route  none  ->  2-8" in text and METRIC in text and ACCURACY in text
    assert "train.lr" not in text and "paths" not in text
    config, scores, _ = compare.pair(dense, routed)
    assert [row.key for row in config] == ["route"] and len(scores) == 2
    assert main(["compare", str(dense), str(dense)]) == 0
    assert "config: the same" in capsys.readouterr().out


def test_commands_read_an_archive_of_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    archive = str(RESULTS / "scan_order.tar.gz")
    assert main(["list", archive]) == 0
    assert "18 done, 0 unfinished, 0 damaged" in capsys.readouterr().out
    assert main(["tables", archive, "--only", "main", "--print"]) == 0
    assert "mamba" in capsys.readouterr().out
    # Nothing is written beside the unpacked records.
    assert main(["tables", archive]) == main(["report", archive]) == 2
    assert "an archive needs --out PATH, or --print" in capsys.readouterr().err
    assert main(["tables", archive, "--only", "main", "--out", "written"]) == 0
    assert (tmp_path / "written" / "main.md").is_file()


def test_compare_of_unequal_steps_and_unset_keys(tmp_path, capsys):
    short, long = write(tmp_path, train__steps=20), write(tmp_path, train__steps=40, train__clip=1.0, train__beside=2)
    assert main(["compare", str(short), str(long)]) == 0
    text = capsys.readouterr().out
    # After unequal steps no difference of scores is taken.
    assert f"{short.name}, step 20" in text and f"{long.name}, step 40" in text
    assert METRIC in text and "(+" not in text and "(-" not in text
    lines = text.split("\n")
    assert "  train.clip       null  ->  1" in lines and "  train.beside  missing  ->  2" in lines


def test_tables_are_printed_or_written(runs, capsys):
    def printed(*words):
        assert main(["tables", str(runs), "--print", "--only", *words]) == 0
        return capsys.readouterr().out.splitlines()

    assert main(["tables", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "main" in out and "not covered by these runs" in out and "route_placement" in out
    assert (runs / "tables" / "main.tex").is_file() and not (runs / "tables" / "route_placement.md").exists()
    table = printed("main", "--columns", "dense", "3")
    assert "| Metric | Dense | \u0394 |" in table and any(line.startswith("| **dit-T/1, ") for line in table)
    write(runs, "mamba")  # no pair
    assert len(printed("main", "--all")) > len(printed("main"))
    assert main(["tables", str(runs), "--only", "main", "--columns", "Dens"]) == 2
    assert "has no column 'Dens'; it has 0 'Metric'" in capsys.readouterr().err


def test_figures_are_written_and_the_rest_named(runs, capsys):
    assert main(["figures", str(runs), "--only", "convergence", "guidance", "--out", str(runs / "f")]) == 0
    out = capsys.readouterr().out
    assert "not given by these runs: guidance" in out
    assert {p.suffix for p in (runs / "f").iterdir()} == {".pdf", ".png", ".csv"}
    assert main(["figures", str(runs), "--only", "guidance", "--out", str(runs / "g")]) == 0
    assert capsys.readouterr().out == "not given by these runs: guidance\n"  # no folder was made


@pytest.mark.parametrize(
    ("name", "value", "code", "line"),
    [
        ("MPLBACKEND", "absent", 2, "error: matplotlib cannot be imported: Key backend: 'absent'"),
        ("MATPLOTLIBRC", "text.usetex: True", 0, ""),  # figures have a style of their own
    ],
)
def test_a_users_settings_of_matplotlib_are_refused_in_one_line_or_not_used(name, value, code, line, runs, tmp_path):
    if name == "MATPLOTLIBRC":
        (tmp_path / "matplotlibrc").write_text(value)
        value = str(tmp_path / "matplotlibrc")
    words = [sys.executable, "-m", "analysis", "figures", str(runs), "--only", "convergence"]
    environment = {**os.environ, name: value}
    result = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == code and result.stderr.startswith(line), result.stderr
    assert len(result.stderr.splitlines()) == (code != 0)


def test_help_needs_neither_torch_nor_pandas_and_tables_no_torch(runs):
    code = (
        "import sys\n"
        "from analysis.command import parser\n"
        "parser().format_help()\n"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "import analysis\n"
        "analysis.tables.make_all(analysis.load(sys.argv[1]))\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(runs)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("report", "tables", "figures", "compare", "similarity", "guidance-scale", "list"):
        assert f"  {name}" in parser().format_help()
