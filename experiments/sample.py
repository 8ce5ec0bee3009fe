"""Make images: python experiments/sample.py RUN --classes 3,7 --seeds 0-63 (see --help)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# The repository root instead of this script's folder, so that `experiments` can be imported.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from experiments.runtime.errors import require_packages

    require_packages()

from experiments.options.guidance import GUIDANCE
from experiments.options.sampler import SAMPLERS
from experiments.runtime.command import run_command
from experiments.runtime.console import loading
from experiments.runtime.parser import Parser

EXAMPLES = """\
examples:
  python experiments/sample.py runs/NAME              64 images, as the run samples
  python experiments/sample.py OUT.safetensors --classes 3,7 --scale 2
  python experiments/sample.py RUN --guidance routed guidance.weak=0.8
  python experiments/sample.py RUN --guidance autoguidance \\
      guidance.checkpoint=RUN@300
  python experiments/sample.py RUN --seeds 0-49999 --pngs 0 --out fid50k

Re-running a command resumes it. Options of samplers and guidance:
python experiments/run.py --help sampler, --help guidance.
Several GPUs: accelerate launch experiments/sample.py ...
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = Parser(
        prog="python experiments/sample.py",
        description="Make images with a trained model: PNGs, a grid, an npz for ADM's evaluator.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add("source", metavar="RUN", help="a run folder, or an exported model.safetensors alone")
    add("changes", nargs="*", metavar="group.key=value", help="options of sampler, guidance, data")
    add("--classes", help="3,7 or 0-9 or names or all (default: drawn from each seed)")
    add("--captions", help="for text models: separated by ; or a .txt file, one per line")
    add("--seeds", default="0-63", help="one image per seed and class (default: 0-63)")
    named = "NAME[,KEY=VALUE...]"
    add(
        "--guidance",
        metavar=named,
        help=f"{', '.join(sorted(GUIDANCE))}, and options (default: the run's)",
    )
    add("--scale", type=float, help="guidance scale; 1 is none (default: the guidance's)")
    add(
        "--sampler",
        metavar=named,
        help=f"{', '.join(sorted(SAMPLERS))}, and options (default: the run's)",
    )
    add("--steps", type=int, help="sampling steps (default: the run's)")
    add("--out", default="samples", help="folder to write to (default: samples)")
    add("--pngs", type=int, default=1000, help="largest number of PNGs to write (default: 1000)")
    add("--batch", type=int, default=64, help="images at once (default: 64)")
    add("--step", type=int, help="a checkpoint of the run (default: its exported weights)")
    add("--weights", default="ema", help="ema or raw (default: ema)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    return p


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return its exit code."""
    args = parser().parse_intermixed_args(argv)
    with loading():
        from experiments.evaluation.sample_command import sample
    return sample(args)


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
