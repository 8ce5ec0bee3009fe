"""Ranges and names of a configuration, checked before anything starts (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.config.typed import ConfigError
from routing.errors import suggest

if TYPE_CHECKING:
    from experiments.config.schema import Config, TrainConfig

TASKS = ("class", "text", "none")
TRACKERS = ("none", "tensorboard", "wandb", "trackio")
# The OpenMP runtime ends the process where it cannot start as many as it is asked for.
MOST_THREADS = 1024
GROUPED = ("backbone", "data", "objective", "sampler", "guidance", "eval")


def _in(config: Any, key: str, options: Sequence[str], where: str) -> None:
    value = getattr(config, key)
    if value not in options:
        raise ConfigError(
            f"{where}{key}={value}: expected one of "
            f"{' '.join(options)}{suggest(str(value), options)}"
        )


def _at_least(config: Any, key: str, least: float, where: str, *, above: bool = False) -> None:
    value = getattr(config, key)
    if value is None:
        return
    if not (value > least if above else value >= least) or value != value or value == float("inf"):
        raise ConfigError(
            f"{where}{key}={value}: expected a number {'above' if above else 'of at least'} "
            f"{least:g}"
        )


def _share(config: Any, key: str, where: str, *, one: bool = True) -> None:
    value = getattr(config, key)
    if not 0 <= value <= 1 or (value == 1 and not one):
        raise ConfigError(
            f"{where}{key}={value}: expected a share between 0 and 1{'' if one else ', below 1'}"
        )


def check(config: Config) -> None:
    """Refuse what cannot be run, with one sentence (route against depth, ranges, names).

    Raises:
        ConfigError: See the message.
    """
    _in(config, "task", TASKS, "")
    _in(config, "log", TRACKERS, "")
    if not 0 <= config.seed < 2**31:
        raise ConfigError(f"seed={config.seed}: expected a whole number from 0 to {2**31 - 1}")
    if not config.paths.runs.strip():
        raise ConfigError("paths.runs= is empty: expected the folder for the runs, such as runs")
    _check_train(config.train)
    _at_least(config.routing, "block", 1, "routing.")
    for group in ("backbone", "data", "objective", "sampler", "guidance", "eval"):
        if "name" not in getattr(config, group):
            raise ConfigError(f"missing key {group}.name: choose one with {group}=NAME")
    from experiments.config.groups import check_groups

    check_groups(config)


def _check_train(train: TrainConfig) -> None:
    for key in ("steps", "batch", "log_every", "save_every", "keep"):
        _at_least(train, key, 1, "train.")
    for key in (
        "warmup",
        "weight_decay",
        "keep_every",
        "sample_every",
        "max_bad_steps",
        "rollback",
        "mae_weight",
        "align_weight",
    ):
        _at_least(train, key, 0, "train.")
    # Samples are counted in 64 bits: batch times steps must fit, with room.
    for key in ("steps", "batch"):
        if getattr(train, key) > 10**9:
            raise ConfigError(
                f"train.{key}={getattr(train, key)}: expected at most {10**9:,}".replace(",", " ")
            )
    for key in ("lr", "eps", "clip"):
        _at_least(train, key, 0, "train.", above=True)
    _share(train, "ema", "train.", one=False)
    _share(train, "label_drop", "train.")
    _in(train, "precision", ("fp32", "bf16"), "train.")
    _in(train, "schedule", ("constant", "cosine"), "train.")
    _in(train, "compile", ("none", "blocks"), "train.")
    _in(train, "loss", ("plain", "ensemble"), "train.")
    from experiments.training.routes import ENCODERS

    _in(train, "encoder", ("none", *ENCODERS), "train.")
    if len(train.betas) != 2 or not all(0 <= beta < 1 for beta in train.betas):
        raise ConfigError(
            f"train.betas={list(train.betas)}: expected two numbers from 0 to below 1, such as "
            "[0.9,0.999]"
        )
    if train.threads is not None and not 1 <= train.threads <= MOST_THREADS:
        raise ConfigError(
            f"train.threads={train.threads}: expected null or a number of at least 1 and at most "
            f"{MOST_THREADS}"
        )
    micro = train.micro_batch
    if isinstance(micro, str) and micro != "auto" or isinstance(micro, int) and micro < 1:
        raise ConfigError(
            f"train.micro_batch={micro}: expected null, auto or a whole number of at least 1"
        )
