"""Run a model as often as the conformance kit needs, and judge its passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from routing.check import properties
from routing.check.marks import run_marked
from routing.check.observed import ObservedPass, observe
from routing.check.report import PASS, Finding, Report
from routing.check.scans import compare_scans
from routing.check.subject import CheckError, RoutedModel
from routing.check.tables import positions_gathered
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
        model = _build(build, seed, restart=0)
        passes = _training_passes(model)
        for observed in passes:
            model.protected(observed.batch, observed.tokens)  # refuses wrong positions early
        evaluation = None
        outputs: tuple[Any, Any, Any] | None = None
        if model.evaluate is not None:
            evaluation = observe(run_marked(model, model.evaluate), model.depth)
            if model.dense is not None:
                outputs = model.evaluate(), model.evaluate(), model.dense()
        gradient = properties.gradient_reaches_bypass(passes[0])
        again = _training_passes(_build(build, seed, restart=1), draw_others=True)
        positions = positions_gathered(model, passes, evaluation)
        other_seed = None
        if _takes_seed(build):
            other_seed = _training_passes(_build(build, seed + 1, restart=2))
        scans = compare_scans(model) if model.ordered else ([], "")
    tables_gathered = positions[0] == PASS
    judgements = {
        "routed blocks": properties.routed_blocks(model, passes),
        "rate": properties.rate(model, passes),
        "bit for bit": properties.arrives_bit_for_bit(passes),
        "order": properties.order_preserved(model, passes, tables_gathered, scans),
        "positions": positions,
        "protected tokens": properties.protected_tokens(model, passes),
        "gradient": gradient,
        "dense evaluation": properties.evaluation_dense(model, evaluation),
        "equal evaluation": properties.evaluation_equal(outputs),
        "samples differ": properties.samples_differ(model, passes),
        "steps differ": properties.steps_differ(passes),
        "restart": properties.restart_repeats(passes, again, other_seed),
    }
    return Report(tuple(Finding(name, *judgement) for name, judgement in judgements.items()))


def _takes_seed(build: Callable[..., RoutedModel]) -> bool:
    return "seed" in inspect.signature(build).parameters


def _build(build: Callable[..., RoutedModel], seed: int, restart: int) -> RoutedModel:
    torch.manual_seed(1000 + restart)
    model = build(seed=seed) if _takes_seed(build) else build()
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
        with torch.enable_grad():
            passes.append(observe(run_marked(model, model.train), model.depth))
    return passes
