"""Score any checkpoint, folder of pictures or .npz: python experiments/evaluate.py RUN (--help)."""

from __future__ import annotations

import sys
from pathlib import Path

# The repository root instead of this script's folder, so that `experiments` can be imported.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from experiments.runtime.errors import require_packages

    require_packages()

import argparse
from collections.abc import Callable

from experiments.options.evaluation import FEATURES, METRICS
from experiments.runtime.command import home_path as _path
from experiments.runtime.command import run_command
from experiments.runtime.console import loading
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

Scores are written to RUN/evaluations/*.json, not to the run's scores.jsonl.
Re-running an interrupted command resumes it. torchrun splits the samples over
processes.
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
        help="guidance and its options, one evaluation for each (default: the run's)",
    )
    add(
        "--sampler",
        metavar="NAME[,KEY=VALUE...]",
        help="sampler and its options (default: the run's)",
    )
    add("--steps", type=int, metavar="N", help="steps of the sampler")
    _add_scoring(add)
    return p


def _add_scoring(add: Callable[..., object]) -> None:
    """Add the options of metrics, references and output."""
    add("--metrics", nargs="+", metavar="M", help=f"of {', '.join(METRICS)}")
    add("--features", nargs="+", metavar="F", help=f"of {', '.join(FEATURES)}")
    add("--reference", metavar="FILE", help="statistics (.npz) instead of the held-out split")
    add("--data", metavar="NAME", help="for images: compare with this data set's held-out split")
    add("--split", help="split that --write-reference takes of a run's data")
    add(
        "--write-reference",
        type=_path,
        metavar="FILE",
        help="write statistics of real images instead of scoring",
    )
    add(
        "--write-samples",
        type=_path,
        metavar="FILE",
        help="also write the samples as an .npz for ADM's evaluator",
    )
    add(
        "--inception-weights",
        metavar="FILE",
        help="torch-fidelity's weights, if there is no network",
    )
    add("--dinov2-weights", metavar="FILE", help="timm's weights, if there is no network")
    add(
        "--cache",
        type=_path,
        metavar="DIR",
        help="folder of trained classifiers, weights and references",
    )
    add("--out", type=_path, metavar="DIR", help="folder of the record (default: RUN/evaluations)")
    add(
        "--keep-samples",
        action="store_true",
        default=None,
        help="keep the samples, from which a later command resumes",
    )


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
    with loading():
        from experiments.evaluation.evaluate_command import evaluate
    return evaluate(arguments)


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
