"""Train a run: lock its folder, start or resume, train to the last step, record how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backbones.ops import native
from experiments.components import make_accelerator, open_tracker
from experiments.config.schema import Config
from experiments.preflight import check_ready
from experiments.runtime import run_folder, signals
from experiments.runtime.console import Console
from experiments.runtime.files import refuse_links
from experiments.training import run_end, run_start
from experiments.training.data_digest import check_finished
from experiments.training.loop import Trainer
from experiments.training.summary import read_summary, show_results


def train(config: Config, *, quiet: bool = False, overrides: Sequence[str] = ()) -> Path:
    """Train a run, or resume it where an earlier start stopped; return the run folder.

    `overrides` gave the configuration: the last lines then tell how to train its dense baseline.

    Raises:
        UserError: Anything a user can fix, in one sentence.
        Interrupted: Stopped by a signal, after saving.
    """
    accelerator = make_accelerator(config)
    console = Console(quiet or not accelerator.is_main_process)
    folder = config.folder
    refuse_links(folder.parent, [folder.name])
    run_folder.open_folder(folder)
    summary = read_summary(folder)
    if summary is not None and summary["step"] >= config.train.steps:
        check_finished(config, accelerator, console)
        done_steps = summary["step"]
        console.say(
            f"done already: {folder} has {done_steps} steps; train.steps={2 * done_steps} "
            "continues from there"
        )
        show_results(console, config, overrides)
        return folder
    check_ready(config, accelerator.num_processes, accelerator.device.type == "cuda")
    if accelerator.device.type == "cpu":
        native.start_build(console.say)  # while the data are read and the model is made
    with signals.installed():
        if not accelerator.is_main_process:
            _train_in_folder(config, accelerator, console)
            return folder
        with run_end.owned_folder(folder, config.train.steps):
            evaluation_seconds = _train_in_folder(config, accelerator, console)
        # The run has ended: nothing that fails from here on changes its state.
        run_end.draw_curve(folder, console.say)
        show_results(console, config, overrides, evaluation_seconds)
    return folder


def _train_in_folder(
    config: Config, accelerator: Any, console: Console
) -> Mapping[str, Sequence[float]]:
    """Train to the last step in the run folder, which the first process has locked.

    Returns:
        Durations of its evaluations.
    """
    start_time = time.monotonic()
    is_main = accelerator.is_main_process
    with console.progress("preparing data and model"):
        trainer = Trainer(config, accelerator, console, owns_folder=is_main)
        resumed = trainer.resume()
    if not resumed and config.init:
        trainer.state.start_from(config, console.say)
    if is_main:
        run_start.write_running(trainer)
    run_start.print_start(trainer, resumed)
    run_start.check_evaluation(trainer)
    open_tracker(config, accelerator)
    if is_main:
        run_start.write_start(trainer)
    trainer.fit()
    if is_main:
        trainer.check_folder()
        seconds = time.monotonic() - start_time
        with console.progress("weights"):
            run_end.write_results(trainer.training_step, seconds)
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:  # not `end_training`, which ends the process group too
        tracker.finish()
    return trainer.evaluation.seconds
