"""Encode images to a latent store: python experiments/prepare.py IMAGES OUT.

IMAGES is a folder with one subfolder per class, a folder of images with captions, WebDataset tars,
or parquet tables. They are cropped as in ADM, mirrored, and encoded by diffusers' AutoencoderKL.
The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Run as a script, Python puts experiments/ on the path; imports start at the repository root.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from experiments.runtime.errors import require_packages

    require_packages()

from experiments.runtime.command import home_path, run_command
from experiments.runtime.console import Console
from experiments.runtime.errors import Interrupted
from experiments.runtime.files import check_replaceable
from experiments.runtime.locks import locked
from experiments.runtime.process_group import process_group
from routing.errors import Parser

if TYPE_CHECKING:
    from experiments.data.store_writer import StoreWriter

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
        help="folder of images, .tar files or .parquet tables",
    )
    add("out", metavar="OUT", type=home_path, help="folder of the latent store; created if missing")
    add(
        "--vae",
        type=_full_path,
        default="stabilityai/sd-vae-ft-ema",
        help="AutoencoderKL: a name or a folder",
    )
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


def _check(args: argparse.Namespace) -> None:
    """Refuse arguments out of range, and a folder that holds something else."""
    from experiments.data.data_options import require

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


def _device(name: str | None) -> str:
    """Return this process's device: one GPU for each local rank."""
    import torch

    from experiments.data.data_options import DataError

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        device = f"cuda:{process_group().local_rank}"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise DataError(f"--device {device} is not there; try --device cpu") from None
    return device


def prepare(args: argparse.Namespace) -> None:
    """Encode this process's shards, and finish the store if it is the last process."""
    _check(args)
    # Imported late: `--help` needs no packages, and invalid arguments no torch.
    from experiments.data.encoders import Autoencoder, TextEncoder
    from experiments.data.latent_store import LatentStore
    from experiments.data.open_source import open_source
    from experiments.data.store_writer import StoreSettings, StoreWriter

    columns = {
        "image": args.image_column,
        "label": args.label_column,
        "caption": args.caption_column,
    }
    source = open_source(args.images, captions=args.captions, files=args.files, columns=columns)
    if args.limit is not None:
        source.limit(args.limit)
    if args.text is None:
        source.captioned = False  # captions that are not read may have any type
    device = _device(args.device)
    vae = Autoencoder(args.vae, device, download=True)
    text = None
    if args.text is not None:
        text = TextEncoder(args.text, device, args.text_length, download=True)
    settings = StoreSettings(
        vae=args.vae,
        size=args.size,
        kind=args.kind,
        flips=not args.no_flips,
        dtype=args.dtype,
        shard=args.shard,
        text=args.text,
        captions=args.captions_per_image,
        text_length=args.text_length,
    )
    is_first = process_group().rank == 0
    # The first process of a launch locks out other launches, which would write the same files.
    with locked(args.out) if is_first else contextlib.nullcontext():
        writer = StoreWriter(source, vae, args.out, settings, text, args.batch, args.threads)
        _write_shards(writer)
        manifest = writer.finish()
    if manifest is None:
        return
    if args.verify:
        LatentStore(args.out, verify=True)
    print(manifest.summary(args.out))


def _write_shards(writer: StoreWriter) -> None:
    """Write the missing shards of this process, with a progress display on stderr."""
    from experiments.data.data_options import PICTURES

    group, source = process_group(), writer.source
    missing = writer.missing()
    shards = [number for number in missing if number % group.world_size == group.rank]
    if not shards:
        return
    console = Console(quiet=group.rank > 0, stderr=True)
    finished = writer.shards - len(missing)
    finished_text = f", {finished} finished before" if finished else ""
    console.say(f"{source.count:,} images in {writer.shards} shards{finished_text}")
    if source.ignored_files:
        console.say(
            f"ignored: {len(source.ignored_files):,} other files, such as "
            f"{source.ignored_files[0]}; images end in {' '.join(PICTURES)}"
        )
    size = writer.settings.shard
    total = sum(min(size, source.count - number * size) for number in shards)
    done = 0
    with console.progress("images", total) as progress:
        for number in shards:
            for count in writer.write(number):
                done += count
                progress.update(done)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(_command, arguments, computes=True)


def _command(argv: list[str]) -> None:
    try:
        prepare(parser().parse_args(argv))
    except KeyboardInterrupt:
        message = "stopped; the same command continues with the next shard"
        raise Interrupted("SIGINT", 0, message) from None


if __name__ == "__main__":
    sys.exit(main())
