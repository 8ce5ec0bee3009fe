"""Where a training step's time goes, by part.

Parts are named while the step runs: by hooks on modules, and by wrapping the branches of a block
and `routing`'s functions for the time of the profile. An operation counts for the innermost name
around it; one in the backward pass for the part whose forward operation made it (autograd numbers
them alike). The gathers inside a block's norm and gated sum are those of its scan orders; there are
hundreds in a step, and a name around each would cost as much as they do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from experiments.benchmark.step_times import Step, named, step_memory
from experiments.runtime.memory import available_memory
from routing.layout import Layout
from routing.stack import StackPass

NORM, SCAN = "norm, gate", "scan order"
PARTS = (
    "draw, loss",
    "embed",
    NORM,
    "mixer",
    "mlp",
    "route",
    SCAN,
    "head",
    "gradients",
    "clip",
    "optimizer",
    "EMA",
)
ROUTE = ("_order", "_positions", "_gaps", "_neighbours", "_slots")


@contextmanager
def _scopes(step: Step) -> Iterator[None]:
    """Name the parts of a model while the block runs."""
    model = step.model
    with ExitStack() as undo:

        def scope(module: torch.nn.Module, part: str) -> None:
            inside: list[Any] = []

            def enter(*_: Any) -> None:
                inside.append(torch.profiler.record_function(f"part:{part}"))
                inside[-1].__enter__()

            def leave(*_: Any) -> None:
                inside.pop().__exit__(None, None, None)

            undo.callback(module.register_forward_pre_hook(enter).remove)
            undo.callback(module.register_forward_hook(leave).remove)

        def wrap(owner: Any, name: str, part: str) -> None:
            inner: Callable[..., Any] = getattr(owner, name)

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with named(part):
                    return inner(*args, **kwargs)

            undo.enter_context(mock.patch.object(owner, name, wrapped))

        for block in model.stack.blocks:
            scope(block, NORM)
            wrap(block, "first", "mixer")
            # A Mamba block's second branch is another mixer.
            wrap(block, "second", "mixer" if hasattr(block, "two") else "mlp")
        scope(model.head, "head")
        wrap(model, "embed", "embed")
        wrap(model.modulate, "forward", "embed")
        for method in ("open", "gather", "scatter"):
            wrap(StackPass, method, "route")
        for method in ROUTE:
            if hasattr(Layout, method):
                wrap(Layout, method, "route")
        for method in ("to_scan", "from_scan"):
            wrap(Layout, method, SCAN)
        yield


def _part(event: Any) -> str | None:
    """The innermost named part around an event."""
    while event is not None:
        if event.name.startswith("part:"):
            return event.name.removeprefix("part:")
        event = event.cpu_parent
    return None


def _task(event: Any) -> Any:
    """The backward task that an event belongs to, or None in the forward pass."""
    while event is not None:
        if event.name.startswith("autograd::engine::evaluate_function"):
            return event
        event = event.cpu_parent
    return None


def attribute(events: list[Any], cuda: bool) -> dict[str, float]:
    """Sum the own time of operations by part.

    Args:
        events: Of a torch profile.
        cuda: Count time on the device instead of the CPU.

    Returns:
        Microseconds by part.
    """
    made: dict[int, str] = {}
    forward = [e for e in events if _task(e) is None]
    for event in sorted(forward, key=lambda e: e.time_range.start):
        # The last operation that carries a number is the one that made the node.
        if event.sequence_nr >= 0:
            made[event.sequence_nr] = _part(event) or "draw, loss"
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if not spent:
            continue
        task = _task(event)
        if task is None:
            part = _part(event) or "draw, loss"
        elif "AccumulateGrad" in task.name:
            part = "gradients"
        else:
            part = made.get(task.sequence_nr, "draw, loss")
        if part == NORM and event.name == "aten::index_select":
            part = SCAN
        totals["draw, loss" if part in ("forward", "backward") else part] += spent
    return dict(totals)


def _touch(step: Step) -> None:
    """Leave as much memory as a step takes in the allocator's hands, in pages that are mapped.

    The profiler's own records lie between tensors, so that the heap grows while it runs; page
    faults would then count, as a sixth of the step, for the operations that make large tensors.
    """
    # Twice that: what the step left is free already. Never so much that the machine runs out.
    torch.ones(min(2 * step_memory(step)[0], available_memory() // 2) // 4)


def profile(step: Step, rounds: int = 2) -> dict[str, float]:
    """Return each part's share of a step's time; the shares sum to 1."""
    cuda = step.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    step()
    with _scopes(step):
        step()
        if not cuda:
            _touch(step)
        with torch.profiler.profile(activities=kinds) as seen:
            for _ in range(rounds):
                step()
    totals = attribute(list(seen.events()), cuda)
    whole = sum(totals.values())
    return {part: totals.get(part, 0.0) / whole for part in PARTS}
