"""`-m`: a handful of runs, one after another here or by a launcher of Hydra's.

Commas, ranges and globs are Hydra's; each run composes its configuration as a single one does, so
folders, hashes and resume are the same. `python -m sweeps` is the way for more. Limits of Hydra's
Slurm launcher (it waits, and calls a failed job completed) are in docs/cluster.md.
"""

from __future__ import annotations

import itertools
import math
import sys
import traceback

from backbones.parsing import check_word
from experiments.config.compose import load, quote, register
from experiments.config.groups import CONF
from experiments.config.schema import Config
from experiments.dry_run import dry_run
from experiments.runtime import run_folder
from experiments.runtime.errors import EXIT_CODES, Interrupted, print_error, sentence
from experiments.runtime.process_group import process_group
from routing.errors import UserError

_MOST = 10_000  # runs one after another; each is composed and checked before the first


def run_one(config: Config) -> None:
    """Train one run, or print it (dry=true)."""
    if config.dry:
        dry_run(config)
        return
    from experiments.training.session import train

    train(config)


def job(cfg: object) -> None:
    """Train one job of a launcher of Hydra's (dry=true: print it)."""
    from hydra.core.hydra_config import HydraConfig

    words = HydraConfig.get().overrides.task
    try:
        run_one(load([word for word in words if not word.startswith("hydra")]))
    except Interrupted as stop:  # for Hydra an exception is one failed job: the next would start
        raise SystemExit(EXIT_CODES[stop.reason]) from None


def _split(words: list[str]) -> list[list[str]]:
    """Return the overrides of each run, as Hydra reads these."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for word in words:
        check_word(word)
    lists = {}
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            for one in OverridesParser.create(loader).parse_overrides(words):
                key = one.get_key_element()
                if one.is_discrete_sweep():
                    values = list(itertools.islice(one.sweep_string_iterator(), _MOST + 1))
                else:  # `ValueError` for an interval, which a sweeper samples
                    values = [one.get_value_element_as_str()]
                lists[key] = [f"{key}={value}" for value in values]
    except (HydraException, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise UserError(
            f"-m cannot read {' '.join(words)} ({reason}); values are separated by commas, as in "
            "route=none,2-8, or made by range(0,3)"
        ) from None
    if not 1 <= math.prod(map(len, lists.values())) <= _MOST:
        raise UserError(f"-m: {' '.join(words)} makes no run, or more than {_MOST:,}")
    return [list(one) for one in itertools.product(*lists.values())]


def _summed_up(runs: list[Config]) -> str:
    """Return what the sweep did, from the run folders: a launcher's jobs print elsewhere."""
    left = [run.name for run in runs if not run_folder.finished(run.folder, run.train.steps)]
    text = f"-m: {len(runs) - len(left)} of {len(runs)} runs are done, in {runs[0].paths.runs}"
    return f"{text}; not done: {', '.join(left[:4])}{', ...' * (len(left) > 4)}" if left else text


def _launched(words: list[str]) -> None:
    """Let Hydra run the jobs, through the launcher and the sweeper that its words name."""
    import hydra

    if sys.version_info >= (3, 14) and hydra.__version__.startswith("1.3"):
        raise UserError(
            f"Hydra's launchers need Hydra 1.4 on Python 3.14 ({hydra.__version__} is installed): "
            "python -m sweeps launch does the same here"
        )
    if not any(word.startswith("hydra.sweep.dir=") for word in words):
        # Hydra's own record of the sweep goes beside the runs, not into the current folder.
        words = [*words, "hydra.sweep.dir=${runs:}/.multirun/${now:%Y-%m-%d_%H-%M-%S}"]
    held, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        register()
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except SystemExit as end:
        if end.code in EXIT_CODES.values():
            raise
        if end.code:
            raise UserError("-m: Hydra or one of these runs failed; it says why above") from None
    finally:
        sys.argv = held


def multirun(argv: list[str]) -> int:
    """Run each of the runs that these arguments make; one that fails leaves the others.

    Raises:
        UserError: A run that cannot start or did not end well.
        Interrupted: A signal asked for a stop; the runs after this one do not start.
    """
    # Flags and Hydra's own words as they are.
    theirs = [word for word in argv if word.startswith(("-", "hydra"))]
    own = [quote(word) if "=" in word else word for word in argv if word not in theirs]
    sampled = any(word.startswith("hydra/sweeper") for word in theirs)  # it alone knows the runs
    runs, failed = [] if sampled else [load(words) for words in _split(own)], []
    try:
        if {*theirs} - {"-m", "--multirun"}:
            _launched([*theirs, *own])
            return 0
        for config in runs:
            try:
                run_one(config)
            except Exception as error:  # no reason to give up the others, but for a process of
                # several: those beside it may wait for it in this run, and end as it does.
                if isinstance(error, Interrupted) or process_group().world_size > 1:
                    raise
                if sentence(error) is None:
                    traceback.print_exc()
                print_error(sentence(error) or f"{config.name}: {type(error).__name__}")
                failed.append(config.name)
    finally:
        if runs and not runs[0].dry and process_group().rank == 0:
            print(_summed_up(runs), flush=True)
    if failed:
        raise UserError(f"{len(failed)} of the runs did not end well: {'; '.join(failed)}")
    return 0
