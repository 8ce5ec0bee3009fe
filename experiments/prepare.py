"""Encode images to a latent store: python experiments/prepare.py IMAGES OUT.

IMAGES is a folder with one subfolder per class, a folder of images with captions, WebDataset tars,
or parquet tables. They are cropped as in ADM, mirrored, and encoded by diffusers' AutoencoderKL.
Latents of other projects (tars of latent.npy, .npy files, EDM's folders) are imported.
The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # The repository root instead of this script's folder, so that `experiments` can be imported.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from experiments.runtime.errors import require_packages

    require_packages()

from experiments.data.data_options import require
from experiments.data.latent_options import DEFAULT_VAE
from experiments.runtime.command import home_path, run_command
from experiments.runtime.errors import Interrupted
from experiments.runtime.files import check_replaceable
from experiments.runtime.parser import Parser

_EXAMPLES = """examples:
  python experiments/prepare.py ~/photos latents/photos
  python experiments/prepare.py imagenet/train latents/in256 --batch 64
  torchrun --nproc_per_node 8 experiments/prepare.py IMAGES OUT --size 512
  python experiments/prepare.py coco/train2014 latents/coco \\
      --captions captions_train2014.json --text openai/clip-vit-large-patch14
then:
  python experiments/run.py data=latents data.path=latents/photos
"""


def _full_path(name: str) -> str:
    """Return the full path of a local file or folder, or a name on the hub."""
    path = home_path(name)
    return str(path.resolve()) if path.exists() else name


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    command_line = Parser(
        prog="python experiments/prepare.py",
        description=__doc__.split("\n\n")[0] if __doc__ else "",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command_line.add_argument
    add(
        "images",
        metavar="IMAGES",
        type=home_path,
        help="folder of images, .tar files or .parquet tables, or of latents to import",
    )
    add("out", metavar="OUT", type=home_path, help="folder of the latent store; created if missing")
    add("--vae", type=_full_path, default=DEFAULT_VAE, help="AutoencoderKL: a name or a folder")
    add("--size", type=int, default=256, help="side of the cropped images in pixels (256)")
    add("--kind", choices=("moments", "sample"), default="moments", help="stored values (moments)")
    add("--no-flips", action="store_true", help="do not store mirrored images")
    add("--dtype", choices=("float16", "float32"), default="float16", help="on disk (float16)")
    add("--files", default="*", help="only files that match, such as 'train-*.parquet'")
    add("--limit", type=int, help="number of images to use, from the first on")
    add(
        "--captions",
        type=home_path,
        help="COCO annotations .json, or .jsonl of file_name and caption",
    )
    add("--captions-per-image", type=int, default=1, help="captions stored for each image (1)")
    add("--text", type=_full_path, help="CLIP or T5 text encoder for captions: a name or a folder")
    add("--text-length", type=int, default=77, help="tokens per caption (77)")
    add("--image-column", help="column of tables with the images")
    add("--label-column", help="column of tables with the classes")
    add("--caption-column", help="column of tables with the captions")
    add("--batch", type=int, default=16, help="images encoded at a time (16)")
    add("--shard", type=int, default=4096, help="images per shard, which a kill can lose (4096)")
    add("--threads", type=int, default=4, help="threads that read and crop images (4)")
    add("--device", help="cuda, cpu, ... (default: cuda if available)")
    add("--verify", action="store_true", help="at the end, check the SHA-256 of every shard")
    return command_line


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse arguments out of range, and a folder that holds something else."""
    for name in ("size", "batch", "shard", "threads", "captions_per_image", "text_length"):
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        require(1 <= value <= 10**7, f"{option} {value}: must be at least 1, at most 10000000")
    require(args.limit is None or args.limit > 0, f"--limit {args.limit}: must be at least 1")
    for name in ("captions", "captions_per_image", "caption_column", "text_length"):
        require(
            args.text is not None or getattr(args, name) == parser().get_default(name),
            f"--{name.replace('_', '-')} needs --text, the encoder that embeds captions; try "
            "--text openai/clip-vit-large-patch14",
        )
    check_replaceable(args.out / "manifest.json")  # before the VAE is fetched
    # Listed once: another process of the same launch may write its plan at any moment.
    names = set()
    if args.out.is_dir():
        names = {path.name for path in args.out.iterdir()}
    foreign = [name for name in names if name[0] != "." and name != "lock"]
    require("plan.json" in names or not foreign, f"{args.out} is not empty; give a new folder")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(_command, arguments, computes=True)


def _command(argv: list[str]) -> None:
    arguments = parser().parse_args(argv)
    check_arguments(arguments)
    from experiments.data.prepare_command import prepare  # imports torch, which takes seconds

    try:
        prepare(arguments)
    except KeyboardInterrupt:
        message = "stopped; the same command continues with the next shard"
        raise Interrupted("SIGINT", 0, message) from None


if __name__ == "__main__":
    sys.exit(main())
