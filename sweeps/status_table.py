"""The status table on a terminal (live), one plain line per run elsewhere, and one run in full."""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.runtime.console import clock
from sweeps.jobs.sweep_folder import Sweep
from sweeps.planning.planned_runs import PlannedRun
from sweeps.run_status import STATES, RunStatus, read_on, statuses


def counts(rows: Sequence[RunStatus]) -> str:
    """Return `3 running, 1 failed, 13 done` in the order of the table."""
    found = Counter(row.state for row in rows)
    return ", ".join(f"{found[state]} {state}" for state in STATES if found[state]) or "nothing yet"


def note(row: RunStatus) -> str:
    """Return the last column: score, reason, error, heartbeat."""
    parts = [row.score, row.why]
    if row.beat is not None and row.beat > 120:
        parts.append(f"silent for {clock(row.beat)}")
    if row.attempts > 1:
        parts.append(f"attempt {row.attempts}" if row.live else f"{row.attempts} attempts")
    return "  ".join(part for part in parts if part)


def _cells(row: RunStatus) -> tuple[str, str, str, str, str]:
    """Return progress, speed, the time that it took, the time that is left, and its job."""
    speed = f"{row.speed:.4g}" if row.speed else ""
    spent = clock(row.elapsed) if row.elapsed >= 1 else ""
    eta = "" if row.eta is None else clock(row.eta)
    progress = "" if row.steps is None else f"{row.step or 0}/{row.steps}"
    return progress, speed, spent, eta, f"{row.job}  {row.node}".strip()


def plain(rows: Sequence[RunStatus]) -> list[str]:
    """Return one line per run, for pipes and logs: state, run, what varies, progress, times..."""
    lines, keys = [], varying(rows)
    for row in rows:
        shapes = zip(("{}", "{} img/s", "after {}", "ETA {}", "{}"), _cells(row), strict=True)
        cells = [shape.format(cell) for shape, cell in shapes if cell]
        parts = [row.state.ljust(8), row.run.name, label(row, keys), *cells, note(row)]
        lines.append("  ".join(filter(None, parts)))
    return lines


def overview(sweep: Sweep, rows: Sequence[RunStatus]) -> str:
    """Return one line about a sweep: how its runs stand, since when, and until when."""
    spent = f"since {clock(elapsed(sweep, rows))}"
    return "  ".join(filter(None, (f"{sweep.name:<20}", counts(rows), spent, to_go(rows))))


def elapsed(sweep: Sweep, rows: Sequence[RunStatus]) -> float:
    """Return the seconds from the first launch to now, or to the last end if nothing is live."""
    began = min((batch.time for batch in sweep.batches()), default=0.0)
    last = [e["time"] for row in rows for e in sweep.events(row.run.name)[-1:]]
    over = time.time() if any(row.live for row in rows) else max(last, default=0.0)
    return max(0.0, over - began) if began else 0.0


def as_json(sweep: Sweep, rows: Sequence[RunStatus], trouble: str) -> dict[str, Any]:
    """Return what the table shows as plain values, times in seconds."""
    live, keys = [row for row in rows if row.live], varying(rows)
    etas = [row.eta for row in live if row.eta is not None]
    runs = [(row.run, {**row.__dict__, "label": label(row, keys)}) for row in rows]
    return {
        "sweep": sweep.name,
        "counts": Counter(row.state for row in rows),
        "elapsed": elapsed(sweep, rows),
        "eta": max(etas) if etas and len(etas) == len(live) else None,
        "trouble": trouble,
        "runs": [{**values, "run": run.name, "folder": run.folder} for run, values in runs],
    }


def follow(sweep: Sweep, run: PlannedRun) -> None:
    """Print what a run's log says from its last lines on, until it is no longer live."""
    read: dict[Path, int | None] = {}
    shown = ""
    for look in itertools.count():
        rows = [] if look % 10 else statuses(sweep, [run])[0]
        batch = sweep.latest_batches().get(run.name)
        for log in [sweep.log(batch, run.name, kind) for kind in ("out", "err")] if batch else ():
            if log is not None:
                text, read[log] = read_on(log, read.get(log))
                print(text, end="", flush=True)
        for row in rows:
            if shown != (shown := f"{row.state} {row.why}"):
                print("\n".join(plain([row])), flush=True)
            if not row.live:
                return
        time.sleep(0.5)


def details(sweep: Sweep, one: PlannedRun) -> list[str]:
    """Return all that is on disk about one run."""
    (row,), trouble = statuses(sweep, [one])
    lines = [*plain([row]), f"folder   {one.folder}", f"command  {one.entry} {' '.join(one.args)}"]
    for batch in sweep.batches():
        if one.name in batch.runs:
            job = batch.ids.get(one.name, "")
            lines.append(f"batch    {_date(batch.time)}  {batch.cluster}  {job}  code {batch.code}")
            log = sweep.log(batch, one.name, "err")
            lines += [f"log      {log}"] if log and log.exists() else []
    for event in sweep.events(one.name):
        rest = {k: v for k, v in event.items() if k not in ("event", "time")}
        text = "  ".join(f"{k} {v}" for k, v in rest.items() if v not in (None, ""))
        lines.append(f"{event['event'] + ' ':<9}{_date(event['time'])}  {text}")
    return [*lines, trouble] if trouble else lines


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def table(title: str, rows: Sequence[RunStatus], width: int, room: int | None = None) -> Any:
    """Return a rich table, `width` columns wide, of rows in the order of `STATES`.

    In `room` lines (None: as many as needed) runs at the end are counted only.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = list(rows) if room is None or len(rows) <= room - 7 else rows[: max(3, room - 8)]
    keys, one = varying(rows), len({row.run.stage for row in rows}) == 1
    left = f"({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else ""
    # Texts: what a user's data hold is no markup.
    made = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1), caption=sums(rows, left), caption_justify="left",
    )  # fmt: skip
    # Runs of several kinds name their keys in each row.
    what = " ".join(keys) if one and keys else "run"
    for head in ("state", what, "step", "img/s", "time", "ETA", "job"):
        right = head in ("img/s", "time", "ETA")
        made.add_column(Text(head), no_wrap=True, justify="right" if right else "left")
    made.add_column()  # errors are long: this column alone is cut; `show --run` has them whole
    for row in shown:
        step, *others = map(Text, _cells(row))
        if width >= 100 and row.steps and row.state in ("running", "requeued"):
            step.append(" " + "\u2501" * min(8, round(8 * (row.step or 0) / row.steps)), "green")
        what = label(row, keys, named=not one) or row.run.label or row.run.name
        state = Text(row.state, STATES[row.state])
        remarks = Text(note(row), no_wrap=True, overflow="ellipsis")
        made.add_row(state, Text(what), step, *others, remarks)
    return made


def varying(rows: Sequence[RunStatus]) -> list[str]:
    """Return the keys that set runs of one stage apart, whether an axis or a launch varied them."""
    values: dict[tuple[str, str], set[str | None]] = {}
    for stage in dict.fromkeys(row.run.stage for row in rows):
        several = [row.run.values for row in rows if row.run.stage == stage]
        for key in dict.fromkeys(key for one in several for key in one):
            values[stage, key] = {one.get(key) for one in several}
    # Places follow from the rest, and steps have a column.
    apart = ("paths.runs", "out", "init", "train.steps")
    keys = dict.fromkeys(k for (_, k), found in values.items() if len(found) > 1 and k not in apart)
    return list(keys) or [k for row in rows[:1] for k in row.run.varies]


def label(row: RunStatus, keys: Sequence[str], named: bool = True) -> str:
    """Return a run's values of the keys that vary, with its stage where it is no training."""
    have = row.run.values
    if not named:
        return " ".join(have.get(k, "-").strip('"') for k in keys)
    stage = [] if row.run.trains else [f"{row.run.stage}:"]
    return " ".join([*stage, *(f"{k}={have[k]}" for k in keys if k in have)])


def to_go(rows: Sequence[RunStatus]) -> str:
    """Return when the last live run ends, "" where that cannot be said of any."""
    etas = [row.eta for row in rows if row.live]
    known = [eta for eta in etas if eta is not None]
    more = "more than " if len(known) < len(etas) else ""
    return f"{more}{clock(max(known))} to go" if known else ""


def sums(rows: Sequence[RunStatus], left: str = "") -> str:
    """Return the last line of a table."""
    return "   ".join(filter(None, (counts(rows), to_go(rows), left)))


def watch(title: str, ask: Callable[[], tuple[list[RunStatus], str]]) -> None:
    """Show a live table until nothing is live or Ctrl-C is pressed."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            rows, trouble = ask()
            made = table(title, rows, console.width, console.height)
            live.update(Group(made, *([Text(trouble, "red")] if trouble else ())), refresh=True)
            if not any(row.live for row in rows):
                break
            time.sleep(5.0)
