"""Console output of a command: lines, tables and progress (no torch here)."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

# Seconds between lines of progress without a terminal.
PLAIN_EVERY_S = 10.0
# The ETA follows the mean rate of this many updates.
AVERAGED_UPDATES = 20
# Columns of output without a terminal.
_PLAIN_WIDTH = 200


def clock(seconds: float) -> str:
    """Format a duration as `m:ss`, `h:mm:ss`, or in days from four days on."""
    total = int(max(0, seconds))
    if total >= 4 * 86400:
        return f"{total / 86400:.0f} days"
    hours, remainder = divmod(total, 3600)
    minutes, remaining = divmod(remainder, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{remaining:02d}"
    return f"{minutes}:{remaining:02d}"


def big(number: float) -> str:
    """Format a count with a unit: 2.0M, 118.6G; from 1e18 on 4.2e19."""
    if number >= 1e18:
        return f"{number:.3g}".replace("+", "")
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:{'.3g' if number / size < 100 else '.1f'}}{unit}"
    return f"{number:g}"


class Console:
    """The console of one process; all ranks but the first are quiet."""

    def __init__(self, quiet: bool = False, stderr: bool = False) -> None:
        from rich.console import Console as RichConsole

        self.quiet = quiet
        self.live = (sys.stderr if stderr else sys.stdout).isatty() and not quiet
        width = None if self.live else _PLAIN_WIDTH
        self.rich = RichConsole(quiet=quiet, stderr=stderr, highlight=False, width=width)
        self._bar: Any = None
        self._printed_once: set[str] = set()

    def say(self, text: str = "") -> None:
        """Print text above the progress bar. Lines are never wrapped."""
        self.rich.print(text, markup=False, soft_wrap=True)

    def once(self, text: str) -> None:
        """Print a line unless this console has printed it before."""
        if text not in self._printed_once:
            self._printed_once.add(text)
            self.say(text)

    def table(self, title: str, rows: Iterable[Iterable[str]], head: Iterable[str]) -> None:
        """Print a table, as wide as its contents."""
        from rich import box
        from rich.table import Table

        # The title is a separate line: rich would wrap it at the table's width.
        self.say(title)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for position, name in enumerate(head):
            table.add_column(name, justify="left" if position == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        unlimited = self.rich.options.update(max_width=10_000)
        table.width = self.rich.measure(table, options=unlimited).maximum
        self.rich.print(table, crop=False)

    def progress(self, what: str, total: int, done: int = 0) -> Progress:
        """Open a progress display for `total` steps, of which `done` are finished."""
        return Progress(self, what, total, done)


class Progress:
    """A bar on a terminal, otherwise a line every ten seconds; both with rate and ETA.

    Used as a context manager; `update` is called after each step. A nested one adds a line to the
    outer display while it is open.
    """

    def __init__(self, console: Console, what: str, total: int, done: int) -> None:
        self.console, self.what, self.total = console, what, total
        self.start = self.last_line = time.monotonic()
        self.paused = 0.0  # seconds of sampling and scoring, which do not count for the rate
        # Seconds and steps between the last updates: an average since the start would include a
        # slow beginning until the end.
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
        from rich.progress import Progress as RichProgress

        bar = RichProgress(
            TextColumn("{task.description}"),
            # The colours of the terminal's own theme are legible on dark and on light.
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
        """Return the mean duration of the last steps, with `done` finished by now.

        The first interval, which includes compilation and cold caches, counts only until the next.
        """
        worked = time.monotonic() - self.start - self.paused
        if done > self._done:
            if len(self._recent) == 1 and self._first:
                self._recent.clear()
                self._first = False
            self._recent.append((worked - self._worked, done - self._done))
        if done != self._done:  # fewer after a return to an earlier checkpoint
            self._worked, self._done = worked, done
        seconds, steps = 0.0, 0
        for interval, count in self._recent:
            seconds += interval
            steps += count
        return seconds / max(1, steps)

    def update(self, done: int, text: str = "", pending: float = 0.0) -> None:
        """Show that `done` steps are finished, with `pending` seconds of other work to come."""
        now = time.monotonic()
        eta = self.seconds_per_step(done) * (self.total - done) + pending
        status = f"{done}/{self.total}  {text}  [{clock(now - self.start)}<{clock(eta)}]"
        due = done >= self.total or now - self.last_line >= PLAIN_EVERY_S
        if self._task is not None:
            self.bar.update(self._task, completed=done, text=status.replace("[", r"\["))
        elif due and not (self.console.quiet or self.console.live):
            self.last_line = now
            self.console.say(f"{self.what} {status}")
