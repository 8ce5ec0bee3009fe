"""Turn pictures into a latent store: python experiments/prepare.py PICTURES OUT.

A folder with one subfolder per class, a folder of pictures with captions, WebDataset tars, or
parquet tables; ADM's centre crop, mirrored copies, diffusers' AutoencoderKL. The same
command again continues after an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Run as a script, Python puts experiments/ on the path; imports start at the repository root.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments.data.data_options import PICTURES, DataError, require
from experiments.runtime.command import Interrupted, run_command
from experiments.runtime.command import home_path as _path
from experiments.runtime.console import Console
from experiments.runtime.files import check_replaceable, locked
from experiments.runtime.process_group import process_group
from routing.errors import Parser

_EXAMPLES = """examples:
  python experiments/prepare.py ~/photos latents/photos
  python experiments/prepare.py imagenet/train latents/in256 --batch 64
  torchrun --nproc_per_node 8 experiments/prepare.py PICTURES OUT --size 512
  python experiments/prepare.py coco/train2014 latents/coco \\
      --captions captions_train2014.json --text openai/clip-vit-large-patch14
then:
  python experiments/run.py data=latents data.path=latents/photos
"""


def _full_path(name: str) -> str:
    """Return the full path of what is here, so that training finds it, or a hub's name."""
    path = _path(name)
    return str(path.resolve()) if path.exists() else name


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = Parser(
        prog="python experiments/prepare.py",
        description=__doc__.split("\n\n")[0] if __doc__ else "",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add("pictures", type=_path, help="folder of pictures, .tar files or .parquet tables")
    add("out", type=_path, help="folder of the latent store; made if it is not there")
    add(
        "--vae",
        type=_full_path,
        default="stabilityai/sd-vae-ft-ema",
        help="AutoencoderKL: a name or a folder",
    )
    add("--size", type=int, default=256, help="side of the cropped pictures in pixels (256)")
    add("--kind", choices=("moments", "sample"), default="moments", help="what is stored (moments)")
    add("--no-flips", action="store_true", help="do not store mirrored pictures")
    add("--dtype", choices=("float16", "float32"), default="float16", help="on disk (float16)")
    add("--files", default="*", help="only files that match, such as 'train-*.parquet'")
    add("--limit", type=int, help="only the first so many pictures")
    add("--captions", type=_path, help="COCO annotations .json, or .jsonl of file_name and caption")
    add("--captions-per-image", type=int, default=1, help="captions stored for each picture (1)")
    add("--text", type=_full_path, help="CLIP or T5 text encoder for captions: a name or a folder")
    add("--text-length", type=int, default=77, help="tokens per caption (77)")
    add("--image-column", help="column of tables with the pictures")
    add("--label-column", help="column of tables with the classes")
    add("--caption-column", help="column of tables with the captions")
    add("--batch", type=int, default=16, help="pictures encoded at a time (16)")
    add("--shard", type=int, default=4096, help="pictures per shard: what a kill can lose (4096)")
    add("--threads", type=int, default=4, help="threads that read and crop pictures (4)")
    add("--device", help="cuda, cpu, ... (cuda where there is one)")
    add("--verify", action="store_true", help="at the end, check the SHA-256 of every shard")
    return p


def _check(given: argparse.Namespace) -> None:
    for name in ("size", "batch", "shard", "threads", "captions_per_image", "text_length"):
        value, option = getattr(given, name), f"--{name.replace('_', '-')}"
        require(1 <= value <= 10**7, f"{option} {value}: must be at least 1, at most 10000000")
    require(given.limit is None or given.limit > 0, f"--limit {given.limit}: must be at least 1")
    for name in ("captions", "captions_per_image", "caption_column", "text_length"):
        require(
            given.text is not None or getattr(given, name) == parser().get_default(name),
            f"--{name.replace('_', '-')} needs --text, the encoder that embeds captions; try "
            "--text openai/clip-vit-large-patch14",
        )
    check_replaceable(given.out / "manifest.json")  # before the VAE is fetched
    # Listed once: another process of the same launch may write its plan at any moment.
    names = {p.name for p in given.out.iterdir()} if given.out.is_dir() else set()
    strange = {name for name in names if name[0] != "."} - {"lock"}
    require("plan.json" in names or not strange, f"{given.out} is not empty; give a new folder")


def _device(name: str | None) -> str:
    """Return this process's device, one GPU for each local rank."""
    import torch

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        device = f"cuda:{process_group().local_rank}"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise DataError(f"--device {device} is not there; try --device cpu") from None
    return device


def prepare(given: argparse.Namespace) -> None:
    """Encode what this process is to encode, and finish the store if it is the last."""
    _check(given)
    # `--help` and wrong words need none of these.
    from experiments.data.encoders import Autoencoder, TextEncoder
    from experiments.data.latent_store import LatentStore
    from experiments.data.picture_sources import open_source
    from experiments.data.store_writer import StoreSettings, StoreWriter

    columns = {role: getattr(given, f"{role}_column") for role in ("image", "label", "caption")}
    source = open_source(
        given.pictures, captions=given.captions, files=given.files, columns=columns
    )
    if given.limit is not None:
        source.limit(given.limit)
    # Unread, they may be of any type.
    source.captioned &= given.text is not None
    device = _device(given.device)
    vae = Autoencoder(given.vae, device, download=True)
    asked, length = given.text, given.text_length
    text = None if asked is None else TextEncoder(asked, device, length, download=True)
    same = ("vae", "size", "kind", "dtype", "shard", "text", "text_length")
    named = {name: getattr(given, name) for name in same}
    settings = StoreSettings(**named, flips=not given.no_flips, captions=given.captions_per_image)
    group = process_group()
    rank, world = group.rank, group.world_size
    # The first process of a launch keeps others out, which would write the same files.
    with contextlib.nullcontext() if rank else locked(given.out):
        writer = StoreWriter(source, vae, given.out, settings, text, given.batch, given.threads)
        missing = writer.missing()
        mine = [k for k in missing if k % world == rank]
        if mine:
            console = Console(quiet=rank > 0, stderr=True)
            kept = writer.shards - len(missing)
            again = f", {kept} finished before" if kept else ""
            console.say(f"{source.count:,} pictures in {writer.shards} shards{again}")
            if source.others:
                few = f"{len(source.others):,} other files, such as {source.others[0]}"
                console.say(f"passed over: {few}; pictures end in {' '.join(PICTURES)}")
            total = sum(min(given.shard, source.count - k * given.shard) for k in mine)
            done = 0
            with console.progress("pictures", total) as display:
                for count in (count for k in mine for count in writer.write(k)):
                    display.update(done := done + count)
        manifest = writer.finish()
    if manifest is None:
        return
    if given.verify:
        LatentStore(given.out, verify=True)
    print(manifest.summary(given.out))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(_command, arguments, computes=True)


def _command(words: list[str]) -> None:
    try:
        prepare(parser().parse_args(words))
    except KeyboardInterrupt:
        said = "stopped; the same command continues with the next shard"
        raise Interrupted("SIGINT", 0, said) from None


if __name__ == "__main__":
    sys.exit(main())
