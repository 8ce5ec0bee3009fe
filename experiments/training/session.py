"""One start of a training run: lock the run folder, train, record how it ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backbones.ops import native
from experiments.components import make_accelerator
from experiments.config.schema import Config
from experiments.preflight import check_ready
from experiments.runtime import console as log
from experiments.runtime import run_folder, signals
from experiments.runtime.command import Interrupted
from experiments.runtime.files import locked
from experiments.training.start import start
from experiments.training.summary import read_summary, show_results


def train(config: Config, *, quiet: bool = False) -> Path:
    """Train a run, or resume it where an earlier start stopped; return the run folder.

    Raises:
        UserError: Anything a user can fix, in one sentence.
        Interrupted: Stopped by a signal, after saving.
    """
    accelerator = make_accelerator(config)
    console = log.Console(quiet or not accelerator.is_main_process)
    folder = config.folder
    summary = read_summary(folder)
    if summary is not None and summary["step"] >= config.train.steps:
        done_steps = summary["step"]
        console.say(
            f"done already: {folder} has {done_steps} steps; train.steps={2 * done_steps} would "
            "go on from there"
        )
        show_results(console, folder)
        return folder
    check_ready(config, accelerator.num_processes, accelerator.device.type == "cuda")
    if accelerator.device.type == "cpu":
        native.start_build(console.say)  # while the data are read and the model is made
    with signals.installed():
        if not accelerator.is_main_process:
            start(config, accelerator, console)
            return folder
        with locked(folder), record_end(folder, config.train.steps):
            start(config, accelerator, console)
    return folder


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
        text = f"{stop.reason}: saved step {stop.step}; type the same command to go on"
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
        log.write_status(folder, status, **fields)
