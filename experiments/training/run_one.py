"""Train one run, or print it (dry=true)."""

from __future__ import annotations

from experiments.config.schema import Config
from experiments.runtime.console import loading
from experiments.training.dry_run import dry_run


def run_one(config: Config) -> None:
    """Train one run, or print what would be trained (dry=true).

    Raises:
        UserError: Anything a user can fix, in one sentence.
        Interrupted: Stopped by a signal, after saving.
    """
    if config.dry:
        dry_run(config)
        return
    with loading():  # of torch, which a dry run does without
        from experiments.training.session import train
    train(config)
