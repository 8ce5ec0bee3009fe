"""One start of a training run: lock the run folder, train, record how it ended."""

from __future__ import annotations

from pathlib import Path

from backbones.ops import native
from experiments.components import make_accelerator
from experiments.config.schema import Config
from experiments.preflight import check_ready
from experiments.runtime import signals
from experiments.runtime.console import Console
from experiments.runtime.locks import locked
from experiments.training.run_end import record_end
from experiments.training.start import start
from experiments.training.summary import read_summary, show_results


def train(config: Config, *, quiet: bool = False) -> Path:
    """Train a run, or resume it where an earlier start stopped; return the run folder.

    Raises:
        UserError: Anything a user can fix, in one sentence.
        Interrupted: Stopped by a signal, after saving.
    """
    accelerator = make_accelerator(config)
    console = Console(quiet or not accelerator.is_main_process)
    folder = config.folder
    summary = read_summary(folder)
    if summary is not None and summary["step"] >= config.train.steps:
        done_steps = summary["step"]
        console.say(
            f"done already: {folder} has {done_steps} steps; train.steps={2 * done_steps} "
            "continues from there"
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
