"""`python -m analysis`: what it prints, what it writes, and how it refuses."""

import json
import shlex
import subprocess
import sys

import pytest
from analysis_runs import ACCURACY, METRIC, write

from analysis import compare
from analysis.command import main, parser
from analysis.errors import AnalysisError
from analysis.measured import with_weights


@pytest.fixture
def runs(tmp_path):
    for seed in range(2):
        write(tmp_path, route="none", seed=seed)
        write(tmp_path, route="2-8", seed=seed, train__lr=1e-3)
    return tmp_path


def folders(root):
    return sorted(path for path in root.iterdir() if path.is_dir())


def test_compare_prints_what_differs_and_every_score(runs, capsys):
    dense, routed = (
        next(p for p in folders(runs) if part in p.name) for part in ("_none_s0", "_2-8_s0")
    )
    assert main(["compare", str(dense), str(routed)]) == 0
    text = capsys.readouterr().out
    assert "route  none  ->  2-8" in text and METRIC in text and ACCURACY in text
    assert "train.lr" not in text and "paths" not in text
    config, scores, _ = compare.pair(dense, routed)
    assert [row.key for row in config] == ["route"] and len(scores) == 2
    assert main(["compare", str(dense), str(dense)]) == 0
    assert "config: the same" in capsys.readouterr().out


def test_compare_takes_no_difference_between_unequal_steps(tmp_path, capsys):
    short, long = (write(tmp_path, train__steps=steps) for steps in (20, 40))
    assert main(["compare", str(short), str(short)]) == 0
    assert "(+0)" in capsys.readouterr().out
    assert main(["compare", str(short), str(long)]) == 0
    text = capsys.readouterr().out
    assert f"{short.name}, step 20" in text and f"{long.name}, step 40" in text
    assert METRIC in text and "(+" not in text and "(-" not in text


def test_compare_shows_what_a_run_leaves_unset_as_null(tmp_path, capsys):
    first, second = write(tmp_path), write(tmp_path, train__clip=1.0, train__beside=2)
    assert main(["compare", str(first), str(second)]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert "  train.clip       null  ->  1" in lines and "  train.beside  missing  ->  2" in lines


@pytest.mark.parametrize("typed", [".", "..", "./", "../."])
def test_a_run_that_is_the_working_directory_has_its_name(tmp_path, monkeypatch, capsys, typed):
    run = write(tmp_path)
    (run / "checkpoints").mkdir()
    monkeypatch.chdir(run / "checkpoints" if ".." in typed else run)
    assert main(["compare", typed, typed]) == main(["list", typed]) == 0
    out = capsys.readouterr().out
    assert f"A  {run.name}, step 400" in out and f"done        {run.name}" in out
    assert main(["report", typed, "--out", str(tmp_path / "page.html")]) == 0
    assert f"<title>Runs in {run.name}" in (tmp_path / "page.html").read_text()


def test_compare_finds_no_difference_in_a_run_with_several_rates(tmp_path):
    run = write(tmp_path, route="0-4@0.25+6-9@0.75")
    assert compare.text(run, run).endswith("size and cost: the same")


def test_what_varies_and_what_is_shared(runs):
    import analysis

    frame = analysis.load(runs)
    varying = compare.varying(frame)
    assert set(varying["key"]) == {"route", "seed"}
    assert dict(zip(varying["value"], varying["runs"], strict=True))["2-8"] == 2
    shared = compare.common(frame)
    assert shared["train.lr"] == "0.001" and "route" not in shared


def test_tables_are_printed_or_written(runs, capsys):
    assert main(["tables", str(runs), "--only", "main", "--print"]) == 0
    assert "| **dit-T/1, " in capsys.readouterr().out
    assert main(["tables", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "main" in out and "not covered by these runs" in out and "route_placement" in out
    assert (runs / "tables" / "main.tex").is_file() and not (
        runs / "tables" / "route_placement.md"
    ).exists()


def test_columns_are_chosen_and_missing_rows_asked_for(runs, capsys):
    def printed(*words):
        assert main(["tables", str(runs), "--print", "--only", *words]) == 0
        return capsys.readouterr().out.splitlines()

    heads = [line for line in printed("main", "--columns", "dense", "3") if "|" in line]
    assert heads[0] == "| Metric | Dense | \u0394 |"
    write(runs, route="0-8")
    assert len(printed("route_placement", "--all")) > len(printed("route_placement"))
    assert main(["tables", str(runs), "--only", "main", "--columns", "Dens"]) == 2
    assert "has no column 'Dens'; it has 0 'Metric'" in capsys.readouterr().err
    assert main(["tables", str(runs), "--width", "0"]) == 2
    assert "choose from 3.3, 5.5, 6.8" in capsys.readouterr().err


def test_figures_are_written_and_the_rest_named(runs, capsys):
    assert (
        main(["figures", str(runs), "--only", "convergence", "guidance", "--out", str(runs / "f")])
        == 0
    )
    out = capsys.readouterr().out
    assert "not given by these runs: guidance" in out
    assert {p.suffix for p in (runs / "f").iterdir()} == {".pdf", ".png", ".csv"}
    assert main(["figures", str(runs), "--only", "guidance", "--out", str(runs / "g")]) == 0
    assert capsys.readouterr().out == "not given by these runs: guidance\n"  # no folder was made


def test_list_shows_every_folder_with_its_state(runs, capsys):
    first, second, *_ = folders(runs)
    (first / "summary.json").write_text("{")
    (second / "summary.json").unlink()
    (second / "status.json").write_text(json.dumps({"status": "preempted", "step": 20}))
    assert main(["list", str(runs)]) == 0
    out = capsys.readouterr().out
    assert (
        "2 done, 1 unfinished, 1 damaged" in out
        and "preempted" in out
        and "summary.json is not JSON" in out
    )


def test_a_run_without_weights_beside_one_with_them_is_named(runs, capsys):
    first, second, *_ = folders(runs)
    (first / "model.safetensors").touch()
    assert with_weights([second, runs, first]) == [first]
    assert capsys.readouterr().err == f"no weights: {second}\n"
    with pytest.raises(AnalysisError, match="missing.safetensors is no file"):
        with_weights([first, runs / "missing.safetensors"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "absent"], "absent is not a folder"),
        (["tables", ".", "--only", "mian"], "did you mean main"),
        (["figures", ".", "--only", "convergance"], "did you mean convergence"),
        (["tables", ".", "--metric", "FID-50K"], "no score called 'FID-50K'"),
        (["compare", "absent", "."], "absent is not a run folder"),
        (["compare", ".", "."], "cannot be compared"),
        (["similarity", "."], "no run with weights"),
        (["guidance-scale", "."], "no run with weights"),
        (["similarity", "absent.safetensors"], "absent.safetensors is no file"),
        (["guidance-scale", __file__, "absent.safetensors"], "is not a folder"),
        (["list", "absent"], "not a folder"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_two(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_help_names_every_command_and_needs_neither_torch_nor_pandas():
    code = (
        "import sys\nfrom analysis.command import parser\nparser().format_help()\n"
        "bad = [m for m in ('torch', 'pandas', 'matplotlib') if m in sys.modules]\nsys.exit(str(bad) if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("report", "tables", "figures", "compare", "similarity", "guidance-scale", "list"):
        assert f"  {name}" in parser().format_help()


def test_python_dash_m_runs(runs):
    result = subprocess.run(
        [sys.executable, "-m", "analysis", "list", str(runs)], capture_output=True, text=True
    )
    assert result.returncode == 0 and "4 done" in result.stdout


def test_a_file_that_is_left_out_is_one_line_without_code(tmp_path):
    (write(tmp_path) / "guidance_scale.json").write_text('{"rows": [1e999]}')
    words = ["tables", str(tmp_path), "--only", "guidance_scale", "--print"]
    command = [sys.executable, "-m", "analysis", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("warning: ") and "is not a tread-suite-guidance-scale/1 file" in line


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("tables {runs} main", "no grid called 'main' was launched into these runs; there are none; did you mean --only main?"),
        ("figures {runs} route_placement", "did you mean --only route_placement?"),
        ("similarity {runs} --samples 0", "similarity --samples 0: expected a number of at least 1"),
        ("similarity {runs} --batch 0", "similarity --batch 0: expected a number of at least 1"),
        ("guidance-scale {runs} --samples 1", "guidance-scale --samples 1: expected a number of at least 2"),
        ("tables {runs} where='lr < banana'", "lr is compared with banana; expected a number, a text in quotes"),
        ("tables {runs} where='backbone == dit'", "backbone is compared with dit; expected a number, a text in quotes (backbone == \"dit\")"),
        ("tables {runs} where='lr in 3'", 'lr in 3: expected a list, such as lr in ["a", "b"]'),
        ("tables {runs} --metric fd", f"--metric fd: expected the full name of a score: {METRIC}"),
        ("tables {runs} backbone=dot", "meets backbone=dot"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_one_sentence_that_says_what_to_type(words, text, runs, capsys):
    typed = [word.format(runs=runs) for word in shlex.split(words)]
    assert main(typed) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and text in lines[0]


def test_a_wrong_name_is_refused_before_any_run_is_read(runs, capsys):
    (runs / "broken").mkdir()
    (runs / "broken" / "summary.json").write_text("{")
    for command in ("tables", "figures"):
        assert main([command, str(runs), "--only", "nope"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and "called 'nope'" in lines[0]
