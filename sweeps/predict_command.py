"""`predict`: train or read short pairs of a grid, and say what its routes will save or cost."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

import analysis
from analysis.archives import PUBLISHED, unpack
from analysis.step_penalty import curves_by_run
from backbones.parsing import whole
from sweeps import SweepError, grid, predict, require
from sweeps.arguments import Arguments
from sweeps.folder import Sweep
from sweeps.launch import launch
from sweeps.overrides import Typed
from sweeps.pilot import (
    LOGGED_POINTS,
    Comparison,
    comparisons,
    logged_on_the_way,
    pilot_grid,
    pilot_root,
)
from sweeps.plan import make_plan

# Of a full run's steps, unless steps= is typed; at this multiple the horizon ends.
_PILOT_SHARE = 1 / predict.HORIZON / 5
_SEEDS = (0, 1, 2)


def predict_command(options: argparse.Namespace) -> int:
    """Run `predict`: return 1 if a pilot run failed in this process."""
    typed_steps = _take(options.overrides, "steps")
    seeds = _seeds(_take(options.overrides, "seeds"))
    arguments = Arguments(options)
    chosen = grid.load(options.grid)
    user = dict(arguments.overrides)
    require("seed" not in user, "seed=: expected seeds=0,1,2, the seeds of the pilot")
    pairs = comparisons(chosen, arguments.scale, user)
    if options.source is not None:
        require(not typed_steps, f"steps={typed_steps} with --from: a pilot is not trained then")
        folder = Path(options.source)
        if folder.name.endswith(".tar.gz"):
            folder = unpack(folder, PUBLISHED)
    else:
        folder = pilot_root(arguments.root, chosen)
        default = max(LOGGED_POINTS, round(max(pair.full_steps for pair in pairs) * _PILOT_SHARE))
        steps = whole(typed_steps, "steps=", SweepError) if typed_steps else default
        require(
            steps >= LOGGED_POINTS,
            f"steps={steps}: expected at least {LOGGED_POINTS}, as many as losses are logged",
        )
        pairs = logged_on_the_way(pairs, steps)
        pilot = pilot_grid(chosen, pairs, steps, seeds)
        user = {"paths.runs": [Typed(str(folder))]}
        plan = make_plan(pilot, arguments.scale, user)
        sweep = Sweep(plan.root, pilot.name)
        failed = launch(sweep, pilot, plan.runs, arguments.resources("debug"))
        if failed:
            return 1
        if not all(run.finished for run in plan.runs):
            print("the pilot is not done; type the same command again when it is")
            return 0
    print_predictions(pairs, folder, seeds)
    return 0


def print_predictions(pairs: Sequence[Comparison], folder: Path, seeds: Sequence[int]) -> None:
    """Print the prediction of every comparison from the runs in a folder.

    Raises:
        SweepError: No comparison has a pair of runs there.
    """
    curves = _curves(folder)
    lines = []
    pair_count = 0
    for pair in pairs:
        lines.append(pair.label)
        dense, routed = _select(pair, curves, seeds)
        pair_count += len(dense)
        for line in _predict(pair, dense, routed):
            lines.append(f"  {line}")
    require(
        pair_count,
        f"{folder}: no pair of runs, dense and routed, of this grid with seeds "
        f"{', '.join(map(str, seeds))} and held-out losses logged at two steps; eval.metrics and "
        "eval.every are part of a run: type those that it was trained with",
    )
    print("\n".join(lines))


def _predict(
    pair: Comparison, dense: dict[int, pd.DataFrame], routed: dict[int, pd.DataFrame]
) -> list[str]:
    if not dense:
        return ["no pair of runs with losses that were logged on the way"]
    penalties = predict.penalties_by_step(dense, routed)
    try:
        fit = predict.fit_penalty(penalties)
    except SweepError as error:
        return [str(error)]
    last = next(iter(dense.values())).iloc[-1]
    lines = predict.describe_fit(fit, pair.full_steps, float(last["macs"] / last["step"]))
    return [*lines, *predict.describe_check(predict.check_fit(penalties))]


def _curves(folder: Path) -> dict[str, pd.DataFrame]:
    """Return the held-out losses of runs by the name of their folder, where two were logged."""
    scores = analysis.scores(folder)
    if scores.empty:
        return {}
    scores = scores[scores["own"].astype(bool)].dropna(subset=["step", "macs"])
    curves = {}
    for path, curve in curves_by_run(scores, "path").items():
        if len(curve) >= 2:
            curves[Path(path).name] = curve
    return curves


def _select(
    pair: Comparison, curves: Mapping[str, pd.DataFrame], seeds: Sequence[int]
) -> tuple[dict[int, pd.DataFrame], dict[int, pd.DataFrame]]:
    """Return the curves of both arms by seed, of the seeds that both have."""
    dense, routed = {}, {}
    for seed in seeds:
        dense_name, routed_name = pair.names(seed)
        dense_curve, routed_curve = _longest(curves, dense_name), _longest(curves, routed_name)
        if dense_curve is not None and routed_curve is not None:
            dense[seed], routed[seed] = dense_curve, routed_curve
    return dense, routed


def _longest(curves: Mapping[str, pd.DataFrame], name: str) -> pd.DataFrame | None:
    """Return the curve of a run, or of a longer copy of it, such as NAME-6000."""
    pattern = re.compile(re.escape(name) + r"(-\d+)?")
    matching = [curve for folder, curve in curves.items() if pattern.fullmatch(folder)]
    return max(matching, key=lambda curve: (curve["step"].iloc[-1], len(curve)), default=None)


def _take(overrides: list[str], key: str) -> str:
    """Remove `key=value` from typed arguments and return its value; "" if it is not there."""
    typed = [text for text in overrides if text.startswith(f"{key}=")]
    require(len(typed) <= 1, f"{key} is given twice")
    if not typed:
        return ""
    overrides.remove(typed[0])
    value = typed[0].partition("=")[2]
    require(value, f"{key}=: expected a value")
    return value


def _seeds(text: str) -> tuple[int, ...]:
    if not text:
        return _SEEDS
    seeds = tuple(whole(seed, "seeds=", SweepError) for seed in text.split(","))
    require(len(set(seeds)) == len(seeds), f"seeds={text}: expected different seeds")
    return seeds
