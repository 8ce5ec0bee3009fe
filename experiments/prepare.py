"""Turn pictures into a latent store: python experiments/prepare.py PICTURES OUT.

A folder with one subfolder per class, a folder of pictures with captions, WebDataset tars, or
parquet and arrow tables; ADM's centre crop, mirrored copies, diffusers' AutoencoderKL. The same
command again continues after an interruption.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if __name__ == "__main__":
    # Run as a script, Python puts experiments/ on the path; imports start at the repository root.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments.data.data_options import DataError
from experiments.runtime.command import run_command
from routing.errors import Parser

if TYPE_CHECKING:
    from experiments.data.latent_store import Manifest
    from experiments.data.store_writer import Writer

_EXAMPLES = """examples:
  python experiments/prepare.py ~/photos latents/photos
  python experiments/prepare.py imagenet/train latents/imagenet256 --device cuda --batch 64
  torchrun --nproc_per_node 8 experiments/prepare.py imagenet/train latents/imagenet512 --size 512
  python experiments/prepare.py coco/train2014 latents/coco --captions captions_train2014.json \\
      --text openai/clip-vit-large-patch14
then:
  python experiments/run.py data=latents data.path=latents/photos
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = Parser(
        prog="python experiments/prepare.py",
        description=__doc__.split("\n\n")[0] if __doc__ else "",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add("pictures", type=Path, help="folder of pictures, .tar files, or .parquet and .arrow tables")
    add("out", type=Path, help="folder of the latent store; made if it is not there")
    add(
        "--vae",
        default="stabilityai/sd-vae-ft-ema",
        help="AutoencoderKL: a name, a folder or a file",
    )
    add("--size", type=int, default=256, help="side of the cropped pictures in pixels (256)")
    add("--kind", choices=("moments", "sample"), default="moments", help="what is stored (moments)")
    add("--no-flips", action="store_true", help="do not store mirrored pictures")
    add("--dtype", choices=("float16", "float32"), default="float16", help="on disk (float16)")
    add("--files", default="*", help="only files that match, such as 'train-*.parquet'")
    add("--limit", type=int, help="only the first so many pictures")
    add("--captions", type=Path, help="COCO annotations .json, or .jsonl of file_name and caption")
    add("--captions-per-image", type=int, default=1, help="captions stored for each picture (1)")
    add("--text", help="CLIP or T5 text encoder for captions: a name or a folder")
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


class Progress:
    """One line about how far it is: on a terminal in place, in a log file every ten seconds.

    Args:
        total: Pictures to encode.
        stream: Where to write.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.done = total, 0
        self.stream = sys.stderr if stream is None else stream
        self.start = self.last = time.monotonic()
        self.live = self.stream.isatty()

    def __call__(self, count: int) -> None:
        """Count `count` more pictures, and say so where it is time."""
        self.done += count
        now = time.monotonic()
        if now - self.last < (0.2 if self.live else 10) and self.done < self.total:
            return
        self.last = now
        rate = self.done / max(now - self.start, 1e-9)
        left = (self.total - self.done) / max(rate, 1e-9)
        end = "\n" if self.done >= self.total or not self.live else ""
        line = (
            f"{self.done:,}/{self.total:,} pictures  {rate:.1f}/s  "
            f"[{_clock(now - self.start)}<{_clock(left)}]"
        )
        print(("\r\x1b[K" if self.live else "") + line, end=end, file=self.stream, flush=True)


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def _check(given: argparse.Namespace) -> None:
    for name in ("size", "batch", "shard", "threads", "captions_per_image", "text_length"):
        value = getattr(given, name)
        if value < 1:
            raise DataError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if given.limit is not None and given.limit < 1:
        raise DataError(f"--limit {given.limit}: must be at least 1")
    if given.captions is not None and given.text is None:
        raise DataError(
            "--captions needs --text, the encoder that embeds them; try "
            "--text openai/clip-vit-large-patch14"
        )


def _device(name: str | None) -> str:
    """Return this process's device, one GPU for each local rank."""
    import torch

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError):
        raise DataError(f"--device {device} is not there; try --device cpu") from None
    return device


def build(given: argparse.Namespace) -> Writer:
    """Open source, autoencoder and text encoder and return the writer for them."""
    _check(given)
    from experiments.data.autoencoder import Autoencoder
    from experiments.data.picture_sources import First, open_source
    from experiments.data.store_writer import Settings, Writer
    from experiments.data.text_encoder import TextEncoder

    columns = {
        role: name
        for role in ("image", "label", "caption")
        if (name := getattr(given, f"{role}_column")) is not None
    }
    source = open_source(
        given.pictures, captions=given.captions, files=given.files, columns=columns
    )
    if given.limit is not None:
        source = First(source, given.limit)
    device = _device(given.device)
    online = not os.environ.get("HF_HUB_OFFLINE")
    vae = Autoencoder(given.vae, device, download=online)
    text = None
    if given.text is not None:
        text = TextEncoder(given.text, device, given.text_length, download=online)
    # A path is named in full, so that training finds it from anywhere.
    named = [
        str(Path(n).resolve()) if n and Path(n).is_dir() else n for n in (given.vae, given.text)
    ]
    settings = Settings(
        vae=str(named[0]),
        size=given.size,
        kind=given.kind,
        flips=not given.no_flips,
        dtype=given.dtype,
        shard=given.shard,
        text=named[1],
        captions=given.captions_per_image,
    )
    return Writer(
        source, vae, given.out, settings, text=text, batch=given.batch, threads=given.threads
    )


def summary(manifest: Manifest, out: Path) -> str:
    """Return what was made, for people."""
    size = sum(shard["bytes"] for shard in manifest.shards) / 2**30
    channels, height, width = manifest.shape
    said = [
        f"{out}: {manifest.count:,} pictures as {manifest.kind} of {channels}x{height}x{width}"
        + (", mirrored too" if manifest.flips else ""),
        f"classes   {len(manifest.classes)}" if manifest.labels else "classes   none",
        "mean      " + "  ".join(f"{value:.4f}" for value in manifest.mean),
        "std       " + "  ".join(f"{value:.4f}" for value in manifest.std),
        f"scaled    std {max(manifest.std) * manifest.scale_factor:.3f} at most, "
        f"by factor {manifest.scale_factor}",
        f"shards    {len(manifest.shards)}, {size:.2f} GB, SHA-256 in manifest.json",
    ]
    if manifest.text is not None:
        said.append(f"captions  {manifest.text['shape']} by {manifest.text['encoder']}")
    if manifest.skipped:
        said.append(
            f"skipped   {manifest.skipped} that cannot be read, listed in {out / 'skipped.txt'}"
        )
    return "\n".join(said)


def prepare(given: argparse.Namespace) -> None:
    """Encode what this process is to encode, and finish the store if it is the last."""
    writer = build(given)
    rank, world = (int(os.environ.get(key, d)) for key, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    mine = [k for k in writer.missing() if k % world == rank]
    pictures = sum(
        min(writer.settings.shard, writer.source.count - k * writer.settings.shard) for k in mine
    )
    if mine and rank == 0:
        kept = writer.shards - len(writer.missing())
        again = f", {kept} finished before" if kept else ""
        print(f"{writer.source.count:,} pictures in {writer.shards} shards{again}", file=sys.stderr)
        writer.progress = Progress(pictures)
    for k in mine:
        writer.write(k)
    manifest = writer.finish()
    if manifest is None:
        return
    if given.verify:
        from experiments.data.latent_store import LatentStore

        LatentStore(given.out, verify=True)
    print(summary(manifest, given.out))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(_command, arguments, computes=True)


def _command(words: list[str]) -> int:
    try:
        prepare(parser().parse_args(words))
    except KeyboardInterrupt:
        print("stopped; the same command continues with the next shard", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
