"""Everything that the pinning tests import from the suite, in one place: moving a module is one edit here.

The pinning tests (`test_pinned_*.py`, `test_golden_*.py`, `test_surface.py`, `test_old_run.py`) hold the behaviour
that a restructuring must not change. They know configurations as plain values, runs as folders and tables as CSV
files; how those are made is known here alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from small import ROOT

DATA = ROOT / "tests" / "data"
RESULTS = ROOT / "results"


# --- configuration --------------------------------------------------------------------------------


def config_from_values(values: Mapping[str, Any]) -> Any:
    """Return the checked configuration of plain values, as `config.yaml` and weights hold them."""
    from experiments.config.schema import Config

    return Config.from_dict(values)


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what Hydra composes from the command line, as plain nested values."""
    from experiments.config.compose import compose as hydra_compose

    return hydra_compose(list(overrides))


# --- analysis -------------------------------------------------------------------------------------


def write_tables(runs: Path, names: Sequence[str], folder: Path) -> None:
    """Write tables of a folder of runs as `folder/NAME.csv`, as `python -m analysis tables` does."""
    from analysis.command import main

    words = ["tables", str(runs), "--out", str(folder), "--all", "--only", *names]
    assert main(words) == 0


# --- training and sampling ------------------------------------------------------------------------


def train(overrides: Sequence[str]) -> Path:
    """Train a run in this process, as `experiments/run.py` does; return its folder."""
    from experiments.config.compose import load
    from experiments.training.session import train as train_config

    return train_config(load(overrides), quiet=True)


def create_model(family: str, size: str, **options: Any) -> Any:
    """Return a backbone by the registry's name of its family."""
    import backbones

    return backbones.create(family, size, **options)


def pretrained(path: Path) -> Any:
    """Return a bundled model."""
    from backbones import Backbone

    return Backbone.from_pretrained(str(path))


def sample(model: Any, objective: Any, sampler: Any, guidance: Any, seeds: Any, route: str, weak: Any = None) -> Any:
    """Return one image per seed, (n, C, H, W); each part is a name or a mapping with its options."""
    from experiments.diffusion import create_guidance, create_objective, create_sampler
    from experiments.evaluation import generate

    noise_path = create_objective(objective)
    return generate(
        model,
        noise_path,
        create_sampler(sampler, noise_path),
        create_guidance(guidance, route=route),
        seeds,
        batch=len(seeds),
        weak_model=weak,
    )


def registered(group: str) -> list[str]:
    """Return the names that `group=` takes on the command line."""
    from experiments.config.groups import names

    return names(group)


def name_of(overrides: Sequence[str]) -> str:
    """Return the name of the run that a command line is of."""
    from experiments.config.compose import load

    return load(overrides).name


# --- options and public names ---------------------------------------------------------------------

# Packages whose `__all__` users import from.
PUBLIC = ("routing", "backbones", "experiments.diffusion", "experiments.data", "experiments.evaluation", "analysis")


def groups() -> tuple[str, ...]:
    """Return the keys that take a name on the command line: `backbone`, `data`, ..."""
    from experiments.config.groups import GROUPS

    return GROUPS


def option_types(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what every key of a composed configuration may be, by dotted key."""
    from backbones.validation import describe, fields_of
    from experiments.config.groups import option_classes
    from experiments.config.schema import Config
    from experiments.options.training import PathsOptions, TrainOptions
    from routing.options import RoutingOptions

    classes = [("", Config), ("routing.", RoutingOptions), ("train.", TrainOptions), ("paths.", PathsOptions)]
    for group in groups()[:6]:
        classes += [(f"{group}.", options) for options in option_classes(group, values[group]["name"])]
    types = {}
    for prefix, options in classes:
        for key, field in fields_of(options).items():
            types[prefix + key] = describe(field.annotation)
    types |= {f"{group}.name": "text" for group in groups()[:6]}
    return types
