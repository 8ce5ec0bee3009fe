"""The last heartbeat of a run that ends with an error or on a signal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.runtime import records, run_folder
from experiments.runtime.errors import Interrupted


@contextlib.contextmanager
def record_end(folder: Path, steps: int) -> Iterator[None]:
    """Write a last heartbeat when the block ends with an error.

    Raises:
        RunFolderError: The run folder is gone; whatever failed, this is why.
    """
    try:
        yield
    except Interrupted as stop:
        status = "stopped" if stop.reason == "SIGINT" else "preempted"
        write_end(folder, status, step=stop.step, steps=steps, error=stop.reason)
        text = f"{stop.reason}: saved step {stop.step}; run the same command again to resume"
        raise Interrupted(stop.reason, stop.step, text) from None
    except KeyboardInterrupt:
        write_end(folder, "stopped", steps=steps, error="SIGINT")
        raise
    except run_folder.RunFolderError:
        raise
    except BaseException as error:
        if run_folder.is_lost(folder):
            raise run_folder.lost(folder) from error
        description = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        try:
            write_end(folder, "failed", error=description, steps=steps)
        except OSError:
            # A full disk has no room for a second file, but the heartbeat can be overwritten.
            heartbeat = run_folder.read(folder / "status.json") | {"status": "failed"}
            with contextlib.suppress(OSError):
                (folder / "status.json").write_text(json.dumps(heartbeat))
        raise


def write_end(folder: Path, status: str, **fields: Any) -> None:
    """Write the last heartbeat of a run, unless its folder is gone: this would make it again."""
    if not run_folder.is_lost(folder):
        records.write_status(folder, status, **fields)
