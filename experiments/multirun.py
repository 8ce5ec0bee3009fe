"""Hydra's own sweep, `-m`: for a handful of runs; `python -m sweeps` is the way for more.

Hydra splits the commas and launches; each job composes its configuration as a single run does, so
folders, hashes and resume are the same. Limits of Hydra's Slurm launcher (it waits, and calls a
failed job completed) are in docs/cluster.md.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from experiments.config import help_text
from experiments.config.compose import load, options_of, readable, register_resolvers
from experiments.config.schema import CONF, GROUPS, Config
from experiments.runtime.command import Interrupted, print_error
from experiments.training import run_folder
from routing.errors import UserError
from routing.parsing import check_word

_sweeping = 0  # the process whose jobs run one after another in it
_failed: list[str] = []
_MOST = 10_000  # runs one after another; each is composed and checked before the first


class _Stop(BaseException):
    """A stop that was asked for; Hydra would take an Exception for the failure of one job."""

    def __init__(self, asked: Interrupted) -> None:
        super().__init__(str(asked))
        self.asked = asked


def job(cfg: object) -> str:
    """Train one job of a Hydra sweep (dry=true: print it); return its run folder."""
    from hydra.core.hydra_config import HydraConfig

    overrides = [text for text in HydraConfig.get().overrides.task if not text.startswith("hydra")]
    here = os.getpid() == _sweeping
    try:
        config = load(overrides)
        if config.dry:
            help_text.dry_run(config)
            return ""
        from experiments.training.session import train

        return str(train(config))
    except Interrupted as asked:
        if here:
            raise _Stop(asked) from None
        raise
    except UserError as error:
        # One run that diverged is no reason to give up the others; Hydra would print a traceback.
        if here:
            print_error(error)
            _failed.append(" ".join(overrides))
            return ""
        raise


def _check(words: list[str]) -> list[Config]:
    """Refuse what no job may have; return the runs, or [] where Hydra alone knows them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    if any(word.startswith("hydra/sweeper") for word in words):
        return []
    own = [word for word in words if not word.startswith(("-", "hydra"))]
    for word in own:
        check_word(word)
    try:
        parsed = OverridesParser.create().parse_overrides(own)
        count = math.prod(_values(one) for one in parsed)
        if not 1 <= count <= _MOST:
            raise UserError(f"-m: {' '.join(own)} makes {count:,} runs; expected 1 to {_MOST:,}")
        if any(isinstance(one.value(), Glob) for one in parsed):
            return []  # the names of a group's files, which Hydra puts in
        jobs = [job for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]
    except (HydraException, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split("\n")[0].split())
        raise UserError(
            f"-m cannot read {' '.join(own)} ({reason}); values are separated by commas, as in "
            "route=none,2-8, or made by range(0,3)"
        ) from None
    return [load(list(overrides)) for overrides in jobs]


def _summed_up(runs: list[Config]) -> str:
    """Return what the sweep did, from the run folders: a launcher's jobs print elsewhere."""
    left = [
        " or ".join(one.name for one in either)
        for either in (run.settled() for run in runs)
        if not any(run_folder.finished(one.folder, one.train.steps) for one in either)
    ]
    root = runs[0].paths.runs
    text = f"-m: {len(runs) - len(left)} of {len(runs)} runs are done, in {root}"
    if left:
        some = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
        text += f"; not done: {some} (their logs are below {root}/.multirun)"
    return text


def _values(override: Any) -> int:
    """Return how many values an override sweeps over, without making them."""
    from hydra.core.override_parser.types import ChoiceSweep, Glob, RangeSweep

    value = override.value()
    if isinstance(value, RangeSweep):
        start, stop, step = float(value.start or 0), float(value.stop or 0), float(value.step)
        return max(0, math.ceil((stop - start) / step)) if step else 0
    if isinstance(value, Glob):
        group = override.key_or_group
        return len(value.filter(options_of(group))) if group in GROUPS else 0
    return len(value.list) if isinstance(value, ChoiceSweep) else 1


def multirun(argv: list[str]) -> int:
    """Run Hydra's `-m` with these arguments.

    Raises:
        UserError: A job that cannot run or did not end well; Python 3.14, whose argparse Hydra
            1.3.8's decorator does not pass.
        Interrupted: A signal asked for a stop; the jobs after this one do not start.
    """
    global _sweeping
    import hydra

    if sys.version_info >= (3, 14) and hydra.__version__.startswith("1.3"):
        raise UserError(
            f"-m needs Hydra 1.4 on Python {sys.version_info.major}.{sys.version_info.minor} "
            f"(hydra-core {hydra.__version__} "
            "is installed): python -m sweeps launch does the same here"
        )
    # Flags and Hydra's own words as they are.
    argv = [readable(w) if "=" in w and not w.startswith(("-", "hydra")) else w for w in argv]
    runs = _check(argv)
    if not any(word.startswith("hydra.sweep.dir=") for word in argv):
        # Hydra's own record of the sweep goes beside the runs, not into the current folder.
        argv = [*argv, "hydra.sweep.dir=${runs:}/.multirun/${now:%Y-%m-%d_%H-%M-%S}"]
    _failed.clear()
    held, sys.argv, _sweeping = sys.argv, [sys.argv[0], *argv], os.getpid()
    try:
        register_resolvers()
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except _Stop as stop:
        raise stop.asked from None
    except SystemExit as end:
        if end.code:
            raise UserError("-m: Hydra or one of these runs failed; it says why above") from None
    finally:
        sys.argv = held
        if runs and not runs[0].dry:
            print(_summed_up(runs), flush=True)
    if _failed:
        raise UserError(f"{len(_failed)} of the runs did not end well: {'; '.join(_failed)}")
    return 0
