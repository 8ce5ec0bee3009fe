"""Main memory and GPU memory: what is kept between steps, and how many samples fit at once."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from backbones.cost import Cost
from routing.errors import UserError


class MemoryLimit(UserError):
    """The model does not fit; the message names the value to type."""


_ONE = "out of memory with one sample: take a smaller size= or routing.checkpoint=true"


def keep_freed_memory() -> bool:
    """Keep what a step frees for the next one, where the C library is glibc; return whether it is.

    By default glibc hands every large tensor back to the system and gets it anew, zeroed page by
    page: 4 to 6 % of a training step at scale `tiny`. The peak stays what it was.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    # malloc.h: M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD.
    return all([mallopt(-4, 0), mallopt(-1, -1), mallopt(-2, 64 << 20)])


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


def is_oom(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a GPU or on the CPU."""
    import torch

    said = any(part in str(error) for part in ("out of memory", "can't allocate memory"))
    return said or isinstance(error, torch.OutOfMemoryError)


def out_of_memory(error: RuntimeError, tried: int) -> None:
    """Turn an out-of-memory error of `tried` samples into the value to type; leave any other."""
    if is_oom(error):
        if tried == 1:
            raise MemoryLimit(_ONE) from error
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


def runs_in_memory(attempt: Callable[[], None], forget: Callable[[], None]) -> bool:
    """Return whether `attempt` runs on the GPU without running out of memory; then `forget`."""
    import torch

    try:
        attempt()
        return True
    except RuntimeError as error:
        if not is_oom(error):
            raise
        return False
    finally:
        forget()
        gc.collect()
        torch.cuda.empty_cache()


def largest_micro_batch(local: int, fits: Callable[[int], bool]) -> int:
    """Halve from `local` samples until they fit, by the same answer on every process."""
    size = local
    while not fits(size):
        if size == 1:
            raise MemoryLimit(_ONE)
        size = (size + 1) // 2
    return size
