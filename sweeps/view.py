"""The status table on a terminal (live), and one plain line per run elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sweeps.status import ORDER, Standing

_COLOUR = {
    "running": "green", "starting": "cyan", "failed": "bold red",
    "requeued": "yellow", "pending": "yellow", "stopped": "magenta", "new": "dim", "done": "blue",
}  # fmt: skip


def clock(seconds: float | None) -> str:
    """Return seconds as `42 s`, `3:05`, `2:03:05` or `1 d 4 h`."""
    if seconds is None:
        return ""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def counts(rows: Sequence[Standing]) -> str:
    """Return `3 running, 1 failed, 13 done` in the order of the table."""
    found = Counter(row.state for row in rows)
    return ", ".join(f"{found[state]} {state}" for state in ORDER if found[state]) or "nothing yet"


def progress(row: Standing) -> str:
    """Return `120/1000`, or what is known of it."""
    if row.steps is None:
        return ""
    return f"{row.step or 0}/{row.steps}"


def note(row: Standing) -> str:
    """Return the last column: score, reason, error, heartbeat."""
    parts = [row.score, row.why]
    if row.beat is not None and row.beat > 120:
        parts.append(f"silent for {clock(row.beat)}")
    if row.attempts > 1:
        parts.append(f"attempt {row.attempts}" if row.live else f"{row.attempts} attempts")
    return "  ".join(part for part in parts if part)


def plain(rows: Sequence[Standing]) -> list[str]:
    """Return one line per run, for pipes and logs: state, run, progress, speed, ETA, job, note."""
    lines = []
    for row in rows:
        speed = f"{row.speed:.4g} img/s" if row.speed else ""
        eta = f"ETA {clock(row.eta)}" if row.eta is not None else ""
        cells = [
            row.state.ljust(8),
            row.run.name,
            progress(row),
            speed,
            eta,
            row.job,
            row.node,
            note(row),
        ]
        lines.append("  ".join(cell for cell in cells if cell))
    return lines


def table(title: str, rows: Sequence[Standing], room: int | None = None) -> Any:
    """Return a rich table; with little room, runs at the end of the order are folded into one line.

    Args:
        title: Above the table.
        rows: In the order of `ORDER`.
        room: Lines that the terminal has; None: as many as needed.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = list(rows)
    if room is not None and len(shown) > room - 7:
        shown = shown[: max(3, room - 8)]
    made = Table(
        title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        caption=_caption(rows, shown), caption_justify="left",
    )  # fmt: skip
    made.add_column("state", no_wrap=True, min_width=8)
    made.add_column("run", overflow="fold", min_width=10)
    made.add_column("step", no_wrap=True, min_width=9)
    made.add_column("img/s", justify="right", no_wrap=True, min_width=5)
    made.add_column("ETA", justify="right", no_wrap=True, min_width=5)
    made.add_column("job", no_wrap=True, min_width=7)
    # Errors are long: what does not fit is in the plain lines and in `show`.
    made.add_column("", overflow="ellipsis", no_wrap=True)
    for row in shown:
        colour = _COLOUR[row.state]
        made.add_row(
            f"[{colour}]{row.state}[/]", escape(row.run.label or row.run.name), _bar(row),
            f"{row.speed:.4g}" if row.speed else "", clock(row.eta),
            escape(" ".join(x for x in (row.job, row.node) if x)), escape(note(row)),
        )  # fmt: skip
    return made


def _caption(rows: Sequence[Standing], shown: Sequence[Standing]) -> str:
    text = counts(rows)
    left = [row for row in rows if row.live and row.eta is not None]
    if left:
        text += f"   {clock(max(row.eta or 0 for row in left))} to go"
    if len(shown) < len(rows):
        text += f"   ({counts(rows[len(shown) :])} not shown; pipe through less for all)"
    return text


def _bar(row: Standing) -> str:
    text = progress(row)
    if row.steps and row.state in ("running", "requeued"):
        filled = min(8, round(8 * (row.step or 0) / row.steps))
        return f"{text} [green]" + "\u2501" * filled + "[/][dim]" + "\u2501" * (8 - filled) + "[/]"
    return text


def watch(
    title: str, ask: Callable[[], tuple[list[Standing], str]], seconds: float = 5.0
) -> list[Standing]:
    """Show a live table until nothing is live or Ctrl-C is pressed; return the last rows."""
    import time

    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()

    def picture(rows: list[Standing], trouble: str) -> Any:
        parts: list[Any] = [table(title, rows, console.height)]
        if trouble:
            parts.append(Text(trouble, style="red"))
        return Group(*parts)

    rows, trouble = ask()
    with Live(picture(rows, trouble), console=console, auto_refresh=False) as live:
        try:
            while any(row.live for row in rows):
                time.sleep(seconds)
                rows, trouble = ask()
                live.update(picture(rows, trouble), refresh=True)
        except KeyboardInterrupt:
            pass
    return rows
