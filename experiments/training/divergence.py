"""A run whose loss or gradient is not finite: back to a checkpoint, or a detailed error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from experiments.runtime import records
from experiments.runtime.run_folder import listed
from experiments.training.step import TrainingStep
from routing.errors import UserError


class Diverged(UserError):
    """Too many steps in a row with a non-finite loss or gradient."""


# A last loss so many times the first one is not noise, also where a trained model is fine-tuned.
_DIVERGED_FACTOR = 4


def has_diverged(losses: Sequence[float | None], least: float) -> bool:
    """Return whether the loss has grown, or was not finite, in the end.

    `losses` are those that were logged, in order (None: no step was finite); `least` is the lowest
    that there can be.
    """
    if not losses or losses[-1] is None:
        return bool(losses)
    return losses[0] is not None and losses[-1] - least > _DIVERGED_FACTOR * (losses[0] - least)


def roll_back(
    step: TrainingStep, bad_streak: int, checkpoint: Path | None, say: Callable[[str], None]
) -> None:
    """Return to the checkpoint before the last `bad_streak` steps, which were not finite.

    Later files of the run are deleted. Every process calls this; all of them wait for the first.

    Raises:
        Diverged: No roll-back is left (`train.rollback`), or there is no checkpoint.
    """
    config, state = step.config, step.state
    bad_step, rollbacks = state.step, state.rollbacks + 1
    if rollbacks > config.train.rollback or checkpoint is None:
        raise diverged(step, bad_streak, checkpoint)
    state.load(checkpoint, config)
    state.rollbacks = rollbacks
    # The checkpoint's other counters hold; a streak belongs to the abandoned branch.
    state.tally.bad_streak.zero_()
    if step.prefetched is not None:
        step.start_prefetch()
    if step.accelerator.is_main_process:
        forget_after(config.folder, state.step)
    step.accelerator.wait_for_everyone()
    say(
        f"{bad_streak} non-finite steps up to {bad_step}: back to step {state.step} with other "
        "random numbers"
    )


def forget_after(folder: Path, step: int) -> None:
    """Delete checkpoints, metrics, scores and pictures of steps after `step` (roll-back)."""
    for checkpoint_step, path in listed(folder):
        if checkpoint_step > step:
            shutil.rmtree(path, ignore_errors=True)
    records.cut_records(folder, step)
    for picture in (folder / "samples").glob("step-*.png"):
        if int(picture.stem.removeprefix("step-")) > step:
            picture.unlink()


def diverged(step: TrainingStep, bad_streak: int, checkpoint: Path | None) -> Diverged:
    """Return the error for a run whose last `bad_streak` steps were not finite.

    It says whether the data of the last step hold NaN or infinity; otherwise it names the noise
    levels and samples of that step, and the last `checkpoint` before the streak.
    """
    train, current_step = step.config.train, step.state.step
    problem = f"step {current_step}: {bad_streak} steps in a row had a non-finite loss or gradient"
    rows = torch.arange(train.batch)
    draws, samples = step.draws(rows, current_step - 1), step.samples(current_step - 1, rows)
    x = step.dataset.batch(samples, draws).x
    non_finite_samples = samples[~torch.isfinite(x).flatten(1).all(dim=1).cpu()].tolist()
    if non_finite_samples:
        return Diverged(
            f"{problem}, and {len(non_finite_samples)} of {len(samples)} samples are not finite "
            f"themselves (samples {', '.join(map(str, non_finite_samples[:8]))}...): the data hold "
            "NaN or infinity; make them again, or take these samples out"
        )
    times = step.objective.times(draws)
    return Diverged(
        f"{problem} (times {float(times.min()):.4g} to {float(times.max()):.4g}, samples "
        f"{samples[:8].tolist()}...); last good checkpoint: {checkpoint or 'none'}; "
        f"try train.lr={train.lr / 3:.1g} or train.clip=1"
    )
