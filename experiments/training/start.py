"""Where `run` and its multirun start one run, or its dry run."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.config.schema import Config
from experiments.runtime.console import loading
from experiments.training.dry_run import dry_run


def train_or_dry_run(config: Config, overrides: Sequence[str] = ()) -> None:
    """Train one run, or print what would be trained (dry=true).

    `overrides` are the words that gave the configuration, where one command line gave all.

    Raises:
        UserError: Anything a user can fix, in one sentence.
        Interrupted: Stopped by a signal, after saving.
    """
    if config.dry:
        dry_run(config)
        return
    with loading():  # of torch, which a dry run does without
        from experiments.training.session import train
    train(config, overrides=overrides)
