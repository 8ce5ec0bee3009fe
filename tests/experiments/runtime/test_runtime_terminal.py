"""Console output on a terminal: whole lines, in colours that are legible on dark and on light."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from small import command, overrides

from experiments.runtime.console import Console
from sweeps.run_status import STATES

LEGIBLE = {"0", "1", "2", "3", "31", "32", "35"}  # plain, bold, dim, italic, red, green, magenta


def shown(words: list[str], cwd: Path, **environment: str) -> str:
    """Return what a command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")} | {
        "TERM": "xterm-256color"
    }
    process = subprocess.Popen(
        words, cwd=cwd, env=env | environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's way of saying that nobody writes any more
            break
        if not piece:
            break
        found += piece
    os.close(ours)
    assert process.wait(60) == 0, found.decode()
    return found.decode()


@pytest.mark.slow
def test_the_colours_of_a_run_show_on_dark_and_light(tmp_path):
    words = command(
        *overrides(Path("runs"), "backbone=mamba", "route=1-2", "eval=digits", "train.steps=3")
    )
    text = shown(words, tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = re.split(r"[\r\n]+", plain)
    assert (
        any(line.startswith("step ") and "img/s" in line for line in lines) and "accuracy" in plain
    )
    styles = {code for codes in re.findall(r"\x1b\[([0-9;]*)m", text) for code in codes.split(";")}
    assert "32" in styles <= LEGIBLE, styles
    again = shown(words, tmp_path, NO_COLOR="1")
    assert "done already" in again and not re.search(r"\x1b\[[0-9;]*(3[1-7]|38)", again)


def test_the_status_of_a_sweep_is_legible_too():
    assert set(" ".join(STATES.values()).split()) <= {"green", "red", "magenta", "bold", "dim"}


def test_lines_and_tables_are_never_wrapped(capsys):
    console = Console()
    console.live, console.rich.width = True, 24
    line = "one two three four five six /a/path/that/no/line/of/so/few/columns/holds and more"
    console.say(line)
    console.table("title", [[line, "1"]], ["name", "value"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == line
    assert [row.split("  ")[0] for row in printed if row.startswith("one")] == [line, line]


def test_a_slow_start_does_not_stay_in_the_time_left(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("experiments.runtime.console.time.monotonic", lambda: now[0])
    with Console().progress("step", 3000) as bar:
        now[0] = 60.0  # compilation
        bar.update(10, "loss 1")
        for done in range(20, 61, 10):
            now[0] += 10.0
            bar.update(done, "loss 1")
        bar.paused, now[0] = 500.0, now[0] + 500.0  # an evaluation
        now[0] += 10.0
        bar.update(70, pending=90.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 10/3000  loss 1  [1:00<4:59:00]"
    assert lines[1] == "step 20/3000  loss 1  [1:10<49:40]"
    assert lines[-1] == f"step 70/3000    [10:20<{(2930 + 90) // 60}:{(2930 + 90) % 60:02d}]"


def test_the_time_left_follows_the_last_steps_and_survives_a_return_to_earlier_ones(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("experiments.runtime.console.time.monotonic", lambda: now[0])
    bar = Console(quiet=True).progress("step", 1000)
    for done in range(1, 101):
        now[0] += 1.0 if done < 50 else 0.1
        bar.seconds_per_step(done)
    assert bar.seconds_per_step(100) == pytest.approx(0.1)
    for done in range(50, 61):
        now[0] += 0.1
        assert bar.seconds_per_step(done) == pytest.approx(0.1)


def test_the_title_of_a_table_is_whole_whatever_the_tables_width(capsys):
    name = "dit-T4-mnist_2-8_s0-656b00e3, step 3000"
    Console().table(name, [["loss", "1"]], ["score", "value"])
    assert name in capsys.readouterr().out.splitlines()


def test_a_display_inside_another_shares_it():
    """An evaluation shows its own progress on a terminal, where the run's line stands still."""
    console = Console()
    console.live = True
    with console.progress("step", 10) as outer, console.progress("sample", 4) as inner:
        inner.update(2)
        shown = {task.description: task.completed for task in console._bar.tasks}
        assert shown == {"step": 0, "sample": 2} and inner.bar is outer.bar
    assert console._bar is None
