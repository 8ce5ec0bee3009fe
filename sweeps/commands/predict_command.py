"""`predict`: train short pairs of a grid, or read finished ones, and predict what routes save."""

import argparse
from pathlib import Path

from backbones.parsing import whole
from routing.errors import require
from sweeps import SweepError
from sweeps.commands.arguments import Arguments
from sweeps.plan import grid
from sweeps.plan.plan import make_plan
from sweeps.prediction.pilot import (
    LOGGED_POINTS,
    comparisons,
    logged_on_the_way,
    pilot_grid,
    pilot_root,
)
from sweeps.prediction.predictions import print_predictions
from sweeps.store.overrides import Typed
from sweeps.submission.launch import launch

# Of a full run's steps, unless steps= is typed.
_PILOT_SHARE = 0.1
_SEEDS = (0, 1, 2)


def predict_command(options: argparse.Namespace) -> int:
    """Run `predict`: return 1 if a pilot run failed in this process."""
    typed_steps = _take(options.overrides, "steps")
    seeds = _seeds(_take(options.overrides, "seeds"))
    arguments = Arguments(options)
    chosen = grid.load(options.grid)
    user = dict(arguments.overrides)
    require("seed" not in user, "seed=: expected seeds=0,1,2, the seeds of the pilot", SweepError)
    pairs = comparisons(chosen, arguments.scale, user)
    if options.source is not None:
        require(
            not typed_steps,
            f"steps={typed_steps} with --from: a pilot is not trained then",
            SweepError,
        )
        source = Path(options.source)
    else:
        source = pilot_root(arguments.root, chosen)
        default = max(LOGGED_POINTS, round(max(pair.full_steps for pair in pairs) * _PILOT_SHARE))
        steps = whole(typed_steps, "steps=", SweepError) if typed_steps else default
        require(
            steps >= LOGGED_POINTS,
            f"steps={steps}: expected at least {LOGGED_POINTS}, as many as losses are logged",
            SweepError,
        )
        pairs = logged_on_the_way(pairs, steps)
        pilot = pilot_grid(chosen, pairs, steps, seeds)
        user = {"paths.runs": [Typed(str(source))]}
        plan = make_plan(pilot, arguments.scale, user)
        failed = launch(plan.sweep, pilot, plan.runs, arguments.resources("debug"))
        if failed:
            return 1
        if not all(run.finished for run in plan.runs):
            print("the pilot is still running; type the same command again when it has finished")
            return 0
    print_predictions(pairs, source, seeds)
    return 0


def _take(overrides: list[str], key: str) -> str:
    """Remove `key=value` from typed arguments and return its value; "" if it is not there."""
    typed = [text for text in overrides if text.startswith(f"{key}=")]
    require(len(typed) <= 1, f"{key} is given twice", SweepError)
    if not typed:
        return ""
    overrides.remove(typed[0])
    value = typed[0].partition("=")[2]
    require(value, f"{key}=: expected a value", SweepError)
    return value


def _seeds(text: str) -> tuple[int, ...]:
    if not text:
        return _SEEDS
    seeds = tuple(whole(seed, "seeds=", SweepError) for seed in text.split(","))
    require(len(set(seeds)) == len(seeds), f"seeds={text}: expected different seeds", SweepError)
    return seeds
