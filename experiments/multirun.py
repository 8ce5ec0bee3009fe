"""`-m`: a few runs, one after another in this process, or started by one of Hydra's launchers.

Commas, ranges and globs have Hydra's syntax. Each run composes its configuration as a single run
does, so folders, hashes and resuming are the same. For more runs, use `python -m sweeps`. Limits of
Hydra's Slurm launcher (it waits, and reports a failed job as completed) are in docs/cluster.md.
"""

from __future__ import annotations

import itertools
import math
import sys
import traceback

from backbones.parsing import check_word
from experiments.config.compose import load, register
from experiments.config.groups import CONF
from experiments.config.overrides import quote
from experiments.config.schema import Config
from experiments.runtime import run_folder
from experiments.runtime.errors import EXIT_CODES, Interrupted, print_error, sentence
from experiments.runtime.process_group import process_group
from experiments.training.start import train_or_dry_run
from routing.errors import UserError, require

_MOST = 10_000  # runs one after another; each is composed and checked before the first


def job(cfg: object) -> None:
    """Train one job of a launcher of Hydra's (dry=true: print it)."""
    from hydra.core.hydra_config import HydraConfig

    words = HydraConfig.get().overrides.task
    try:
        train_or_dry_run(load([word for word in words if not word.startswith("hydra")]))
    except Interrupted as stop:
        # Hydra takes an exception for one failed job, and would start the next.
        raise SystemExit(EXIT_CODES[stop.reason]) from None


def _split(words: list[str]) -> list[list[str]]:
    """Return the overrides of each run, with values separated as Hydra separates them."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    keys = set[str]()
    for word in words:
        check_word(word)
        key = word.partition("=")[0]
        require(key not in keys, f"-m: {key} is given twice; expected {key}=A,B")
        keys.add(key)
    lists = {}
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            for override in OverridesParser.create(loader).parse_overrides(words):
                key = override.get_key_element()
                if override.is_discrete_sweep():
                    values = list(itertools.islice(override.sweep_string_iterator(), _MOST + 1))
                else:  # `ValueError` for an interval, which a sweeper samples
                    values = [override.get_value_element_as_str()]
                lists[key] = [f"{key}={value}" for value in values]
    except (HydraException, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise UserError(
            f"-m cannot read {' '.join(words)} ({reason}); values are separated by commas, as in "
            "route=none,2-8, or made by range(0,3)"
        ) from None
    count = math.prod(map(len, lists.values()))
    require(1 <= count <= _MOST, f"-m: {' '.join(words)} makes no run, or more than {_MOST:,}")
    return [list(overrides) for overrides in itertools.product(*lists.values())]


def _summary(runs: list[Config]) -> str:
    """Return how many runs are done, from their folders: a launcher's jobs print elsewhere."""
    unfinished = []
    for run in runs:
        if not run_folder.finished(run.folder, run.train.steps):
            unfinished.append(run.name)
    done = len(runs) - len(unfinished)
    text = f"-m: {done} of {len(runs)} runs are done, in {runs[0].paths.runs}"
    if unfinished:
        text += f"; not done: {', '.join(unfinished[:4])}"
    return f"{text}, ..." if len(unfinished) > 4 else text


def _launch(words: list[str]) -> None:
    """Let Hydra run the jobs, with the launcher and the sweeper that the arguments name."""
    import hydra

    require(
        sys.version_info < (3, 14) or not hydra.__version__.startswith("1.3"),
        f"Hydra's launchers need Hydra 1.4 on Python 3.14 ({hydra.__version__} is installed): "
        "python -m sweeps launch does the same here",
    )
    if not any(word.startswith("hydra.sweep.dir=") for word in words):
        # Hydra's own record of the sweep goes beside the runs, not into the current folder.
        words = [*words, "hydra.sweep.dir=${runs:}/.multirun/${now:%Y-%m-%d_%H-%M-%S}"]
    previous_argv, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        register()
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except SystemExit as end:
        if end.code in EXIT_CODES.values():
            raise
        require(not end.code, "-m: Hydra or one of these runs failed, see its message above")
    finally:
        sys.argv = previous_argv


def multirun(argv: list[str]) -> int:
    """Run every combination of the values in these arguments; a failed run does not end the others.

    Raises:
        UserError: A run cannot start, or failed.
        Interrupted: A signal requested a stop; the remaining runs do not start.
    """
    # Flags and keys of Hydra are passed on unchanged.
    hydra_words = [word for word in argv if word.startswith(("-", "hydra"))]
    overrides = []
    for word in argv:
        if word not in hydra_words:
            overrides.append(quote(word) if "=" in word else word)
    runs: list[Config] = []
    if not any(word.startswith("hydra/sweeper") for word in hydra_words):
        # Only a sweeper itself knows which runs it makes.
        runs = [load(words) for words in _split(overrides)]
    failed = []
    try:
        if {*hydra_words} - {"-m", "--multirun"}:
            _launch([*hydra_words, *overrides])
            return 0
        for config in runs:
            try:
                train_or_dry_run(config)
            except Exception as error:
                # The other runs still start, except in a process group: its other processes may
                # wait for this one inside the failed run.
                if isinstance(error, Interrupted) or process_group().world_size > 1:
                    raise
                if sentence(error) is None:
                    traceback.print_exc()
                print_error(sentence(error) or f"{config.name}: {type(error).__name__}")
                failed.append(config.name)
    finally:
        if runs and not runs[0].dry and process_group().rank == 0:
            print(_summary(runs), flush=True)
    require(not failed, f"{len(failed)} of the runs failed: {'; '.join(failed)}")
    return 0
