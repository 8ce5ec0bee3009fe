"""The status table: live on a terminal, one plain line per run elsewhere, and one run in full.

It also names pairs of a dense and a routed run that used different versions of the code.
"""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.runtime import run_folder
from experiments.runtime.console import clock, printable
from sweeps.plan.dependencies import display_name
from sweeps.plan.resources import describe_stored
from sweeps.status.run_status import STATES, RunStatus
from sweeps.status.status import statuses
from sweeps.store.folder import Sweep
from sweeps.store.planned_run import RunRecord


def counts(rows: Sequence[RunStatus]) -> str:
    """Return `3 running, 1 failed, 13 done (2 extended)` in the order of the table."""
    by_state = Counter(row.state for row in rows)
    texts = [f"{by_state[state]} {state}" for state in STATES if by_state[state]]
    marks = {
        "extended": sum(row.extended for row in rows),
        "diverged": sum(row.diverged for row in rows),
    }
    remarks = ", ".join(f"{count} {mark}" for mark, count in marks.items() if count)
    return (", ".join(texts) or "nothing yet") + (f" ({remarks})" if remarks else "")


def note(row: RunStatus) -> str:
    """Return the last column: scores, reason or error, silence, attempts."""
    parts = [row.score, row.why]
    if row.beat is not None and row.beat > 120:
        parts.append(f"silent for {clock(row.beat)}")
    if row.attempts > 1:
        parts.append(f"attempt {row.attempts}" if row.live else f"{row.attempts} attempts")
    return "  ".join(part for part in parts if part)


def _cells(row: RunStatus) -> tuple[str, str, str, str, str]:
    """Return progress, speed, the time that it took, the time that remains, and its job."""
    speed = f"{row.speed:.4g}" if row.speed else ""
    elapsed = clock(row.elapsed) if row.elapsed >= 1 else ""
    eta = "" if row.eta is None else clock(row.eta)
    progress = "" if row.steps is None else f"{row.step or 0}/{row.steps}"
    if row.extended:
        progress += " steps (extended)"
    return progress, speed, elapsed, eta, f"{row.job}  {row.node}".strip()


def plain(rows: Sequence[RunStatus]) -> list[str]:
    """Return one line per run, for pipes and logs: state, run, what varies, progress, times..."""
    lines, keys = [], varying_keys(rows)
    forms = ("{}", "{} img/s", "after {}", "ETA {}", "{}")
    for row in rows:
        parts = [row.state.ljust(8), display_name(row.run), label(row, keys)]
        for form, cell in zip(forms, _cells(row), strict=True):
            parts.append(form.format(cell) if cell else "")
        parts.append(note(row))
        lines.append("  ".join(filter(None, parts)))
    return lines


def overview(sweep: Sweep, rows: Sequence[RunStatus]) -> str:
    """Return one line about a sweep: its runs by state, elapsed and remaining time."""
    took = f"elapsed {clock(elapsed(sweep, rows))}"
    return "  ".join(filter(None, (f"{sweep.name:<20}", counts(rows), took, to_go(rows))))


def elapsed(sweep: Sweep, rows: Sequence[RunStatus]) -> float:
    """Return the seconds from the first launch to now, or to the last end if nothing is live."""
    launched_at = min((batch.time for batch in sweep.batches()), default=0.0)
    ended_at = 0.0
    for row in rows:
        for event in sweep.events(row.run.name)[-1:]:
            ended_at = max(ended_at, event["time"])
    if any(row.live for row in rows):
        ended_at = time.time()
    return max(0.0, ended_at - launched_at) if launched_at else 0.0


def as_json(sweep: Sweep, rows: Sequence[RunStatus], trouble: str) -> dict[str, Any]:
    """Return what the table shows as plain values, times in seconds."""
    keys, latest = varying_keys(rows), sweep.latest_batches()
    runs = []
    for row in rows:
        values = {**row.__dict__, "label": label(row, keys)}
        values["resources"] = describe_stored(latest.get(row.run.name))
        runs.append({**values, "run": row.run.name, "folder": row.run.folder})
    return {
        "sweep": sweep.name,
        "counts": Counter(row.state for row in rows),
        "elapsed": elapsed(sweep, rows),
        "eta": seconds_left(rows),
        "trouble": trouble,
        "mixed_code": mixed_pairs(sweep, [row.run for row in rows]),
        "runs": runs,
    }


def details(sweep: Sweep, run: RunRecord) -> list[str]:
    """Return everything that is on disk about one run."""
    (row,), trouble = statuses(sweep, [run])
    typed = " ".join(f"{key}={value}" for key, value in run.values.items())
    lines = [*plain([row]), f"folder   {run.folder}", f"values   {typed}"]
    for batch in sweep.batches():
        if run.name in batch.runs:
            job = batch.ids.get(run.name, "")
            lines.append(f"batch    {_date(batch.time)}  {batch.cluster}  {job}  code {batch.code}")
            described = describe_stored(batch)
            if described:
                lines.append(f"gets     {described}")
            log = sweep.log(batch, run.name, "err")
            if log is not None and log.exists():
                lines.append(f"log      {log}")
    for event in sweep.events(run.name):
        texts = [f"{event['event'] + ' ':<9}{_date(event['time'])}"]
        for key, value in event.items():
            if key not in ("event", "time") and value not in (None, ""):
                texts.append(f"{key} {value}")
        lines.append("  ".join(texts))
    return [*lines, trouble] if trouble else lines


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def table(title: str, rows: Sequence[RunStatus], width: int, height: int | None = None) -> Any:
    """Return a rich table of rows for a terminal of `width` columns.

    Runs at the end that do not fit into `height` lines are only counted.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = list(rows)
    if height is not None and len(rows) > height - 7:
        shown = shown[: max(3, height - 8)]
    hidden = f"({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else ""
    keys, one_stage = varying_keys(rows), len({row.run.stage for row in rows}) == 1
    # Text objects: nothing in a user's data is markup.
    result = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1), caption=totals(rows, hidden), caption_justify="left",
    )  # fmt: skip
    # Runs of several stages have their keys in each row, of one stage in the head of the column.
    run_head = " ".join(keys) if one_stage and keys else "run"
    for head in ("state", run_head, "step", "img/s", "time", "ETA", "job"):
        justify = "right" if head in ("img/s", "time", "ETA") else "left"
        result.add_column(Text(printable(head)), no_wrap=True, justify=justify)  # type: ignore[arg-type]
    result.add_column()  # errors are long: this column alone is cut; `show --run` has them whole
    for row in shown:
        step, *others = (Text(printable(cell)) for cell in _cells(row))
        if width >= 100 and row.steps and row.state in ("running", "requeued"):
            step.append(" " + "\u2501" * min(8, round(8 * (row.step or 0) / row.steps)), "green")
        name = label(row, keys, with_keys=not one_stage) or row.run.label or row.run.name
        state = Text(row.state, STATES[row.state])
        remarks = Text(printable(note(row)), no_wrap=True, overflow="ellipsis")
        result.add_row(state, Text(printable(name)), step, *others, remarks)
    return result


def varying_keys(rows: Sequence[RunStatus]) -> list[str]:
    """Return the keys that differ between runs that train, or between those of one command."""
    keys: dict[str, None] = {}
    by_command: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_command.setdefault("" if row.run.trains else row.run.stage, []).append(row.run.values)
    for values in by_command.values():
        for key in dict.fromkeys(itertools.chain.from_iterable(values)):
            # Folders follow from the rest, and steps have a column.
            has_column = key in ("paths.runs", "out", "init", "train.steps")
            if not has_column and len({run_values.get(key) for run_values in values}) > 1:
                keys[key] = None
    if not keys and rows:
        return list(rows[0].run.varies)
    return list(keys)


def label(row: RunStatus, keys: Sequence[str], with_keys: bool = True) -> str:
    """Return a run's values of the keys that vary, with its stage unless that is `train`."""
    values = row.run.values
    if row.run.trains and row.run.parent:  # what its parent has, and what its stage changes
        return row.run.label
    if not with_keys:
        return " ".join(values.get(key, "-").strip('"') for key in keys)
    texts = [] if row.run.stage == "train" else [f"{row.run.stage}:"]
    for key in keys:
        if key in values:
            texts.append(f"{key}={values[key]}")
    return " ".join(texts)


def seconds_left(rows: Sequence[RunStatus]) -> float | None:
    """Return when the last live run ends; None where nothing runs or no run has an estimate.

    The work that is left is shared by as many runs at once as run now.
    """
    active = sum(row.state in ("running", "starting") for row in rows)
    live = [row for row in rows if row.live]
    etas = [row.eta for row in live if row.eta is not None]
    if not active or not etas:
        return None
    return max(*etas, sum(row.work or 0.0 for row in live) / active)


def to_go(rows: Sequence[RunStatus]) -> str:
    """Return when the last live run ends in words, "" where no run has an estimate."""
    seconds = seconds_left(rows)
    is_bound = any(row.work is None for row in rows if row.live)
    return "" if seconds is None else f"{'more than ' * is_bound}{clock(seconds)} to go"


def totals(rows: Sequence[RunStatus], hidden: str = "") -> str:
    """Return the last line of a table."""
    return "   ".join(filter(None, (counts(rows), to_go(rows), hidden)))


def watch(
    title: str, ask: Callable[[], tuple[list[RunStatus], str]]
) -> tuple[list[RunStatus], str]:
    """Show a live table until nothing is live or Ctrl-C is pressed; return what it showed last."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    rows, trouble = ask()
    with Live(console=console, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            parts = [table(title, rows, console.width, console.height)]
            if trouble:
                parts.append(Text(printable(trouble), "red"))
            live.update(Group(*parts), refresh=True)
            if not any(row.live for row in rows):
                break
            time.sleep(5.0)
            rows, trouble = ask()
    return rows, trouble


def code_of(sweep: Sweep, run: RunRecord) -> list[str]:
    """Return the hashes of the copies of the code that a run used, one for each in turn.

    A run that another sweep trained, or went on with, has the last hash in the `env.json` of its
    folder. Runs of a checkout, as with `cluster=debug`, have none.
    """
    hashes: dict[str, None] = {}
    for event in sweep.events(run.name):
        code = event.get("code")
        if event["event"] == "start" and isinstance(code, str):
            hashes[code] = None
    snapshot = run_folder.read(Path(run.folder) / "env.json").get("snapshot")
    if isinstance(snapshot, str):
        hashes[snapshot] = None
    return list(hashes)


def mixed_pairs(sweep: Sweep, runs: Sequence[RunRecord]) -> list[str]:
    """Return a line for each dense and routed run of one seed that used different code.

    The two differ in `route`, `routing.*` and their number of steps only.
    """
    pairs: dict[tuple[str, ...], tuple[list[RunRecord], list[RunRecord]]] = {}
    for run in runs:
        if run.trains:
            dense, routed = pairs.setdefault(_pair_key(run), ([], []))
            is_dense = run.values.get("route", "none") == "none"
            (dense if is_dense else routed).append(run)
    lines = []
    for dense, routed in pairs.values():
        for first in dense:
            for second in routed:
                old, new = code_of(sweep, first), code_of(sweep, second)
                if old and new and {*old, *new} != {old[0]}:
                    lines.append(
                        f"different code in a pair: {display_name(first)} used {', '.join(old)}, "
                        f"{display_name(second)} used {', '.join(new)}"
                    )
    return lines


def _pair_key(run: RunRecord) -> tuple[str, ...]:
    """Return what the two runs of a pair have in common."""
    texts = [run.stage]
    for key, value in sorted(run.values.items()):
        if key not in ("route", "train.steps", "init") and not key.startswith("routing."):
            texts.append(f"{key}={value}")
    return tuple(texts)
