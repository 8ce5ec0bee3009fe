"""Score any checkpoint, folder of pictures or .npz: python experiments/evaluate.py RUN (--help)."""

from __future__ import annotations

import sys
from pathlib import Path

# The repository root, not this script's folder: `experiments` must be found as a package.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from experiments.runtime.errors import require_packages

    require_packages()

import argparse

from experiments.options.evaluation import FEATURES, METRICS
from experiments.runtime.command import home_path as _path
from experiments.runtime.command import run_command
from experiments.runtime.parser import Parser

EXAMPLES = """\
examples:
  python experiments/evaluate.py runs/NAME --samples 1000
  python experiments/evaluate.py RUN --step 400 --guidance none cfg,scale=2
  python experiments/evaluate.py RUN --features inception-adm --metrics fd is \\
      --reference VIRTUAL_imagenet256_labeled.npz --samples 50000
  python experiments/evaluate.py RUN data.path=LATENTS --samples 5000
  python experiments/evaluate.py samples.npz --reference real.npz
  python experiments/evaluate.py pictures/ --write-reference real.npz

Scores go to RUN/evaluations/*.json and never to the run's own record. A command
that was cut short goes on where it was when it is given again. torchrun shares
the samples over processes.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = Parser(
        prog="python experiments/evaluate.py",
        usage="%(prog)s source [group.key=value ...] [options]",
        description="Sample from a checkpoint and score the samples, or score images.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add("source", help="run folder, model.safetensors, folder of pictures, or .npz with arr_0")
    add("changes", nargs="*", metavar="group.key=value", help="of sampler, guidance, data")
    add("--step", type=int, help="checkpoint of this step (default: the exported weights)")
    add("--weights", choices=("ema", "raw"), help="which weights (default: ema)")
    add("--samples", type=int, metavar="N", help="number of samples (default: the run's)")
    add("--seed", type=int, help="seed of the first sample (default: the run's)")
    add("--batch", type=int, metavar="B", help="images per sampling batch (default: the run's)")
    add(
        "--guidance",
        nargs="+",
        metavar="NAME[,KEY=VALUE...]",
        help="how to guide, one evaluation for each (default: the run's)",
    )
    add("--sampler", metavar="NAME[,KEY=VALUE...]", help="how to walk (default: the run's)")
    add("--steps", type=int, metavar="N", help="steps of the sampler")
    add("--metrics", nargs="+", metavar="M", help=f"of {', '.join(METRICS)}")
    add("--features", nargs="+", metavar="F", help=f"of {', '.join(FEATURES)}")
    add("--reference", metavar="FILE", help="statistics (.npz) instead of the held-out split")
    add("--data", metavar="NAME", help="for images: compare with this data set's held-out split")
    add("--split", help="split that --write-reference takes of a run's data")
    add(
        "--write-reference",
        type=_path,
        metavar="FILE",
        help="write statistics of real images, score nothing",
    )
    add(
        "--write-samples",
        type=_path,
        metavar="FILE",
        help="also write the samples as ADM's evaluator reads",
    )
    add("--inception-weights", metavar="FILE", help="torch-fidelity's weights, where offline")
    add("--dinov2-weights", metavar="FILE", help="timm's weights, where offline")
    add("--cache", type=_path, metavar="DIR", help="trained classifiers, weights, references")
    add("--out", type=_path, metavar="DIR", help="where the record goes (default: RUN/evaluations)")
    add("--keep-samples", action="store_true", default=None, help="keep what resuming needs")
    return p


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return its exit code."""
    arguments = parser().parse_intermixed_args(argv)
    # argparse adds overrides that follow a list to this list.
    for flag in ("guidance", "metrics", "features"):
        values = []
        for text in getattr(arguments, flag) or ():
            if "=" in text and "." in text.partition("=")[0]:
                arguments.changes.append(text)
            else:
                values.append(text)
        if getattr(arguments, flag) is not None:
            setattr(arguments, flag, values)
    from experiments.evaluation.evaluate_command import evaluate

    return evaluate(arguments)


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
