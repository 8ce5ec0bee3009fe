"""Predictions of a grid's comparisons from runs in a folder: their curves, paired by seed."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

import analysis
from analysis.comparison.step_penalty import curves_by_run, penalties_by_step
from analysis.runs.archives import unpacked
from routing.errors import require
from sweeps import SweepError
from sweeps.prediction import penalty_fit
from sweeps.prediction.pilot import PilotPair


def print_predictions(pairs: Sequence[PilotPair], source: Path, seeds: Sequence[int]) -> None:
    """Print the prediction of every comparison from the runs in a folder or an archive of records.

    Raises:
        SweepError: No comparison has a pair of runs there.
        AnalysisError: It is no archive of records.
    """
    curves = _curves(unpacked(source))
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
        f"{source}: no pair of runs, dense and routed, of this grid with seeds "
        f"{', '.join(map(str, seeds))} has held-out losses at two or more steps; type the "
        "eval.metrics= and eval.every= that the runs were trained with",
        SweepError,
    )
    print("\n".join(lines))


def _predict(
    pair: PilotPair, dense: dict[int, pd.DataFrame], routed: dict[int, pd.DataFrame]
) -> list[str]:
    if not dense:
        return ["no pair of runs with losses that were logged on the way"]
    penalties = penalties_by_step(dense, routed)
    try:
        fit = penalty_fit.fit_penalty(penalties)
    except SweepError as error:
        return [str(error)]
    last = next(iter(dense.values())).iloc[-1]
    lines = penalty_fit.describe_fit(fit, pair.full_steps, float(last["macs"] / last["step"]))
    return [*lines, *penalty_fit.describe_check(penalty_fit.check_fit(penalties))]


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
    pair: PilotPair, curves: Mapping[str, pd.DataFrame], seeds: Sequence[int]
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
