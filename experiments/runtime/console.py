"""Console output of a command: lines, tables and progress (no torch here)."""

from __future__ import annotations

import re
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, TextIO

from experiments.runtime.process_group import process_group

# Without a terminal, progress is printed after this many seconds without output: a tenth of the
# elapsed time, in this range. The log of a short run moves, that of a long one stays short.
PLAIN_EVERY_S = (2.0, 10.0)
# Seconds between the checks whether such a line is due.
_PLAIN_CHECK_S = 0.5
# The ETA follows the mean rate of this many updates.
AVERAGED_UPDATES = 20
# Columns of output without a terminal.
_PLAIN_WIDTH = 200


# Sequences that a terminal obeys (colours, titles, moves of the cursor), and control characters.
_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def printable(text: object) -> str:
    """Return a text without what a terminal would obey: records and logs may be somebody else's."""
    return _CONTROLS.sub("", str(text))


def show(text: object = "", stream: TextIO | None = None, end: str = "\n") -> None:
    """Print a text that may hold values of a record, by default to stdout."""
    print(printable(text), file=stream, end=end)


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


def fit(line: str, width: int) -> str:
    """Break a line between words at `width` columns, continued below its second column.

    A word stays whole, so that a path can be copied.
    """
    if len(line) <= width:
        return line
    label = re.match(r"\S.{0,10}?\s{2,}(?=\S)", line)
    indent = len(label.group()) if label and len(label.group()) < width // 2 else 2
    lines = textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


class Console:
    """The console of one process; all ranks but the first are quiet."""

    def __init__(self, quiet: bool = False, stderr: bool = False) -> None:
        from rich.console import Console as RichConsole

        self.quiet = quiet
        self.live = (sys.stderr if stderr else sys.stdout).isatty() and not quiet
        width = None if self.live else _PLAIN_WIDTH
        self.rich = RichConsole(quiet=quiet, stderr=stderr, highlight=False, width=width)
        self._bar: Any = None
        self._open: list[Progress] = []  # the displays that are open, the innermost last
        self._printed_once: set[str] = set()
        self.last_output = time.monotonic()

    def say(self, text: str = "", wrap: bool = True) -> None:
        """Print text above the progress bar; on a terminal no line is wider than it.

        Without `wrap` the terminal breaks long lines, so that a command can be copied.
        """
        self.last_output = time.monotonic()
        text = printable(text)
        if self.live and wrap:
            text = "\n".join(fit(line, self.rich.width) for line in text.split("\n"))
        self.rich.print(text, markup=False, soft_wrap=True)

    def once(self, text: str) -> None:
        """Print a line unless this console has printed it before."""
        if text not in self._printed_once:
            self._printed_once.add(text)
            self.say(text)

    def table(
        self,
        title: str,
        rows: Iterable[Iterable[str]],
        head: Iterable[str],
        texts: Collection[str] = (),
    ) -> None:
        """Print a table, as wide as its contents; the first column and `texts` are left-aligned."""
        from rich import box
        from rich.table import Table

        # The title is a separate line: rich would wrap it at the table's width.
        self.say(title)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for position, name in enumerate(head):
            is_text = position == 0 or name in texts
            table.add_column(name, justify="left" if is_text else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(printable, row))
        unlimited = self.rich.options.update(max_width=10_000)
        table.width = self.rich.measure(table, options=unlimited).maximum
        self.rich.print(table, crop=False)

    def progress(
        self,
        what: str,
        total: int | None = None,
        done: int = 0,
        count: Callable[[], int] | None = None,
    ) -> Progress:
        """Open a progress display for `total` steps, of which `done` are finished.

        Without `total`, it shows the elapsed time alone. `count`, in place of `done`, returns the
        number of finished steps: the display calls it whenever it is drawn.
        """
        return Progress(self, what, total, done if count is None else count(), count)

    def part_of(self, steps: int) -> Callable[[float], None]:
        """Return a function that shows which share of the next `steps` steps is done (0 to 1).

        Where fewer steps remain, such as in a last batch, it is a share of those.
        """

        def show(share: float) -> None:
            if self._open:
                display = self._open[-1]
                remaining = (display.total or 1) - display.finished_steps()
                display.part = share * min(steps, remaining)

        return show


def loading() -> Progress:
    """Return the display of a command that imports PyTorch, which takes seconds."""
    return Console(quiet=process_group().rank != 0).progress("loading PyTorch")


def shown_on_stderr(what: str, count: int) -> Progress:
    """Return a display of a share, `part`, of `count` runs; of few, which take a moment, none."""
    return Console(quiet=count < 100, stderr=True).progress(what)


class Progress:
    """A bar on a terminal, otherwise a line after some seconds of silence; both with time and ETA.

    Used as a context manager. A nested one adds a line to the outer display while it is open. Time
    and `count` move on between calls of `update`, so that nothing looks like a process that hangs.
    """

    def __init__(
        self,
        console: Console,
        what: str,
        total: int | None,
        done: int,
        count: Callable[[], int] | None,
    ) -> None:
        self.console, self.what, self.total, self.count = console, what, total, count
        self.start = self._updated = time.monotonic()
        self.paused = 0.0  # seconds of sampling and scoring, which do not count for the rate
        # Seconds and steps between the last updates: an average since the start would include a
        # slow beginning until the end.
        self._recent: deque[tuple[float, int]] = deque(maxlen=AVERAGED_UPDATES)
        self._worked, self._done = 0.0, done
        self._first_count, self._first = done, True
        self._text, self._eta = "", 0.0  # of the last update
        self.part = 0.0  # what is finished beyond the last whole step, in steps, where known
        self._task: Any = None
        self._closed = threading.Event()

    def __enter__(self) -> Progress:
        self.console._open.append(self)
        if self.console.live:
            if self.console._bar is None:
                self.console._bar = self._open_bar()
            self.bar = self.console._bar
            self._task = self.bar.add_task(
                self.what, total=self.total or 1, completed=self._done, display=self
            )
        elif not self.console.quiet:
            threading.Thread(target=self._print_regularly, name=self.what, daemon=True).start()
        return self

    def _open_bar(self) -> Any:
        from rich.progress import BarColumn, ProgressColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column
        from rich.text import Text

        class Bar(BarColumn):
            """A bar of the finished steps, with the finished part of the current one."""

            def render(self, task: Any) -> Any:
                display = task.fields["display"]
                task.completed = display.finished_steps() + display.part
                return super().render(task)

        class Status(ProgressColumn):
            """Count, text and times as they are when the bar is drawn."""

            def render(self, task: Any) -> Text:
                return Text(task.fields["display"].status())

        bar = RichProgress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            # The colours of the terminal's own theme are legible on dark and on light.
            Bar(None, style="dim", complete_style="green", finished_style="green"),
            Status(Column(no_wrap=True, overflow="ellipsis")),
            console=self.console.rich,
            expand=True,
            transient=self.total is None,
        )
        bar.start()
        return bar

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self.console._open.remove(self)
        if self._task is None:
            return
        if self.console._open:
            self.bar.remove_task(self._task)
        else:
            self.bar.stop()
            self.console._bar = None

    def seconds_per_step(self, done: int) -> float:
        """Return the mean duration of the last steps, with `done` finished by now.

        What is left out and the first interval, with compilation and cold caches, count only until
        the next one.
        """
        worked = time.monotonic() - self.start - self.paused
        if done > self._done:
            if len(self._recent) == 1 and self._first:
                self._recent.clear()
                self._first = False
            self._recent.append((worked - self._worked, done - self._done))
        if done != self._done:  # fewer after a return to an earlier checkpoint
            self._worked, self._done = worked, done
        if not self._recent:
            return worked / (done - self._first_count) if done > self._first_count else 0.0
        return sum(seconds for seconds, _ in self._recent) / sum(steps for _, steps in self._recent)

    def leave_out(self, done: int) -> None:
        """Leave the time until now, with `done` steps finished, out of the rate.

        A first step builds kernels.
        """
        self._worked, self._done = time.monotonic() - self.start - self.paused, done

    def update(self, done: int, text: str = "", pending: float = 0.0) -> None:
        """Show that `done` steps are finished, with `pending` seconds of other work to come."""
        remaining_steps = max(0, (self.total or done) - done)
        self._eta = self.seconds_per_step(done) * remaining_steps + pending
        self._updated, self._text, self.part = time.monotonic(), text, 0.0
        if not self.console.live and (self.total == done or self._line_is_due()):
            self._print_line()

    def finished_steps(self) -> int:
        """Return the number of steps that are finished by now.

        The rate is counted from the first look after the first step, which builds and fills caches.
        """
        done = self._done if self.count is None else self.count()
        if done > self._done == self._first_count and not self._recent:
            self._worked, self._done = time.monotonic() - self.start - self.paused, done
        return done

    def status(self) -> str:
        """Return the finished steps, the text of the last update, and `[elapsed<remaining]`."""
        now = time.monotonic()
        elapsed, eta = clock(now - self.start), self._eta - (now - self._updated)
        finished = self.finished_steps()
        if self.total is None:
            share = min(1.0, finished + self.part)
            return f"{share:.0%}  [{elapsed}]" if 0 < share < 1 else f"[{elapsed}]"
        count = f"{int(finished + self.part)}/{self.total}"
        if self.part or self._updated == self.start:  # nothing is known of the rate
            return f"{count}  [{elapsed}]"
        return "  ".join(filter(None, [count, self._text, f"[{elapsed}<{clock(eta)}]"]))

    def _print_regularly(self) -> None:
        """Print a line when one is due, while no other display is open inside this one."""
        while not self._closed.wait(_PLAIN_CHECK_S):
            if self.console._open[-1:] == [self] and self._line_is_due():
                self._print_line()

    def _line_is_due(self) -> bool:
        now = time.monotonic()
        least, most = PLAIN_EVERY_S
        elapsed = now - self.start
        return now - self.console.last_output >= min(most, max(least, elapsed / 10))

    def _print_line(self) -> None:
        self.console.say(f"{self.what} {self.status()}")
