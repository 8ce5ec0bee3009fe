"""The micro-batch: how many samples go through the model at once (`train.micro_batch`)."""

from __future__ import annotations

import gc

import torch

from experiments.runtime import memory
from experiments.runtime.processes import gather
from experiments.training.step import TrainingStep


def set_micro_batch_size(step: TrainingStep) -> None:
    """Reduce the step's micro-batch to `train.micro_batch`, or to what fits on all processes.

    Raises:
        MemoryLimit: Not even one sample fits.
    """
    option = step.config.train.micro_batch
    if option == "auto":
        while not all(gather(fits(step))):
            if step.micro_batch_size == 1:
                raise memory.MemoryLimit(memory.ONE)
            step.micro_batch_size = (step.micro_batch_size + 1) // 2
    elif option is not None:
        step.micro_batch_size = min(step.local_batch, option)


def fits(step: TrainingStep) -> bool:
    """Return whether a micro-batch of the step's size fits into this process's memory."""
    size = step.micro_batch_size
    if step.device.type == "cpu":
        # Trying would bring the machine down with swapping: predict instead.
        return step.cost.training_bytes(size) < 0.8 * memory.available_memory()
    moments = []
    try:
        with step.no_sync(), memory.out_of_memory(size):
            # AdamW allocates its two moments in the first update: leave room for them.
            for parameter in step.state.params:
                moments += [torch.empty_like(parameter), torch.empty_like(parameter)]
            step.backward(step.loss(next(step.micro_batches())))
        succeeded = True
    except memory.MemoryLimit:
        succeeded = False
    del moments
    for optimizer in step.state.optimizers:
        optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return succeeded
