"""The status table on a terminal (live), and one plain line per run elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sweeps.view.standing import ORDER, Standing

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


def table(title: str, rows: Sequence[Standing], width: int, room: int | None = None) -> Any:
    """Return a rich table that fits its terminal; runs at the end of the order are counted only.

    Args:
        title: Above the table.
        rows: In the order of `ORDER`.
        width: Columns of the terminal.
        room: Lines of the terminal; None: as many as needed.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = list(rows)
    if room is not None and len(shown) > room - 7:
        shown = shown[: max(3, room - 8)]
    keys = varying(rows)
    heads = ["state", " ".join(keys) or "run", "step", "img/s", "ETA", "job", ""]
    lines = [_cells(row, keys) for row in shown]
    taken = [
        max([len(head), *(len(line[i]) for line in lines)]) for i, head in enumerate(heads[:-1])
    ]
    bar = 9 if any(_bar(row) for row in shown) else 0
    # Errors are long: what does not fit is in the plain lines and in `show`.
    rest = width - sum(taken) - bar - 3 * len(heads)
    if rest < 16 and bar:
        bar, rest = 0, rest + bar
    made = Table(
        title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1), caption=_caption(rows, shown), caption_justify="left",
    )  # fmt: skip
    for i, head in enumerate(heads):
        made.add_column(head, no_wrap=True, justify="right" if head in ("img/s", "ETA") else "left")
        if i < len(taken):
            made.columns[i].min_width = min(taken[i], max(8, width // 3))
    for row, line in zip(shown, lines, strict=True):
        cells = [escape(cell) for cell in line]
        cells[0] = f"[{_COLOUR[row.state]}]{row.state}[/]"
        cells[2] += f" {_bar(row)}" if bar else ""
        cells[-1] = escape(shorten(line[-1], max(8, rest)))
        made.add_row(*cells)
    return made


def varying(rows: Sequence[Standing]) -> list[str]:
    """Return the keys that set the rows apart; [] where runs of several kinds stand together."""
    kinds = {(row.run.stage, *row.run.varies) for row in rows}
    if len(kinds) != 1:
        return []
    keys = list(rows[0].run.varies)
    return [k for k in keys if len({row.run.varies[k] for row in rows}) > 1] or keys


def _cells(row: Standing, keys: Sequence[str]) -> list[str]:
    what = " ".join(row.run.varies[k].strip('"') for k in keys) or row.run.label or row.run.name
    speed = f"{row.speed:.4g}" if row.speed else ""
    job = " ".join(x for x in (row.job, row.node) if x)
    return [row.state, what, progress(row), speed, clock(row.eta), job, note(row)]


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` characters, the last one an ellipsis if something is cut."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "\u2026"


def _caption(rows: Sequence[Standing], shown: Sequence[Standing]) -> str:
    text = counts(rows)
    left = [row.eta for row in rows if row.live and row.eta is not None]
    text += f"   {clock(max(left))} to go" if left else ""
    return text + (f"   ({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else "")


def _bar(row: Standing) -> str:
    if not row.steps or row.state not in ("running", "requeued"):
        return ""
    filled = min(8, round(8 * (row.step or 0) / row.steps))
    line = "\u2501"
    return f"[green]{line * filled}[/][dim]{line * (8 - filled)}[/]"


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
        parts: list[Any] = [table(title, rows, console.width, console.height)]
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
