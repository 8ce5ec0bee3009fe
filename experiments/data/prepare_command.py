"""The work of `experiments/prepare.py`: encode images to a latent store."""

from __future__ import annotations

import argparse
import contextlib
import itertools

import torch

from experiments.data.data_options import DataError
from experiments.data.encoders import Autoencoder, TextEncoder
from experiments.data.import_latents import import_latents, latent_rows
from experiments.data.latent_store import LatentStore
from experiments.data.open_source import open_source
from experiments.data.store_writer import StoreSettings, StoreWriter
from experiments.runtime.console import Console
from experiments.runtime.locks import locked
from experiments.runtime.process_group import process_group


def _device(name: str | None) -> str:
    """Return this process's device: one GPU for each local rank."""
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        device = f"cuda:{process_group().local_rank}"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise DataError(f"--device {device} is not available; try --device cpu") from None
    return device


def prepare(args: argparse.Namespace) -> None:
    """Encode this process's shards, and finish the store if it is the last process."""
    columns = {
        "image": args.image_column,
        "label": args.label_column,
        "caption": args.caption_column,
    }
    is_first = process_group().rank == 0
    rows = latent_rows(args.images, args.files) if args.images.exists() else None
    if rows is not None:
        if is_first:
            with locked(args.out):
                count = import_latents(itertools.islice(rows, args.limit), args.out, args.shard)
            print(f"{args.out}: {count:,} latents, for data=latents data.path={args.out}")
        return
    source = open_source(args.images, captions=args.captions, files=args.files, columns=columns)
    if args.limit is not None:
        source.limit(args.limit)
    if args.text is None:
        if source.captioned:
            source.left_out.add("captions, as --text names no encoder", "txt", source.count)
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
    if str(source.left_out):
        print(f"left out  {source.left_out}")


def _write_shards(writer: StoreWriter) -> None:
    """Write the missing shards of this process, with a progress display on stderr."""
    group, source = process_group(), writer.source
    console = Console(quiet=group.rank > 0, stderr=True)
    own_shards = range(group.rank, writer.shards, group.world_size)
    with console.progress("comparing the images of finished shards"):
        changed, unknown = writer.forget_changed(own_shards)
    if changed:
        console.say(f"images of {changed} finished shards have changed: encoding them again")
    if unknown:
        console.say(
            f"{unknown} shards of an earlier version are kept; they do not say whether their "
            "images have changed since"
        )
    missing = writer.missing()
    shards = [number for number in missing if number in own_shards]
    if not shards:
        return
    finished = writer.shards - len(missing)
    finished_text = f", {finished} finished before" if finished else ""
    console.say(f"{source.count:,} images in {writer.shards} shards{finished_text}")
    size = writer.settings.shard
    total = sum(min(size, source.count - number * size) for number in shards)
    done = 0
    with console.progress("images", total) as progress:
        for number in shards:
            for count in writer.write(number):
                done += count
                progress.update(done)
