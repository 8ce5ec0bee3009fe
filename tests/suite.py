"""What the pinning tests import from the suite, in one place: moving a module is one edit here.

The pinning tests (`test_pinned_*.py`, `test_golden_*.py`, `test_surface.py`, `test_old_run.py`) hold the behaviour
that a restructuring must not change. They know configurations as plain values, runs as folders and tables as CSV
files; how those are made is known here alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from small import ROOT

import backbones
from analysis import command as analysis_command
from backbones.validation import describe, fields_of
from experiments.config import compose as hydra
from experiments.config.groups import GROUPS, option_classes
from experiments.config.groups import names as registered  # noqa: F401  that `group=` takes
from experiments.config.schema import Config
from experiments.diffusion import create_guidance, create_objective, create_sampler
from experiments.evaluation import generate
from experiments.options.training import PathsOptions, TrainOptions
from experiments.training import session
from routing.options import RoutingOptions

DATA = ROOT / "tests" / "data"
RESULTS = ROOT / "results"
# Packages whose `__all__` users import from.
PUBLIC = ("routing", "backbones", "experiments.diffusion", "experiments.data", "experiments.evaluation", "analysis")

create_model = backbones.create  # a backbone by the registry's name of its family


def config_from_values(values: Mapping[str, Any]) -> Config:
    """Return the checked configuration of plain values, as `config.yaml` and weights hold them."""
    return Config.from_dict(values)


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what Hydra composes from the command line, as plain nested values."""
    return hydra.compose(list(overrides))


def write_tables(runs: Path, names: Sequence[str], folder: Path) -> None:
    """Write tables of a folder of runs as `folder/NAME.csv`, as `python -m analysis tables` does."""
    assert analysis_command.main(["tables", str(runs), "--out", str(folder), "--all", "--only", *names]) == 0


def train(overrides: Sequence[str]) -> Path:
    """Train a run in this process, as `experiments/run.py` does; return its folder."""
    return session.train(hydra.load(overrides), quiet=True)


def pretrained(path: Path) -> Any:
    """Return a bundled model."""
    return backbones.Backbone.from_pretrained(str(path))


def sample(model: Any, objective: Any, sampler: Any, guidance: Any, seeds: Any, route: str, weak: Any = None) -> Any:
    """Return one image per seed, (n, C, H, W); each part is a name or a mapping with its options."""
    noise_path = create_objective(objective)
    steps, guide = create_sampler(sampler, noise_path), create_guidance(guidance, route=route)
    return generate(model, noise_path, steps, guide, seeds, batch=len(seeds), weak_model=weak)


def option_types(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what every key of a composed configuration may be, by dotted key."""
    classes: list[tuple[str, type]] = [("", Config), ("routing.", RoutingOptions), ("train.", TrainOptions), ("paths.", PathsOptions)]
    for group in GROUPS[:6]:
        classes += [(f"{group}.", options) for options in option_classes(group, values[group]["name"])]
    types = {}
    for prefix, options in classes:
        for key, field in fields_of(options).items():
            types[prefix + key] = describe(field.annotation)
    return types | {f"{group}.name": "text" for group in GROUPS[:6]}


def golden_numbers(path: Path, names: Iterable[str], measure: Callable[[str], Any]) -> dict[str, Any]:
    """Return the written numbers by case; REGENERATE=1 writes those of `names` first, `missing` those not there."""
    mode = os.environ.get("REGENERATE")
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not mode:
        return written
    lines = []
    for name in names:
        values = written[name] if mode == "missing" and name in written else measure(name)
        lines.append(f"{json.dumps(name)}: {json.dumps(values)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return dict(json.loads(path.read_text(encoding="utf-8")))
