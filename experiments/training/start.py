"""From a locked run folder to a finished run: resume, banner, checks, training, summary."""

from __future__ import annotations

import time
from typing import Any

from experiments.config.model import banner_lines, run_cost
from experiments.config.schema import Config
from experiments.runtime import records, trackers
from experiments.runtime.console import Console
from experiments.training.finish import finish
from experiments.training.loop import Trainer
from experiments.training.run_start import check_evaluation, print_start, write_start
from experiments.training.summary import show_results


def start(config: Config, accelerator: Any, console: Console) -> None:
    """Train to the last step in the run folder, which the first process has locked."""
    start_time = time.monotonic()
    is_main = accelerator.is_main_process
    with console.progress("preparing data and model"):
        trainer = Trainer(config, accelerator, console, owns_folder=is_main)
        state, folder = trainer.state, trainer.folder
        resumed = trainer.resume()
    if not resumed and config.init:
        state.start_from(config, console.say)
    if is_main:
        records.write_status(folder, "running", step=state.step, steps=config.train.steps)
    cost = run_cost(config, trainer.model.config)
    console.say("\n".join(banner_lines(config, cost, trainer.model.describe())))
    print_start(trainer, resumed)
    check_evaluation(trainer)
    trackers.open_tracker(config.log, folder, config.name, config.to_dict(), accelerator)
    if is_main:
        write_start(trainer)
    trainer.fit()
    if is_main:
        trainer.check_folder()
        seconds = time.monotonic() - start_time
        with console.progress("weights and loss curve"):
            finish(config, state, cost, seconds, trainer.training_step.precision)
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:  # not `end_training`, which ends the process group too
        tracker.finish()
    show_results(console, folder)
