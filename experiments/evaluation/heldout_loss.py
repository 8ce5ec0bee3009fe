"""The metric `heldout_loss`: loss of the dense and the routed pass on held-out data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from experiments.evaluation.collect import full_precision
from experiments.evaluation.generation import evaluating
from experiments.evaluation.heldout import HeldOut, no_split, routed_pass
from experiments.evaluation.images import split_indices
from experiments.options.evaluation import Score, make_score
from experiments.runtime.console import Console
from experiments.runtime.processes import gather_rows, share

#: Largest number of held-out images that the loss is measured on.
MOST_IMAGES = 2000
#: Noisy inputs of the measurement: several per image where there are fewer images.
NOISY_INPUTS = 1000


def missing_loss(metrics: Sequence[str], dataset: Any) -> str:
    """Return why `heldout_loss`, one of the metrics, cannot be measured; empty if it can."""
    missing = no_split(dataset) if "heldout_loss" in metrics else ""
    return f"heldout_loss is missing: {missing}" if missing else ""


def heldout_scores(
    heldout: HeldOut, batch: int, console: Console | None = None, **record: Any
) -> list[Score]:
    """Return the held-out loss of both passes over all processes; a collective call.

    Args:
        heldout: The model with its held-out data.
        batch: Images per pass and process.
        console: Shows progress in noisy inputs of this process.
        record: Further fields of the scores.
    """
    index = split_indices(heldout.dataset, "test", MOST_IMAGES)
    part = share(len(index))
    process_index = index[part.start : part.stop]
    keys = ["heldout_loss"]
    if routed_pass(heldout.config, None):
        keys.append("heldout_loss_routed")
    # Number of images, then the sum of the losses of each pass.
    totals = torch.zeros(1 + len(keys), dtype=torch.float64)
    draws, console = max(1, NOISY_INPUTS // len(index)), console or Console(quiet=True)
    progress = console.progress("held-out loss", draws * len(process_index))
    with progress, torch.inference_mode(), evaluating(heldout.model), full_precision():
        for draw in range(draws):
            if len(process_index) == 0:  # more processes than images
                break
            for images in process_index.split(batch):
                losses = torch.stack(heldout.losses(images, draw)).cpu()
                totals += len(images) * torch.cat((torch.ones(1), losses))
                progress.update(int(totals[0]))
    count, *sums = gather_rows(totals.unsqueeze(0)).sum(dim=0).tolist()
    reference = f"{heldout.dataset.name}-test@{heldout.dataset.fingerprint[:8]}"
    scores = []
    for key, total in zip(keys, sums, strict=True):
        scores.append(make_score(key, total / count, len(index), None, reference, record))
    return scores
