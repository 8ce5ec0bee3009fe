"""The status table on a terminal (live), one plain line per run elsewhere, and one run in full."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from experiments.runtime.console import clock
from sweeps import SweepError
from sweeps.jobs.sweep_folder import Sweep
from sweeps.planning.planned_runs import PlannedRun
from sweeps.view.run_status import STATES, RunStatus, statuses

_COLOUR = {
    "running": "green", "starting": "cyan", "failed": "bold red",
    "requeued": "yellow", "pending": "yellow", "stopped": "magenta", "new": "dim", "done": "blue",
}  # fmt: skip


def counts(rows: Sequence[RunStatus]) -> str:
    """Return `3 running, 1 failed, 13 done` in the order of the table."""
    found = Counter(row.state for row in rows)
    return ", ".join(f"{found[state]} {state}" for state in STATES if found[state]) or "nothing yet"


def progress(row: RunStatus) -> str:
    """Return `120/1000`, or what is known of it."""
    if row.steps is None:
        return ""
    return f"{row.step or 0}/{row.steps}"


def note(row: RunStatus) -> str:
    """Return the last column: score, reason, error, heartbeat."""
    parts = [row.score, row.why]
    if row.beat is not None and row.beat > 120:
        parts.append(f"silent for {clock(row.beat)}")
    if row.attempts > 1:
        parts.append(f"attempt {row.attempts}" if row.live else f"{row.attempts} attempts")
    return "  ".join(part for part in parts if part)


def plain(rows: Sequence[RunStatus]) -> list[str]:
    """Return one line per run, for pipes and logs: state, run, progress, speed, ETA, job, note."""
    lines = []
    for row in rows:
        speed = f"{row.speed:.4g} img/s" if row.speed else ""
        eta = f"ETA {clock(row.eta)}" if row.eta is not None else ""
        cells = [progress(row), speed, eta, row.job, row.node, note(row)]
        lines.append("  ".join([row.state.ljust(8), row.run.name, *filter(None, cells)]))
    return lines


def details(sweep: Sweep, runs: Sequence[PlannedRun], part: str) -> list[str]:
    """Return all that is on disk about the one run whose name contains `part`.

    Raises:
        SweepError: No run, or more than one, has it.
    """
    found = [r for r in runs if part in r.name]
    if len(found) != 1:
        some = ", ".join(r.name for r in (found or runs)[:4])
        raise SweepError(
            f"{len(found)} runs have {part!r} in their name; expected one, such as {some}"
        )
    (one,) = found
    (row,), trouble = statuses(sweep, [one])
    lines = [
        *plain([row]),
        f"folder   {one.folder}",
        f"command  {one.entry} {' '.join(one.args)}",
    ]
    for batch in sweep.batches():
        if one.name in batch.runs:
            job = batch.ids.get(one.name, "")
            lines.append(f"batch    {_date(batch.time)}  {batch.cluster}  {job}  code {batch.code}")
            log = sweep.log(batch, one.name, "err")
            lines += [f"log      {log}"] if log and log.exists() else []
    for event in sweep.attempts(one.name).events():
        rest = {
            k: v for k, v in event.items() if k not in ("event", "time") and v not in (None, "")
        }
        text = "  ".join(f"{k} {v}" for k, v in rest.items())
        lines.append(f"{event['event']:<9}{_date(event['time'])}  {text}")
    return [*lines, trouble] if trouble else lines


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def table(title: str, rows: Sequence[RunStatus], width: int, room: int | None = None) -> Any:
    """Return a rich table that fits its terminal; runs at the end of the order are counted only.

    Args:
        title: Above the table.
        rows: In the order of `STATES`.
        width: Columns of the terminal.
        room: Lines of the terminal; None: as many as needed.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = list(rows)
    if room is not None and len(shown) > room - 7:
        shown = shown[: max(3, room - 8)]
    keys = varying(rows)
    # Texts: what a user's data hold is no markup.
    made = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1), caption=_caption(rows, shown), caption_justify="left",
    )  # fmt: skip
    for head in ("state", " ".join(keys) or "run", "step", "img/s", "ETA", "job"):
        right = head in ("img/s", "ETA")
        made.add_column(Text(head), no_wrap=True, justify="right" if right else "left")
    made.add_column()  # errors are long: this column alone is cut; `show --run` has them whole
    for row in shown:
        what = " ".join(row.run.varies[k].strip('"') for k in keys) or row.run.label or row.run.name
        step = Text(progress(row))
        if width >= 100:
            step.append(_bar(row), "green")
        made.add_row(
            Text(row.state, _COLOUR[row.state]), Text(what), step,
            f"{row.speed:.4g}" if row.speed else "", "" if row.eta is None else clock(row.eta),
            Text(f"{row.job} {row.node}".strip()),
            Text(note(row), no_wrap=True, overflow="ellipsis"),
        )  # fmt: skip
    return made


def varying(rows: Sequence[RunStatus]) -> list[str]:
    """Return the keys that set the rows apart; [] where runs of several kinds stand together."""
    kinds = {(row.run.stage, *row.run.varies) for row in rows}
    if len(kinds) != 1:
        return []
    keys = list(rows[0].run.varies)
    return [k for k in keys if len({row.run.varies[k] for row in rows}) > 1] or keys


def _caption(rows: Sequence[RunStatus], shown: Sequence[RunStatus]) -> str:
    text = counts(rows)
    left = [row.eta for row in rows if row.live and row.eta is not None]
    text += f"   {clock(max(left))} to go" if left else ""
    return text + (f"   ({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else "")


def _bar(row: RunStatus) -> str:
    if not row.steps or row.state not in ("running", "requeued"):
        return ""
    return " " + "\u2501" * min(8, round(8 * (row.step or 0) / row.steps))


def watch(
    title: str, ask: Callable[[], tuple[list[RunStatus], str]], seconds: float = 5.0
) -> list[RunStatus]:
    """Show a live table until nothing is live or Ctrl-C is pressed; return the last rows."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()

    def picture(rows: list[RunStatus], trouble: str) -> Any:
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
