"""Main memory and GPU memory: what there is, and what is said where it does not do."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil

from backbones.cost import Cost
from experiments.runtime.command import is_out_of_memory
from routing.errors import UserError


class MemoryLimit(UserError):
    """The model does not fit; the message names the value to type."""


#: What a training process takes on a CPU beside the tensors of a step (measured: 0.90 GB for T/4
#: and S/2, with torch 2.15); scoring adds its networks and features.
PROCESS_BYTES = 2**30

# Of a single sample, which cannot be taken in pieces.
ONE = "out of memory with one sample: take a smaller size= or routing.checkpoint=true"


def available_memory() -> int:
    """Return the bytes of main memory that are free for use."""
    return psutil.virtual_memory().available


def visible_gpus() -> list[str]:
    """Return the GPUs that this shell may use, as CUDA_VISIBLE_DEVICES names them (no torch)."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:  # CUDA sees those before the first that is none, such as -1
        given = (gpu.strip() for gpu in named.split(","))
        return list(itertools.takewhile(re.compile(r"\d+\Z|(GPU|MIG)-").match, given))
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if not count:  # a container may hide that folder
        try:
            done = subprocess.run(
                ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return []
        count = sum(line.startswith("GPU") for line in done.stdout.splitlines())
    return [str(i) for i in range(count)]


@contextlib.contextmanager
def out_of_memory(tried: int) -> Iterator[None]:
    """Turn an out-of-memory error of `tried` samples into the value to type; leave any other."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        explain(error, tried)


def explain(error: RuntimeError | MemoryError, tried: int) -> NoReturn:
    """Raise what `out_of_memory` makes of the error that is being handled."""
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
    """Refuse a model and batch that are sure not to fit, before any of it is made.

    Filling the memory ends in swapping or in a kill without a word; a prediction that is twice
    what is free is beyond its own error. `samples` are those in main memory: 0 where a GPU holds
    them; `what` is what to make smaller, as typed.
    """
    needed, free = cost.training_bytes(samples), available_memory()
    if needed > 2 * free:
        raise MemoryLimit(
            f"{cost.params:,} parameters and {samples:,} samples at once need about "
            f"{needed / 2**30:,.0f} GB of memory and {free / 2**30:,.0f} are free: take {what}"
        )
