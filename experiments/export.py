"""Write EMA weights to one file: python experiments/export.py RUN OUT.safetensors (see --help)."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

# The repository root instead of this script's folder, so that `experiments` can be imported.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from experiments.runtime.errors import require_packages

    require_packages()

from experiments.options.training import PathsOptions
from experiments.runtime.command import run_command
from experiments.runtime.parser import Parser
from routing.errors import require


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = Parser(
        prog="python experiments/export.py",
        description="Write EMA weights that sample.py, from_pretrained and the analysis open.",
    )
    p.add_argument("source", metavar="RUN", help="a run folder, or an exported file")
    p.add_argument("out", metavar="OUT.safetensors", type=Path, help="the file to write")
    p.add_argument("--half", action="store_true", help="store float16, half the size")
    return p


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return its exit code."""
    args = parser().parse_args(argv)
    require(
        args.out.suffix == ".safetensors", f"{args.out}: expected a name that ends in .safetensors"
    )

    from experiments.evaluation import trained_model

    loaded = trained_model.load_model(args.source, device="cpu")
    weights, data = loaded.model.state_dict(), dict(loaded.config.composed["data"])
    if args.half:
        weights = {k: v.half() if v.is_floating_point() else v for k, v in weights.items()}
        for name, values in weights.items():
            require(values.isfinite().all(), f"{name} does not fit float16: leave out --half")
    # Paths of runs and data are private, and not part of the run's name.
    for key in loaded.config.data.location_keys:
        data.pop(key, None)
    config = dataclasses.replace(loaded.config.with_data(data), paths=PathsOptions())
    trained_model.export(args.out, loaded.model, weights, config, loaded.step, loaded.info)
    print(f"{args.out}  {args.out.stat().st_size / 1e6:.2f} MB, step {loaded.step}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
