"""What a terminal of 80 columns shows, in colours that are legible on dark and on light."""

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
def test_a_run_fits_80_columns_and_its_colours_show_on_dark_and_light(tmp_path):
    words = command(
        *overrides(Path("runs"), "backbone=mamba", "route=1-2", "eval=digits", "train.steps=3")
    )
    text = shown(words, tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = re.split(r"[\r\n]+", plain)
    paths = (
        str(Path.home()),
        str(os.environ.get("XDG_CACHE_HOME", Path.home())),
    )  # a path is one word, whatever its length
    wide = [line for line in lines if len(line) > 80 and not line.strip().startswith(paths)]
    assert not wide, wide
    assert (
        any(line.startswith("step ") and "img/s" in line for line in lines) and "accuracy" in plain
    )
    styles = {code for codes in re.findall(r"\x1b\[([0-9;]*)m", text) for code in codes.split(";")}
    assert "32" in styles <= LEGIBLE, styles
    again = shown(words, tmp_path, NO_COLOR="1")
    assert "done already" in again and not re.search(r"\x1b\[[0-9;]*(3[1-7]|38)", again)


def test_the_status_of_a_sweep_is_legible_too():
    assert set(" ".join(STATES.values()).split()) <= {"green", "red", "magenta", "bold", "dim"}


def test_a_line_is_broken_between_words_and_never_inside_a_path(capsys):
    console = Console()
    console.live, console.rich.width = True, 24
    console.say("one two three four five six")
    console.say("/a/path/that/no/line/of/so/few/columns/holds and more")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    path = "/a/path/that/no/line/of/so/few/columns/holds"
    assert lines == ["one two three four five", "  six", path, "  and more"]
