"""How many samples fit through the model at once."""

from __future__ import annotations

import ctypes
import gc
from typing import TYPE_CHECKING

import torch

from routing.errors import UserError

if TYPE_CHECKING:
    from backbones.cost import Cost
    from experiments.config.schema import Config
    from experiments.training.loop import Run


class MemoryLimit(UserError):
    """The model does not fit; the message names the value to type."""


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


def is_oom(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a GPU or on the CPU."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text
        or "can't allocate memory" in text
    )


def out_of_memory(error: RuntimeError, config: Config, world: int) -> None:
    """Turn an out-of-memory error into the value to type; return for any other error.

    Raises:
        MemoryLimit: Memory ran out.
    """
    if is_oom(error):
        tried = (
            config.train.micro_batch
            if isinstance(config.train.micro_batch, int)
            else config.train.batch // world
        )
        raise MemoryLimit(
            f"out of memory with {tried} samples at once: type "
            f"train.micro_batch={max(1, tried // 2)} (same result, "
            "accumulated) or train.micro_batch=auto"
        ) from error


def micro_batches(run: Run, local: int) -> list[tuple[int, int]]:
    """Return the [low, high) pieces in which a process takes its `local` samples."""
    asked = run.config.train.micro_batch
    if asked == "auto":
        size = run.micro_batch
        if not size:
            size = run.micro_batch = _largest(run, local)
    else:
        size = min(local, int(asked) if asked else local)
    return [(low, min(local, low + size)) for low in range(0, local, size)]


def _largest(run: Run, local: int) -> int:
    """Halve from `local` until a forward and backward pass fits, agreed by all processes."""
    size = local
    while True:
        fits = _fits(run, size)
        if run.accelerator.num_processes > 1:
            answer = torch.tensor([int(fits)], device=run.device)
            fits = bool(run.accelerator.gather(answer).min())
        if fits:
            break
        if size == 1:
            raise MemoryLimit(
                "out of memory with one sample: take a smaller size= or routing.checkpoint=true"
            )
        size = (size + 1) // 2
    if size < local:
        run.console.say(
            f"micro-batch {size}: the largest that fits; {local} samples are accumulated"
        )
    return size


def _fits(run: Run, size: int) -> bool:
    if run.device.type == "cpu":
        # Trying would bring the machine down with swapping: predict instead.
        return run.cost.training_bytes(size) < 0.8 * available_memory()
    try:
        with run.accelerator.no_sync(run.net):
            run.loss(torch.arange(size, device=run.device)).backward()
        return True
    except RuntimeError as error:
        if not is_oom(error):
            raise
        return False
    finally:
        run.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()


def check_fits(cost: Cost, samples: int, what: str) -> None:
    """Refuse a model and batch that are sure not to fit, before any of it is made.

    Filling the memory ends in swapping or in a kill without a word; a prediction that is twice
    what is free is beyond its own error.

    Args:
        cost: Of the model.
        samples: Samples at once in main memory; 0 where a GPU holds them.
        what: What to make smaller, as typed.

    Raises:
        MemoryLimit: It does not fit.
    """
    needed, free = cost.training_bytes(samples), available_memory()
    if needed > 2 * free:
        raise MemoryLimit(
            f"{cost.params:,} parameters and {samples:,} samples at once need about "
            f"{needed / 2**30:,.0f} GB of memory and {free / 2**30:,.0f} are free: take {what}"
        )


def available_memory() -> int:
    """Return the bytes of main memory that are free for use (Linux), or half of all elsewhere."""
    import os

    try:
        with open("/proc/meminfo") as handle:
            for line in handle:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
