"""What a run says: banner, progress, metrics on disk, heartbeat (no torch here).

The files are the record: `metrics.jsonl` (one object per logged step) and `status.json` (where the
run is). The terminal and the optional trackers show the same numbers.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from experiments.runtime.files import atomic_write
from experiments.runtime.parsing import is_number, json_of
from routing.errors import UserError

PLAIN_EVERY_S = 10.0
# The ETA follows the mean rate of so many updates.
AVERAGED_UPDATES = 20


def clock(seconds: float) -> str:
    """Return `m:ss`, `h:mm:ss`, or days where it is four of them or more."""
    whole = int(max(0, seconds))
    if whole >= 4 * 86400:
        return f"{whole / 86400:.0f} days"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def big(number: float) -> str:
    """Return a count with a unit: 2.0M, 118.6G; from 1e18 on 4.2e19."""
    if number >= 1e18:
        return f"{number:.3g}".replace("+", "")
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:{'.3g' if number / size < 100 else '.1f'}}{unit}"
    return f"{number:g}"


# --- files ---------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines; a half-written last line is ignored."""
    found = []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            try:
                entry = json_of(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                found.append(entry)
    return found


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` without damaged ones: a run must be able to end."""
    return [
        entry
        for entry in read_jsonl(folder / "metrics.jsonl")
        if is_number(entry.get("step"))
        and all(entry.get(k) is None or is_number(entry[k]) for k in ("loss", "images_per_s"))
    ]


def is_score(entry: Mapping[str, Any]) -> bool:
    """Return whether a line of `scores.jsonl` names a metric and its value."""
    return isinstance(entry.get("metric"), str) and isinstance(entry.get("value"), (int, float))


def append_jsonl(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Append whole lines in one flushed write; `OSError` on a full disk. Writers may share it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    with path.open("a+b", buffering=0) as handle:
        if data and handle.seek(0, os.SEEK_END):
            handle.seek(-1, os.SEEK_END)
            if handle.read(1) != b"\n":
                # A writer died inside its line: ours must not become the rest of it.
                data = b"\n" + data
        if handle.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(handle.fileno())


def cut_jsonl(path: Path, step: int) -> None:
    """Drop the lines after `step` and any half-written one: a resumed run writes them again."""
    if path.is_file():
        known = ((entry, entry.get("step", 0)) for entry in read_jsonl(path))
        kept = [entry for entry, at in known if isinstance(at, int | float) and at <= step]
        atomic_write(path, "".join(json.dumps(entry) + "\n" for entry in kept))


def cut_records(folder: Path, step: int) -> None:
    """Drop what `metrics.jsonl` and `scores.jsonl` hold beyond `step`."""
    for name in ("metrics.jsonl", "scores.jsonl"):
        cut_jsonl(folder / name, step)


def write_status(folder: Path, status: str, **fields: Any) -> None:
    """Write the heartbeat `status.json`: running, done, failed, preempted or stopped."""
    writer = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    about = {"status": status, **writer, **fields}
    atomic_write(folder / "status.json", json.dumps(about, indent=1))


# --- terminal ------------------------------------------------------------------------------------


class Console:
    """The terminal of one process; every rank but the first is quiet."""

    def __init__(self, quiet: bool = False, stderr: bool = False) -> None:
        from rich.console import Console as Rich

        self.quiet = quiet
        self.live = (sys.stderr if stderr else sys.stdout).isatty() and not quiet
        # Off a terminal nothing wraps: a log's lines stay whole whatever the reader's width.
        width = None if self.live else 200
        self.rich = Rich(quiet=quiet, stderr=stderr, highlight=False, width=width)
        self._bar: Any = None
        self._once: set[str] = set()

    def say(self, text: str = "") -> None:
        """Print one line above the progress bar, on a terminal in as many as its width needs.

        A path is not broken, so that it can be copied.
        """
        if self.live:
            fold = TextWrapper(
                self.rich.width, subsequent_indent="  ", break_long_words=False,
                break_on_hyphens=False,
            ).fill  # fmt: skip
            text = "\n".join(map(fold, text.split("\n")))
        self.rich.print(text, markup=False, soft_wrap=True)

    def once(self, text: str) -> None:
        """Print a line unless this console has printed it before (what every evaluation says)."""
        if text not in self._once:
            self._once.add(text)
            self.say(text)

    def table(self, title: str, rows: Iterable[Iterable[str]], head: Iterable[str]) -> None:
        """Print a table."""
        from rich import box
        from rich.table import Table

        # The title is a line of its own: a table breaks it at its width, in the middle of a name.
        self.say(title)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for position, name in enumerate(head):
            table.add_column(name, justify="left" if position == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.rich.print(table)

    def progress(self, what: str, total: int, done: int = 0) -> Progress:
        """Open a progress display for `total` steps, `done` of them behind us."""
        return Progress(self, what, total, done)


class Progress:
    """A bar on a terminal, a line every ten seconds elsewhere; both with rate and ETA.

    Used as a context manager; `update` is called after each step. One inside another adds a line
    to the outer one's display while it is open.
    """

    def __init__(self, console: Console, what: str, total: int, done: int) -> None:
        self.console, self.what, self.total = console, what, total
        self.start = self.shown = time.monotonic()
        self.paused = 0.0  # seconds of sampling and scoring, which are left out of the rate
        # Seconds and steps between the last updates: an average since the start would remember
        # a slow beginning to the end.
        self._recent: deque[tuple[float, int]] = deque(maxlen=AVERAGED_UPDATES)
        self._worked, self._done = 0.0, done
        self._first = True
        self._task: Any = None
        self._owns_bar = False

    def __enter__(self) -> Progress:
        if self.console.live:
            self._owns_bar = self.console._bar is None
            if self._owns_bar:
                self.console._bar = self._open_bar()
            self.bar = self.console._bar
            self._task = self.bar.add_task(
                self.what, total=self.total, completed=self._done, text=""
            )
        return self

    def _open_bar(self) -> Any:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            TextColumn("{task.description}"),
            # Legible on dark and on light: the colours of the terminal's own theme.
            BarColumn(None, style="dim", complete_style="green", finished_style="green"),
            TextColumn("{task.fields[text]}"),
            console=self.console.rich,
            expand=True,
        )
        bar.start()
        return bar

    def __exit__(self, *error: object) -> None:
        if self._task is None:
            return
        if self._owns_bar:
            self.bar.stop()
            self.console._bar = None
        else:
            self.bar.remove_task(self._task)
        self._task = None

    def seconds_per_step(self, done: int) -> float:
        """Return the mean duration of the last steps, of which `done` are finished now.

        The first interval, which holds compilation and cold caches, counts only until the next.
        """
        worked = time.monotonic() - self.start - self.paused
        if done > self._done:
            if len(self._recent) == 1 and self._first:
                self._recent.clear()
                self._first = False
            self._recent.append((worked - self._worked, done - self._done))
        if done != self._done:  # fewer after a return to an earlier checkpoint
            self._worked, self._done = worked, done
        seconds = sum(interval for interval, _ in self._recent)
        steps = sum(count for _, count in self._recent)
        return seconds / max(1, steps)

    def update(self, done: int, text: str = "", pending: float = 0.0) -> None:
        """Show that `done` steps are finished; `pending` seconds of other work are to come."""
        now = time.monotonic()
        eta = self.seconds_per_step(done) * (self.total - done) + pending
        timing = f"[{clock(now - self.start)}<{clock(eta)}]"
        due = done >= self.total or now - self.shown >= PLAIN_EVERY_S
        if self._task is not None:
            shown = f"{done}/{self.total}  {text}  {timing}".replace("[", r"\[")
            self.bar.update(self._task, completed=done, text=shown)
        elif due and not (self.console.quiet or self.console.live):
            self.shown = now
            self.console.say(f"{self.what} {done}/{self.total}  {text}  {timing}")


def check_tracker(name: str) -> None:
    """Refuse a tracker whose package is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(
            f"log={name} needs a package that is not installed: pip install {name} (or log=none)"
        )


def open_tracker(
    name: str, folder: Path, run: str, config: Mapping[str, Any], accelerator: Any
) -> None:
    """Start the optional tracker beside the files, through accelerate."""
    if name == "none":
        return
    flat = {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in config.items()}
    options = {"wandb": {"name": run, "dir": str(folder)}, "trackio": {"name": run}}
    try:
        accelerator.init_trackers(
            "tread-suite", config=flat, init_kwargs={name: options.get(name, {})}
        )
    except Exception as error:
        # Services refuse in ways of their own: no key, no network, another version.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"log={name} did not start ({reason}); mend that, or type log=none: the run folder "
            "holds the same numbers"
        ) from error
