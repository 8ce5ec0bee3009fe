"""Main memory and GPUs: what is available, and errors for models that do not fit."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil

from backbones.cost import Cost
from experiments.runtime.errors import is_out_of_memory
from routing.errors import UserError, require


class MemoryLimit(UserError):
    """The model does not fit; the message names the value to type."""


#: Memory of a training process on a CPU besides the tensors of a step (measured: 0.66 GB for T/4,
#: with torch 2.15). Scoring adds its networks and features.
PROCESS_BYTES = 3 * 2**28

# For a single sample, which cannot be split.
ONE = "out of memory with one sample: take a smaller size= or routing.checkpoint=true"


def available_memory() -> int:
    """Return the bytes of main memory that are free for use."""
    return psutil.virtual_memory().available


def visible_gpus() -> list[str]:
    """Return the GPUs that this shell may use, as CUDA_VISIBLE_DEVICES names them (no torch)."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        gpus = []
        for name in map(str.strip, variable.split(",")):
            if not re.match(r"\d+\Z|(GPU|MIG)-", name):
                break  # CUDA ignores everything from the first invalid name, such as -1
            gpus.append(name)
        return gpus
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if not count:  # a container may hide that folder
        try:
            listing = subprocess.run(
                ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return []
        count = sum(line.startswith("GPU") for line in listing.stdout.splitlines())
    return list(map(str, range(count)))


@contextlib.contextmanager
def out_of_memory(tried: int) -> Iterator[None]:
    """Turn an out-of-memory error with `tried` samples into advice; other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        explain(error, tried)


def explain(error: RuntimeError | MemoryError, tried: int) -> NoReturn:
    """Raise the error of `out_of_memory` for the exception that is being handled."""
    if not is_out_of_memory(error):
        raise
    if tried == 1:
        raise MemoryLimit(ONE) from error
    raise MemoryLimit(
        f"out of memory with {tried} samples at once: type "
        f"train.micro_batch={tried // 2} (same result, accumulated) or train.micro_batch=auto"
    ) from error


def check_fits(
    cost: Cost,
    samples: int,
    what: str = "a smaller size=, backbone.depth=, backbone.width= or train.micro_batch=",
) -> None:
    """Refuse a model and batch that certainly do not fit, before allocating any of it.

    Exhausted memory ends in swapping, or in a kill without a message. A prediction of twice the
    free memory exceeds the error of the prediction.

    Args:
        cost: Cost of the model.
        samples: Samples in main memory: 0 if a GPU holds them.
        what: Options to decrease, as typed.
    """
    needed, free = cost.training_bytes(samples), available_memory()
    require(
        needed <= 2 * free,
        f"{cost.params:,} parameters and {samples:,} samples at once need about "
        f"{needed / 2**30:,.0f} GB of memory and {free / 2**30:,.0f} are free: take {what}",
        MemoryLimit,
    )


def memory_line(cost: Cost, samples: int) -> str:
    """Predict the peak memory of a training step: on the GPU, or of the process on a CPU."""
    state = cost.training_bytes(0) / 2**30
    peak, process = cost.training_bytes(samples) / 2**30, PROCESS_BYTES / 2**30
    rest = f"{state:.3g} GB of weights, gradients, moments and EMA, the rest activations"
    if visible_gpus():
        return f"memory      about {peak:.3g} GB of the GPU at the peak: {rest}"
    return (
        f"memory      about {peak + process:.3g} GB at the peak: {process:.3g} GB for Python, "
        f"PyTorch and data, {rest}"
    )
