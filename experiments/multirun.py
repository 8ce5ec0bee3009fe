"""Hydra's own sweep, `-m`: for a handful of runs; `python -m sweeps` is the way for more.

Hydra splits the commas and launches; each job composes its configuration as a single run does, so
folders, hashes and resume are the same. Limits of Hydra's Slurm launcher (it waits, and calls a
failed job completed) are in docs/cluster.md.
"""

from __future__ import annotations

import sys

from experiments.config import CONF
from routing.errors import UserError


def job(cfg: object) -> str:
    """Train one job of a Hydra sweep (dry=true: print it); return its run folder."""
    from hydra.core.hydra_config import HydraConfig

    from experiments import usage
    from experiments.config import load

    overrides = [text for text in HydraConfig.get().overrides.task if not text.startswith("hydra")]
    config = load(overrides)
    if config.dry:
        print(usage.dry_text(config))
        return ""
    from experiments.train import train

    return str(train(config))


def multirun(argv: list[str]) -> int:
    """Run Hydra's `-m` with these arguments.

    Raises:
        UserError: On Python 3.14, whose argparse Hydra 1.3.8's decorator does not pass.
    """
    import hydra

    if sys.version_info >= (3, 14) and hydra.__version__.startswith("1.3"):
        raise UserError(
            f"-m needs Hydra 1.4 on Python {sys.version_info.major}.{sys.version_info.minor} "
            f"(hydra-core {hydra.__version__} "
            "is installed): python -m sweeps launch does the same here"
        )
    held, sys.argv = sys.argv, [sys.argv[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    finally:
        sys.argv = held
    return 0
