"""Console output on a terminal: whole lines, in colours that are legible on dark and on light."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

import pytest
from small import command

from experiments.runtime.console import Console
from experiments.runtime.errors import print_error

LEGIBLE = {"0", "1", "2", "3", "31", "32", "35"}  # plain, bold, dim, italic, red, green, magenta


def shown(
    words: list[str],
    cwd: Path,
    watch: Callable[[subprocess.Popen[bytes], bytes], None] | None = None,
    **environment: str,
) -> str:
    """Return what a command writes to a terminal of 80 columns; `watch` gets each piece."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(words, cwd=cwd, env=env | environment, stdin=theirs, stdout=theirs, stderr=theirs)
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
        if watch is not None:
            watch(process, piece)
    os.close(ours)
    assert process.wait(60) == 0, found.decode()
    return found.decode()


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU time of a process, without that of compilers that it starts."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads CPU times from /proc")
def test_a_first_run_is_never_silent_fits_eighty_columns_and_shows_on_dark_and_light(tmp_path):
    """With empty caches: the longest silence in CPU seconds of the run, which load leaves alone."""
    words = command(
        "backbone=mamba", "data=digits", "route=2-8", "train.steps=20", "train.sample_every=10",
        "eval.every=10", "eval.samples=60", "train.threads=1", "paths.runs=runs",
    )  # fmt: skip
    silences: list[tuple[float, bytes]] = []
    last = 0.0

    def watch(process: subprocess.Popen[bytes], piece: bytes) -> None:
        nonlocal last
        if process.poll() is None:
            now = cpu_seconds(process)
            silences.append((now - last, piece))
            last = now

    cache = str(tmp_path / "cache")
    text = shown(words, tmp_path, watch=watch, XDG_CACHE_HOME=cache)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = re.split(r"[\r\n]+", plain)
    plain = "\n".join(lines)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert len(silences) > 50 and max(silences)[0] < 2, max(silences)
    phases = (
        "loading PyTorch", "building the CPU kernels", "preparing data and model", "score networks",
        "preview", "final samples", "samples for scores", "held-out loss", "step",
    )  # fmt: skip
    for phase in phases:
        assert re.search(rf"^{phase}.*\d+:\d\d|^{phase}.*\d s", plain, re.M), phase
    styles = {code for codes in re.findall(r"\x1b\[([0-9;]*)m", text) for code in codes.split(";")}
    assert "32" in styles <= LEGIBLE, styles
    again = shown(words, tmp_path, NO_COLOR="1", XDG_CACHE_HOME=cache)
    assert "done already" in again and not re.search(r"\x1b\[[0-9;]*(3[1-7]|38)", again)


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, as a list of one number that a test moves on."""
    seconds = [0.0]
    monkeypatch.setattr("experiments.runtime.console.time.monotonic", lambda: seconds[0])
    return seconds


def test_a_slow_start_does_not_stay_in_the_time_left(now, capsys):
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
    assert lines[-1] == f"step 70/3000  [10:20<{(2930 + 90) // 60}:{(2930 + 90) % 60:02d}]"


def test_the_time_left_follows_the_last_steps_and_survives_a_return_to_earlier_ones(now):
    bar = Console(quiet=True).progress("step", 1000)
    for done in range(1, 101):
        now[0] += 1.0 if done < 50 else 0.1
        bar.seconds_per_step(done)
    assert bar.seconds_per_step(100) == pytest.approx(0.1)
    for done in range(50, 61):
        now[0] += 0.1
        assert bar.seconds_per_step(done) == pytest.approx(0.1)


def test_times_move_on_between_updates(now):
    console = Console(quiet=True)
    with console.progress("step", 100) as outer, console.progress("preview") as inner:
        assert (outer.status(), inner.status()) == ("0/100  [0:00]", "[0:00]")
        for done in (10, 20):
            now[0] += 10.0
            outer.update(done, "loss 1", pending=20.0)
        assert outer.status() == "20/100  loss 1  [0:20<1:40]"
        now[0] += 5.0
        assert outer.status() == "20/100  loss 1  [0:25<1:35]"
        show = console.part_of(1)  # of the innermost display
        show(0.25)
        assert inner.status() == "25%  [0:25]" and outer.part == 0
        show(1.0)
        assert inner.status() == "[0:25]"


def test_without_a_terminal_a_line_comes_without_updates_from_the_innermost_display(monkeypatch, capsys):
    monkeypatch.setattr("experiments.runtime.console._PLAIN_CHECK_S", 0.01)
    monkeypatch.setattr("experiments.runtime.console.PLAIN_EVERY_S", (0.05, 0.05))
    console = Console()
    with console.progress("step", 10), console.progress("preview") as inner:
        deadline = time.monotonic() + 60
        printed = ""
        while printed.count("preview") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            printed += capsys.readouterr().out
    assert printed.count("preview [0:0") >= 2 and "step" not in printed and inner._closed.is_set()


def test_lines_break_between_words_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    text = "train.batch=7 does not fit /a/path/that/is/longer/than/the/terminal: type train.batch=8"
    console = Console()
    console.say(text)
    print_error(text)
    assert capsys.readouterr() == (f"{text}\n", f"error: {text}\n")
    console.live, console.rich.width = True, 30
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    console.say(text)
    print_error(text)
    for printed, whole in zip(capsys.readouterr(), (text, f"error: {text}"), strict=True):
        lines = printed.splitlines()
        assert " ".join(line.strip() for line in lines) == whole and max(map(len, lines[:1] + lines[-1:])) <= 30
        assert "  /a/path/that/is/longer/than/the/terminal:" in lines, "a word stays whole"
