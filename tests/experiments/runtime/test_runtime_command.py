"""What a command says where the machine, its environment or its output is the trouble."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch
from small import ROOT, run, small

from experiments.benchmark import bench_report
from experiments.benchmark.bench_options import BenchOptions
from experiments.runtime.command import run_command
from experiments.training.session import train
from routing.errors import UserError


def failing(error):
    def fail(*_):
        raise error

    return fail


def test_memory_that_runs_out_anywhere_is_one_sentence(capsys):
    errors = (
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch.so: failed to map segment from shared object"),
    )
    for error in errors:
        assert run_command(failing(error), []) == 2
        text = capsys.readouterr().err
        assert text.startswith("error: out of memory: use a smaller model") and text.count("\n") == 1
    # Other errors keep their traceback.
    for error in (RuntimeError("shapes differ"), ImportError("no name x in y")):
        with pytest.raises(type(error), match=str(error)):
            run_command(failing(error), [])


def test_a_benchmark_without_memory_names_its_own_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_report.step_times, "make_step", failing(RuntimeError("CUDA out of memory")))
    options = BenchOptions(
        backbone=("dit",), size=("T/2",), tokens=(16,), device="cpu", out=str(tmp_path / "bench.json")
    )
    with pytest.raises(UserError, match=r"out of memory in parts=steps: .*tokens=.*batch="):
        bench_report.run(options, say=lambda text: None)


def test_a_step_without_memory_names_the_micro_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.training.step.TrainingStep.train_on", failing(MemoryError()))
    with pytest.raises(UserError, match=r"train\.micro_batch=4"):
        train(small(tmp_path), quiet=True)


def test_compiled_blocks_without_a_compiler_are_refused_before_the_first_step(tmp_path, monkeypatch, capsys):
    from torch._inductor import cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, str(tmp_path / "no-compiler")))
    config = small(tmp_path, "train.compile=blocks")
    try:
        assert run_command(lambda _: train(config, quiet=True) and 0, []) == 2
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()
    text = capsys.readouterr().err
    assert "no C++ compiler that works" in text and "train.compile=none" in text
    assert text.count("\n") == 1 and not (config.folder / "config.yaml").exists()


def test_a_device_that_accelerate_cannot_use_is_refused(tmp_path, monkeypatch):
    for name in ("foo", "cuda:999"):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", name)
        with pytest.raises(UserError, match=f"^ACCELERATE_TORCH_DEVICE={name}: expected a device"):
            train(small(tmp_path), quiet=True)


def test_a_name_that_the_output_cannot_show_is_escaped_and_a_locale_that_hides_it_is_named(tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = run("dry=true", f"paths.runs={tmp_path}/実験", env=os.environ | ascii_only)
    assert done.returncode == 0 and "\\u5b9f\\u9a13" in done.stdout, done.stderr
    hidden = ascii_only | {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = run("dry=true", f"paths.runs={tmp_path}/実験", env=os.environ | hidden)
    assert done.returncode == 2 and "set PYTHONUTF8=1" in done.stderr and done.stderr.count("\n") == 1


def test_a_closed_output_does_not_end_a_command(tmp_path):
    code = "from experiments.runtime.command import run_command as r; from experiments.runtime."
    code += "console import Console; import sys; sys.exit(r(lambda _: Console().say('x'), []))"
    # As `>&-` in a shell; a Windows service has none either.
    words = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (
            f"data.path={'x' * 3000}/y: no such folder; expected one",
            ("data.path=x", "/y: no such folder; expected one"),
        ),
        (f"cannot read {'seed=1 ' * 900}: given twice", ("cannot read seed=1", "seed=1 : given twice")),
        (f"route={'9' * 3000}: expected one of {', '.join(map(str, range(2000)))}", ("route=9", "1998, 1999")),
    ],
)
def test_an_error_line_is_short_however_long_the_value(text, ends, capsys):
    assert run_command(failing(UserError(text)), []) == 2
    line = capsys.readouterr().err
    assert len(line) <= 1010 and line.count("\n") == 1
    assert line.startswith(f"error: {ends[0]}") and line.endswith(f"{ends[1]}\n")


def test_an_error_sends_no_control_characters_to_the_terminal(capsys):
    assert run_command(failing(UserError("x=\x1b[31ma\r\nb\x07: 実験 of é")), []) == 2
    assert capsys.readouterr().err == "error: x=\\x1b[31ma\\r\\nb\\x07: 実験 of é\n"
