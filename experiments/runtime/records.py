"""Files that record a run: `metrics.jsonl`, `scores.jsonl` and the heartbeat `status.json`.

`metrics.jsonl` has one object per logged step; the console and the optional trackers show the same
numbers.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from backbones.parsing import is_number, json_of
from experiments.runtime.files import atomic_write, refuse_links


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines; lines that are no mapping, such as a half-written last one, are ignored."""
    entries = []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            try:
                entry = json_of(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                entries.append(entry)
    return entries


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` except damaged ones, which must not stop a run."""
    valid = []
    for entry in read_jsonl(folder / "metrics.jsonl"):
        optional = [entry[key] for key in ("loss", "images_per_s") if entry.get(key) is not None]
        if all(map(is_number, [entry.get("step"), *optional])):
            valid.append(entry)
    return valid


def is_score(entry: Mapping[str, Any]) -> bool:
    """Whether a line of `scores.jsonl` has the name and value of a metric."""
    return isinstance(entry.get("metric"), str) and isinstance(entry.get("value"), (int, float))


def read_scores(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the lines of `scores.jsonl` for this step, except damaged ones."""
    lines = filter(is_score, read_jsonl(folder / "scores.jsonl"))
    return [line for line in lines if line.get("step") == step]


def append_jsonl(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Append lines in one flushed write, so that several processes may share the file.

    Raises:
        OSError: The disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_links(path.parent, [path.name])
    data = _lines(entries).encode()
    with path.open("a+b", buffering=0) as handle:
        if data and handle.seek(0, os.SEEK_END):
            handle.seek(-1, os.SEEK_END)
            if handle.read(1) != b"\n":
                # A writer was killed inside its line, which ours must not continue.
                data = b"\n" + data
        if handle.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(handle.fileno())


def cut_jsonl(path: Path, step: int) -> None:
    """Remove lines after `step`, and damaged ones: a resumed run writes them again."""
    if path.is_file():
        earlier = []
        for entry in read_jsonl(path):
            entry_step = entry.get("step", 0)
            if isinstance(entry_step, int | float) and entry_step <= step:
                earlier.append(entry)
        atomic_write(path, _lines(earlier))


def cut_records(folder: Path, step: int) -> None:
    """Remove the lines of `metrics.jsonl` and `scores.jsonl` after `step`."""
    for name in ("metrics.jsonl", "scores.jsonl"):
        cut_jsonl(folder / name, step)


def write_status(folder: Path, status: str, **fields: Any) -> None:
    """Write the heartbeat `status.json`: running, done, failed, preempted or stopped."""
    content = {
        "status": status,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        **fields,
    }
    atomic_write(folder / "status.json", json.dumps(content, indent=1))


def _lines(entries: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)
