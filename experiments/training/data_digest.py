"""The digest of a run's data, by which a run that goes on notices that they were replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.config.schema import Config
from experiments.evaluation.scoring import cache_of
from experiments.runtime import run_folder
from experiments.runtime.checkpoint_files import CheckpointError
from experiments.runtime.console import Console
from experiments.runtime.digest import content_digest
from experiments.runtime.processes import gather
from routing.errors import require


def data_digest(config: Config, accelerator: Any, console: Console) -> str:
    """Return the digest of the data's files, which the first process computes; empty for none."""
    digest = ""
    if accelerator.is_main_process:
        files = config.data.content_files()
        if files:
            with console.progress(f"digest of {len(files):,} files"):
                digest = content_digest(files, cache_of(config))
    return gather(digest)[0]


def check_same_data(config: Config, checkpoint: Path, saved: str | None, digest: str) -> None:
    """Refuse data with another digest than `saved`, that of a checkpoint.

    Checkpoints of earlier versions have None, which is accepted.

    Raises:
        CheckpointError: The data were replaced under the same names and sizes.
    """
    require(
        saved in (None, digest),
        f"{checkpoint} was trained on other data: data={config.data.name} has other contents now, "
        "under the same names and sizes; restore them to resume, or train on the new ones in "
        f"another folder (paths.runs=FOLDER, or move {config.folder} away)",
        CheckpointError,
    )


def check_finished(config: Config, accelerator: Any, console: Console) -> None:
    """Refuse a finished run of other data: the same command would pass it off as theirs."""
    for _, checkpoint in run_folder.listed(config.folder)[-1:]:
        saved = run_folder.read(checkpoint / "state.json").get("data_digest")
        check_same_data(config, checkpoint, saved, data_digest(config, accelerator, console))
