"""The status table on a terminal (live), one plain line per run elsewhere, and one run in full."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.runtime.console import clock
from sweeps import SweepError
from sweeps.jobs.sweep_folder import Sweep
from sweeps.planning.planned_runs import PlannedRun
from sweeps.run_status import STATES, RunStatus, statuses

# Legible on dark and on light: blue vanishes on black, yellow and cyan on white.
_COLOUR = {
    "running": "green", "starting": "green", "failed": "bold red",
    "requeued": "magenta", "pending": "magenta", "stopped": "magenta", "new": "dim", "done": "",
}  # fmt: skip


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


def plain(rows: Sequence[RunStatus]) -> list[str]:
    """Return one line per run, for pipes and logs: state, run, what varies, progress, times..."""
    lines, keys = [], varying(rows)
    for row in rows:
        speed = f"{row.speed:.4g} img/s" if row.speed else ""
        spent = f"after {clock(row.elapsed)}" if row.elapsed >= 1 else ""
        eta = f"ETA {clock(row.eta)}" if row.eta is not None else ""
        cells = [label(row, keys), row.progress, speed, spent, eta, row.job, row.node, note(row)]
        lines.append("  ".join([row.state.ljust(8), row.run.name, *filter(None, cells)]))
    return lines


def overview(sweep: Sweep, rows: Sequence[RunStatus]) -> str:
    """Return one line about a sweep: how its runs stand, since when, and until when."""
    spent = f"since {clock(elapsed(sweep, rows))}"
    return "  ".join(filter(None, (f"{sweep.name:<20}", counts(rows), spent, to_go(rows))))


def elapsed(sweep: Sweep, rows: Sequence[RunStatus]) -> float:
    """Return the seconds from the first launch to now, or to the last end if nothing is live."""
    batches = sweep.batches()
    if not batches:
        return 0.0
    last = [e["time"] for row in rows for e in sweep.attempts(row.run.name).events()[-1:]]
    over = time.time() if any(row.live for row in rows) else max(last, default=0.0)
    return max(0.0, over - (batches[0].time or over))


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


def one_run(runs: Sequence[PlannedRun], part: str) -> PlannedRun:
    """Return the run whose name contains `part`; raise `SweepError` unless there is just one."""
    found = [r for r in runs if part in r.name]
    if len(found) != 1:
        some = ", ".join(r.name for r in (found or runs)[:4])
        raise SweepError(
            f"{len(found)} runs have {part!r} in their name; expected one, such as --run {some}"
        )
    return found[0]


def follow(sweep: Sweep, run: PlannedRun, seconds: float = 0.5) -> None:
    """Print what a run's log says from its last lines on, until it is no longer live."""
    read: dict[Path, int] = {}
    shown, due = "", 0.0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            row = None
            if time.monotonic() >= due:
                (row,), _ = statuses(sweep, [run])
                due = time.monotonic() + 5.0
            batch = sweep.latest_batches().get(run.name)
            for kind in ("out", "err"):
                log = sweep.log(batch, run.name, kind) if batch else None
                if log is not None and log.is_file():
                    _print_on(log, read)
            if row is not None:
                if shown != (shown := f"{row.state} {row.why}"):
                    print("\n".join(plain([row])), flush=True)
                if not row.live:
                    return
            time.sleep(seconds)


def _print_on(log: Path, read: dict[Path, int], first: int = 4096) -> None:
    with log.open("rb") as handle:
        start = read.get(log, max(0, log.stat().st_size - first))
        handle.seek(start)
        text = handle.read()
        if log not in read and start:
            text = text.partition(b"\n")[2]  # not from the middle of a line
        read[log] = handle.tell()
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()


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
    for event in sweep.attempts(one.name).events():
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

    shown = list(rows)
    if room is not None and len(shown) > room - 7:
        shown = shown[: max(3, room - 8)]
    keys = varying(rows)
    left = f"({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else ""
    caption = "   ".join(filter(None, (counts(rows), to_go(rows), left)))
    # Texts: what a user's data hold is no markup.
    made = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1), caption=caption, caption_justify="left",
    )  # fmt: skip
    # Runs of several kinds name their keys in each row.
    one = len({row.run.stage for row in rows}) == 1
    what = " ".join(keys) if one and keys else "run"
    for head in ("state", what, "step", "img/s", "time", "ETA", "job"):
        right = head in ("img/s", "time", "ETA")
        made.add_column(Text(head), no_wrap=True, justify="right" if right else "left")
    made.add_column()  # errors are long: this column alone is cut; `show --run` has them whole
    for row in shown:
        what = label(row, keys, named=not one) or row.run.label or row.run.name
        step = Text(row.progress)
        if width >= 100:
            step.append(_bar(row), "green")
        made.add_row(
            Text(row.state, _COLOUR[row.state]), Text(what), step,
            f"{row.speed:.4g}" if row.speed else "", clock(row.elapsed) if row.elapsed >= 1 else "",
            "" if row.eta is None else clock(row.eta),
            Text(f"{row.job} {row.node}".strip()),
            Text(note(row), no_wrap=True, overflow="ellipsis"),
        )  # fmt: skip
    return made


def varying(rows: Sequence[RunStatus]) -> list[str]:
    """Return the keys that set runs of one stage apart, whether an axis or a launch varied them."""
    kinds: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        kinds.setdefault(row.run.stage, []).append(row.run.values)
    found: dict[str, None] = {}
    for several in kinds.values():
        known = dict.fromkeys(key for values in several for key in values)
        found |= {k: None for k in known if len({values.get(k) for values in several}) > 1}
    # Places follow from the rest, and steps have a column.
    keys = [k for k in found if k not in ("paths.runs", "out", "init", "train.steps")]
    return keys or [k for row in rows[:1] for k in row.run.varies]


def label(row: RunStatus, keys: Sequence[str], named: bool = True) -> str:
    """Return a run's values of the keys that vary, with its stage where it is no training."""
    have = row.run.values
    if not named:
        return " ".join(have.get(k, "-").strip('"') for k in keys)
    stage = [] if row.run.trains else [f"{row.run.stage}:"]
    return " ".join([*stage, *(f"{k}={have[k]}" for k in keys if k in have)])


def to_go(rows: Sequence[RunStatus]) -> str:
    """Return when the last live run ends, "" where that cannot be said of any."""
    live = [row for row in rows if row.live]
    known = [row.eta for row in live if row.eta is not None]
    if not known:
        return ""
    return f"{'' if len(known) == len(live) else 'more than '}{clock(max(known))} to go"


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
