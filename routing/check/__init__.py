"""Is an implementation of token routing correct? A conformance kit for any model.

    def build(seed=0):
        ...                                   # a model with routing, seeded
        return routing.check.RoutedModel(
            blocks=model.blocks, train=..., evaluate=..., dense=..., route="2-8@0.5"
        )

    print(routing.check(build))               # or: python -m routing.check module:build

It runs the model with marked tokens (`routing.check.observe`), looks at its blocks
(`routing.check.blocks`), judges each property (`routing.check.properties`) and returns a table with
evidence (`routing.check.report`).
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from routing.check.blocks import Examiner
from routing.check.observe import LookAt, Marker, ModelRuns, ObservedPass, observe
from routing.check.properties import PROPERTIES
from routing.check.report import FAIL, CheckError, Finding, Report, RoutedModel
from routing.errors import require

__all__ = ["CheckError", "Finding", "Report", "RoutedModel", "check"]


def check(build: Callable[..., RoutedModel], seed: int = 0) -> Report:
    """Check an implementation of token routing; `routing.check(build)` is the same.

    The model is built three times: twice with one seed, which stands for a restart, and once with
    another one. Torch's global random numbers differ each time: other code draws from them in the
    restarted model, before each pass, so that seeding them in `build` does not repeat a subset.
    They are put back at the end. In a distributed run every process has to call it.

    Args:
        build: Returns a `RoutedModel`; called as `build(seed=...)`, or `build()` if it takes no
            argument `seed`.
        seed: The seed.

    Returns:
        A `Report`: `report.ok` says whether nothing failed, `print(report)` shows the evidence.

    Raises:
        CheckError: If the model cannot be followed: it changes tokens between blocks, or a route
            begins at block 0 or ends with the last block and `before=` or `after=` is missing.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # what was compiled before has no hooks of ours
    with torch.random.fork_rng():
        runs = _run(build, seed)
    findings = [Finding(name, *judge(runs)) for name, judge in PROPERTIES.items()]
    if runs.ranks is not None:
        findings = _worst_of_all(findings)
    return Report(tuple(findings))


def _run(build: Callable[..., RoutedModel], seed: int) -> ModelRuns:
    """Build the model three times and run its passes; see `check`."""
    model, marker = _build(build, seed, restart=0)
    passes = _training_passes(model, marker)
    for observed in passes:
        model.protected(*observed.shape[:2])  # refuses wrong positions early
    evaluation, outputs = None, None
    if model.evaluate is not None:
        with marker.marking() as marked:
            model.evaluate()
            evaluation = observe(marked, model.depth)
        if model.dense is not None:
            outputs = model.evaluate(), model.evaluate(), model.dense()
    marker.remove()

    again, marker = _build(build, seed, restart=1)
    examiner = Examiner(again, passes, evaluation)
    restarted = _training_passes(again, marker, examiner.look_at)
    scans = examiner.compare_scans(marker)
    marker.remove()

    other_seed = None
    if _takes_seed(build):
        other, marker = _build(build, seed + 1, restart=2)
        other_seed = _training_passes(other, marker)
        marker.remove()
    ranks = _of_all_processes([s.present for observed in passes for s in observed.segments])
    return ModelRuns(
        model, passes, restarted, other_seed, evaluation, outputs, scans, examiner.index_use, ranks
    )


def _takes_seed(build: Callable[..., RoutedModel]) -> bool:
    return "seed" in inspect.signature(build).parameters


def _build(
    build: Callable[..., RoutedModel], seed: int, restart: int
) -> tuple[RoutedModel, Marker]:
    arguments = {"seed": seed} if _takes_seed(build) else {}
    try:
        inspect.signature(build).bind(**arguments)
    except TypeError as error:
        raise CheckError(
            f"the function is {error}; expected one that needs no argument, or only seed"
        ) from None
    torch.manual_seed(1000 + restart)
    model = build(**arguments)
    require(
        isinstance(model, RoutedModel),
        f"the function returns a {type(model).__name__}; expected a routing.check.RoutedModel",
        CheckError,
    )
    return model, Marker(model)


def _training_passes(
    model: RoutedModel, marker: Marker, look_at: LookAt | None = None
) -> list[ObservedPass]:
    """Run passes of training with marked tokens.

    With `look_at`, which stands for a restart, something else draws from torch's global generators
    before each pass, as data loading, dropout or a log of samples does in training.
    """
    devices = {parameter.device for block in model.blocks for parameter in block.parameters()}
    passes = []
    for _ in range(model.passes):
        for device in (devices | {torch.device("cpu")}) if look_at else ():
            torch.rand(7, device=device)
        with torch.enable_grad(), marker.marking(look_at) as marked:
            model.train()
            passes.append(observe(marked, model.depth))
    return passes


def _of_all_processes(value: Any) -> list[Any] | None:
    """Return a value of every process; None if there is only one."""
    group = torch.distributed
    if not group.is_available() or not group.is_initialized() or group.get_world_size() == 1:
        return None
    values = [None] * group.get_world_size()
    group.all_gather_object(values, value)
    return values


def _worst_of_all(findings: list[Finding]) -> list[Finding]:
    """Return the findings of all processes as one table: a property fails if it does in one."""
    of_ranks = _of_all_processes(findings) or [findings]
    worst = []
    for index, finding in enumerate(of_ranks[0]):
        for rank, others in enumerate(of_ranks):
            if rank and finding.result != FAIL and others[index].result == FAIL:
                evidence = f"process {rank}: {others[index].evidence}"
                finding = Finding(finding.name, FAIL, evidence)
        worst.append(finding)
    return worst


class _Callable(types.ModuleType):
    """This module, which can be called itself: `routing.check(build)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        """Run `check`."""
        return check(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
