"""Run a model as often as the conformance kit needs, and judge its passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from routing.check.marks import marked_tokens
from routing.check.observed import ModelRuns, ObservedPass, observe
from routing.check.properties import PROPERTIES
from routing.check.report import Finding, Report
from routing.check.scans import compare_scans
from routing.check.subject import CheckError, RoutedModel
from routing.errors import require

PASSES = 4  # two samples that keep 2 of 4 tokens agree by chance in all of them with p < 1e-3


def check(build: Callable[..., RoutedModel], seed: int = 0) -> Report:
    """Check an implementation of token routing; `routing.check(build)` is the same.

    The model is built three times: twice with one seed, which stands for a restart, and once with
    another one. Torch's global random numbers differ each time: other code draws from them in the
    restarted model, before each pass, so that seeding them in `build` does not repeat a subset.
    They are put back at the end.

    Args:
        build: Returns a `RoutedModel`; called as `build(seed=...)`, or `build()` if it takes no
            argument `seed`.
        seed: The seed.

    Returns:
        A `Report`: `report.ok` says whether nothing failed, `print(report)` shows the evidence.

    Raises:
        CheckError: If the model cannot be followed: its tokens are no float32 or float64, it
            changes them between blocks, a route begins at block 0 or ends with the last block and
            `before=` or `after=` is missing.
    """
    with torch.random.fork_rng():
        runs = _run(build, seed)
    findings = [Finding(name, *judge(runs)) for name, judge in PROPERTIES.items()]
    return Report(tuple(findings))


def _run(build: Callable[..., RoutedModel], seed: int) -> ModelRuns:
    """Build the model three times and run its passes; see `check`."""
    model = _build(build, seed, restart=0)
    passes = _training_passes(model)
    for observed in passes:
        model.protected(*observed.shape[:2])  # refuses wrong positions early
    evaluation, outputs = None, None
    if model.evaluate is not None:
        with marked_tokens(model) as marked:
            model.evaluate()
            evaluation = observe(marked, model.depth)
        if model.dense is not None:
            outputs = model.evaluate(), model.evaluate(), model.dense()
    restarted = _training_passes(_build(build, seed, restart=1), draw_others=True)
    other_seed = None
    if _takes_seed(build):
        other_seed = _training_passes(_build(build, seed + 1, restart=2))
    scans = compare_scans(model) if model.ordered else ([], "")
    return ModelRuns(model, passes, restarted, other_seed, evaluation, outputs, scans)


def _takes_seed(build: Callable[..., RoutedModel]) -> bool:
    return "seed" in inspect.signature(build).parameters


def _build(build: Callable[..., RoutedModel], seed: int, restart: int) -> RoutedModel:
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
    return model


def _training_passes(model: RoutedModel, draw_others: bool = False) -> list[ObservedPass]:
    """Run some passes of training with marked tokens.

    With `draw_others`, something else draws from torch's global generators before each pass, as
    data loading, dropout or a log of samples does in training.
    """
    devices = {parameter.device for block in model.blocks for parameter in block.parameters()}
    passes = []
    for _ in range(PASSES):
        for device in (devices | {torch.device("cpu")}) if draw_others else ():
            torch.rand(7, device=device)
        with torch.enable_grad(), marked_tokens(model) as marked:
            model.train()
            passes.append(observe(marked, model.depth))
    return passes
