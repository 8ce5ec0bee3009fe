"""Make images: python experiments/sample.py RUN --classes 3,7 --seeds 0-63 (see --help)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The repository root, not this script's folder: `experiments` is a package, from anywhere.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments.diffusion.diffusion_options import DiffusionError
from experiments.runtime.command import run_command
from experiments.sampling.request import (
    Request,
    chosen_options,
    names_of,
    parse_captions,
    parse_classes,
    parse_numbers,
    parse_overrides,
    plan_request,
)
from routing.errors import Parser

if TYPE_CHECKING:
    from experiments.training.checkpoint import TrainedModel

EXAMPLES = """\
examples:
  python experiments/sample.py runs/NAME                    64 images, as the run samples
  python experiments/sample.py model.safetensors --classes 3,7 --seeds 0-63 --guidance cfg --scale 2
  python experiments/sample.py runs/NAME --guidance routed guidance.strong=0.3 guidance.weak=0.8
  python experiments/sample.py runs/NAME --guidance autoguidance guidance.checkpoint=runs/NAME@300
  python experiments/sample.py runs/NAME --seeds 0-49999 --pngs 0 --out fid50k   (resumes)
  python experiments/sample.py runs/NAME sampler.reuse=4-9  blocks 4..9 at every 2nd step

Options of a sampler or a guidance are group.key=value; experiments/conf/sampler and
experiments/conf/guidance list them.
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
    p.add_argument(
        "source", metavar="RUN", help="a run folder, or an exported model.safetensors alone"
    )
    p.add_argument(
        "changes", nargs="*", metavar="group.key=value", help="options of sampler, guidance, data"
    )
    p.add_argument("--classes", help="3,7 or 0-9 or names or all (default: drawn from each seed)")
    p.add_argument(
        "--captions", help="for text models: separated by ; or a .txt file, one per line"
    )
    p.add_argument("--seeds", default="0-63", help="one image per seed and class (default: 0-63)")
    p.add_argument("--guidance", help=f"{names_of('guidance')} (default: the run's)")
    p.add_argument(
        "--scale", type=float, help="guidance scale; 1 is none (default: the guidance's)"
    )
    p.add_argument("--sampler", help=f"{names_of('sampler')} (default: the run's)")
    p.add_argument("--steps", type=int, help="sampling steps (default: the run's)")
    p.add_argument("--out", default="samples", help="folder to write to (default: samples)")
    p.add_argument(
        "--pngs", type=int, default=1000, help="write at most so many PNGs (default: 1000)"
    )
    p.add_argument("--batch", type=int, default=64, help="images at once (default: 64)")
    p.add_argument(
        "--step", type=int, help="a checkpoint of the run (default: its exported weights)"
    )
    p.add_argument("--weights", default="ema", help="ema or raw (default: ema)")
    p.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    return p


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return its exit code."""
    args = parser().parse_intermixed_args(argv)
    changes = parse_overrides(args.changes)
    seeds = parse_numbers(args.seeds, "--seeds")
    captions = parse_captions(args.captions) if args.captions else None
    if args.steps is not None:
        changes["sampler"]["steps"] = args.steps
    if args.scale is not None:
        changes["guidance"]["scale"] = args.scale
    if args.batch < 1:
        raise DiffusionError(f"--batch {args.batch}: 1 or more is needed")
    if args.pngs < 0:
        raise DiffusionError(f"--pngs {args.pngs}: 0 or more is needed")
    if args.classes is not None and not args.classes.strip():
        raise DiffusionError("--classes: class numbers or names such as 3,7, or all")
    # What can be refused without weights is refused before torch starts.
    for kind, name in (("sampler", args.sampler), ("guidance", args.guidance)):
        if name is not None:
            chosen_options(kind, {}, name, changes[kind])

    from experiments.training.checkpoint import load_model

    accelerator = processes(args.device)
    device = accelerator.device if accelerator else args.device
    loaded = load_model(args.source, step=args.step, weights=args.weights, device=device)
    names = loaded.info.get("class_names") or ()
    classes = args.classes and parse_classes(args.classes, loaded.model.num_classes, names)
    check_captions(loaded, captions)
    request = plan_request(seeds, classes or None, captions, names)
    return sample(args, loaded, changes, request, accelerator)


def processes(device: str | None) -> Any:
    """Return an Accelerator where several processes were started, else None."""
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    import torch
    from accelerate import Accelerator

    # Without the word, accelerate starts no process group where there is no GPU.
    return Accelerator(cpu=device == "cpu" or not torch.cuda.is_available())


def check_captions(loaded: TrainedModel, captions: list[str] | None) -> None:
    """Refuse captions without a text model, and a text model without captions."""
    if captions is None and loaded.model.prefix:
        raise DiffusionError("this model is conditioned on text; give --captions 'one; another'")
    if captions is not None and not loaded.model.prefix:
        raise DiffusionError("--captions: this model is not conditioned on text; leave them out")


def sample(
    args: argparse.Namespace,
    loaded: TrainedModel,
    changes: dict[str, dict[str, Any]],
    request: Request,
    accelerator: Any = None,
) -> int:
    """Sample what was asked for, going on where an earlier call was killed."""
    import torch

    from experiments.sampling import generate_shards
    from experiments.sampling.recipe import Setup

    config, main_process = loaded.config, accelerator is None or accelerator.is_main_process
    setup = Setup.make(
        loaded,
        chosen_options("sampler", config.sampler, args.sampler, changes["sampler"]),
        chosen_options("guidance", config.guidance, args.guidance, changes["guidance"]),
    )
    device = next(loaded.model.parameters()).device
    dataset = data_of(loaded, changes["data"], device)
    if not dataset.can_decode:
        raise DiffusionError(dataset.cannot_decode)
    if main_process:
        print(f"model     {loaded.source} (step {loaded.step}, {args.weights})")
        print("\n".join(setup.lines()))
    out = Path(args.out)
    finished = (out / "samples.npz").exists() and (out / "shards/manifest.json").exists()
    generate_shards(
        out / "shards",
        loaded.model,
        setup.objective,
        setup.sampler,
        setup.guidance,
        torch.tensor(request.seeds),
        "from-seed" if request.labels is None else torch.tensor(request.labels),
        text_of(dataset, request.captions),
        to_pixels=dataset.to_pixels,
        settings=setup.identity(args.weights, request.captions),
        batch=args.batch,
        accelerator=accelerator,
        progress=Display() if main_process else None,
        weak_model=setup.weak,
        finished=finished,
    )
    if main_process:
        from experiments.sampling.output import write_all

        write_all(out, request, args.pngs, finished)
    return 0


#: Options of data that have nothing to do with where the training data are.
SHOWING = ("vae", "vae_dtype", "decode_batch")


def data_of(loaded: TrainedModel, changes: dict[str, Any], device: Any) -> Any:
    """Return what turns samples into pixels; for latents from the weights alone.

    Args:
        loaded: Weights, which say how their latents are decoded.
        changes: Options of data; other than those of decoding, they need the store.
        device: Where pictures are decoded.
    """
    from experiments.data.dataset import create
    from experiments.data.latents_spec import LatentsOptions
    from experiments.data.specs import parse

    config = loaded.config
    options = parse({**config.data, **changes})
    alone = "decoding" in loaded.info and set(changes) <= set(SHOWING)
    if not (isinstance(options, LatentsOptions) and alone):
        return create(options, task=config.task, device=device)
    from experiments.data.latent_space import LatentSpace

    return LatentSpace.restore(options, loaded.info, config.task, device)


def text_of(dataset: Any, captions: list[str] | None) -> Any:
    """Return a function from positions to text states, or None without captions."""
    if captions is None:
        return None
    return lambda rows: dataset.encode_text([captions[i] for i in rows.tolist()])


class Display:
    """Progress on stderr: in place on a terminal, else a line for every tenth."""

    def __init__(self) -> None:
        self.shown = -1

    def __call__(self, done: int, total: int, left: float) -> None:
        """Show that `done` of `total` images are there, with `left` seconds to go."""
        tenth, live = 10 * done // total, sys.stderr.isatty()
        if tenth == self.shown and not live:
            return
        self.shown = tenth
        text = f"sampling  {done:,}/{total:,}  {int(left // 60):02d}:{int(left % 60):02d} left"
        end = "\n" if done >= total or not live else ""
        print(f"\r{text}" if live else text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main, computes=True))
