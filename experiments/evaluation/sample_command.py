"""What `experiments/sample.py` does once its arguments are read: sample, then write pictures."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.data.data_options import parse
from experiments.data.dataset import create
from experiments.data.latent_options import LatentsOptions
from experiments.data.latents import LatentSpace
from experiments.evaluation.images import Images
from experiments.evaluation.pipeline import FLAGS, SamplingPipeline, chosen_options, parse_overrides
from experiments.evaluation.sample_store import (
    SHARD,
    generate_shards,
    image_grid,
    read_shards,
    save_png,
    write_npz,
)
from experiments.evaluation.small_networks import checksum
from experiments.options.diffusion import DiffusionError
from experiments.runtime import console as log
from experiments.runtime.files import locked, sha256
from experiments.runtime.processes import join, world
from experiments.training.checkpoint import TrainedModel, load_model
from routing.errors import suggest

MOST_COLUMNS, MOST_ROWS = 16, 20
#: Options of data that have nothing to do with where the training data are.
SHOWING = ("vae", "vae_dtype", "decode_batch")


def sample(args: argparse.Namespace) -> int:
    """Sample what the arguments name, going on where an earlier call was killed."""
    changes = parse_overrides(args.changes, **{key: getattr(args, key) for key in FLAGS})
    seeds = parse_numbers(args.seeds, "--seeds")
    captions = None if args.captions is None else parse_captions(args.captions)
    for key, least in (("batch", 1), ("pngs", 0)):
        if getattr(args, key) < least:
            raise DiffusionError(f"--{key} {getattr(args, key)}: {least} or more is needed")
    for kind in ("sampler", "guidance"):
        if "name" in changes[kind]:
            chosen_options(kind, {}, changes[kind])
    device, (rank, processes) = join(args.device), world()
    loaded = load_model(args.source, step=args.step, weights=args.weights, device=device)
    model, config = loaded.model, loaded.config
    names = loaded.info.get("class_names") or ()
    given = args.classes is not None
    classes = parse_classes(args.classes, model.num_classes, names) if given else None
    if captions is None and model.prefix:
        raise DiffusionError("this model is conditioned on text; give --captions 'one; another'")
    if captions is not None and not model.prefix:
        raise DiffusionError("--captions: this model is not conditioned on text; leave them out")
    request = plan_request(seeds, classes, captions, names)
    sampler = chosen_options("sampler", config.sampler, changes["sampler"])
    guidance = chosen_options("guidance", config.guidance, changes["guidance"])
    pipeline = SamplingPipeline.make(model, config, sampler, guidance)
    dataset = data_of(loaded, changes["data"], next(model.parameters()).device)
    if not dataset.can_decode:
        raise DiffusionError(dataset.cannot_decode)
    console = log.Console(quiet=bool(rank))
    if not rank:
        console.say(f"model     {loaded.source} (step {loaded.step}, {args.weights})")
        console.say("\n".join(pipeline.lines()))
    out = Path(args.out)
    weights = sha256(loaded.source) if loaded.source.endswith(".safetensors") else loaded.source
    texts = request.captions or []

    def text_of(rows: torch.Tensor) -> torch.Tensor:
        return dataset.encode_text([texts[i] for i in rows.tolist()])

    # Of two calls that sample in different ways, one would take the other's shards for its own.
    with contextlib.nullcontext() if rank else locked(out):
        finished = (out / "samples.npz").exists() and (out / "shards/manifest.json").exists()
        count = len(request.seeds)
        kept = SHARD * len(list((out / "shards").glob("shard-*.npz")))
        with console.progress("sampling", count, min(kept, count)) as bar:
            generate_shards(
                out / "shards",
                pipeline,
                torch.tensor(request.seeds),
                "from-seed" if request.labels is None else torch.tensor(request.labels),
                text_of if texts else None,
                to_pixels=dataset.to_pixels,
                settings={
                    "weights": [weights, loaded.step, args.weights],
                    "data": loaded.info.get("fingerprint"),
                    "captions": request.captions,
                    **({"changed": changes["data"]} if changes["data"] else {}),
                    **({} if pipeline.weak is None else {"weaker": checksum(pipeline.weak)}),
                },
                batch=args.batch,
                # All processes are about equally fast: the first measures the progress of all.
                progress=lambda done, _: bar.update(min(count, done * processes)),
                finished=finished,
            )
        if not rank:
            write_pictures(out, request, args.pngs, finished, console)
    return 0


def data_of(loaded: TrainedModel, changes: dict[str, Any], device: Any) -> Any:
    """Return what turns samples into pixels; for latents from the weights alone.

    They say how their latents are decoded; changes of other options than that need the store.
    """
    config = loaded.config
    options = parse({**config.data, **changes})
    alone = "decoding" in loaded.info and set(changes) <= set(SHOWING)
    if not (isinstance(options, LatentsOptions) and alone):
        return create(options, task=config.task, device=device)
    return LatentSpace.restore(options, loaded.info, config.task, device)


def write_pictures(
    out: Path, request: Request, pngs: int, finished: bool, console: log.Console
) -> None:
    """Turn the shards below `out` into `samples.npz`, that into pictures; say where they are.

    The shards go once the npz is whole; `finished`: an earlier call did that. Pictures are made
    where some are not there, such as PNGs that it was not asked for.
    """
    npz, grid, count = out / "samples.npz", out / "grid.png", len(request.seeds)
    if not finished:
        grid.unlink(missing_ok=True)  # the last of the pictures: without it all are made
        pieces = ((pixels, classes) for pixels, _, classes in read_shards(out / "shards"))
        write_npz(pieces, count, npz)
    for shard in (out / "shards").glob("shard-*.npz"):  # an earlier call may have been killed here
        shard.unlink()
    if not grid.exists() or len(list((out / "png").glob("[!.]*.png"))) < min(pngs, count):
        made, tiles = Images(npz), list[torch.Tensor]()
        drawn = made.labels() if request.labels is None else None
        first = made.batches(range(max(pngs, *request.grid) + 1))
        for number, image in enumerate(chain.from_iterable(first)):
            if number in request.grid:
                tiles.append(image)
            if number < pngs:
                kind = "" if drawn is None else f"_class{drawn[number]:04d}"
                name = f"{request.names[number]}{kind}.png"
                save_png(image.permute(1, 2, 0).numpy(), out / "png" / name)
        save_png(image_grid(torch.stack(tiles), request.columns, request.row_names), grid)
    console.say(f"grid      {grid}")
    # An earlier call may have been asked for more.
    shown = len(list((out / "png").glob("[!.]*.png")))
    if shown:
        console.say(f"images    {out / 'png'} ({shown:,} of {count:,})")
    console.say(f"npz       {npz} (arr_0, for ADM's evaluator)")


# --- what is asked for ----------------------------------------------------------------------------


# Ten million seeds are 80 MB, and twenty days of images.
_MOST = 10_000_000


def parse_numbers(text: str, key: str) -> list[int]:
    """Read `3`, `0-63` or `0-9,20,30-31` as numbers in that order, each once."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", part)
        first, last = (int(end or found[1]) for end in found.groups()) if found else (1, 0)
        if last < first:
            raise DiffusionError(
                f"{key} {text}: expected numbers such as 3,7 or ranges such as 0-63, from the "
                "smaller to the larger number, all below 10^18"
            )
        if len(numbers) + last - first >= _MOST:
            raise DiffusionError(
                f"{key} {text}: more than {_MOST:,} at once; ask for them in several calls"
            )
        numbers += range(first, last + 1)
    return numbers


def parse_classes(text: str, num_classes: int, names: Sequence[str] = ()) -> list[int]:
    """Read class numbers, ranges or names, separated by commas; `all` is every class."""
    if not num_classes:
        raise DiffusionError("--classes: this model has no classes; leave it out")
    if text == "all":
        return list(range(num_classes))
    chosen: list[int] = []
    for part in (piece.strip() for piece in text.split(",")):
        if part in names:
            chosen.append(list(names).index(part))
        elif part[:1].isdigit():
            chosen += parse_numbers(part, "--classes")
        else:
            guess = suggest(part, names)
            some = ", ".join(list(names)[:10]) or f"0..{num_classes - 1}"
            raise DiffusionError(
                f"--classes {part}: no class of that name{guess or f'; there are {some}'}"
            )
    wrong = [number for number in chosen if number >= num_classes]
    if wrong:
        raise DiffusionError(
            f"--classes {wrong[0]}: this model has {num_classes} classes, 0..{num_classes - 1}"
        )
    return chosen


def parse_captions(text: str) -> list[str]:
    """Read captions separated by semicolons, or one per line from a `.txt` file."""
    if text.endswith(".txt"):
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise DiffusionError(f"--captions {text}: expected text in UTF-8 ({error})") from None
    else:
        lines = text.split(";")
    captions = [line.strip() for line in lines if line.strip()]
    if not captions:
        raise DiffusionError("--captions: give one or more, separated by semicolons")
    return captions


class Request(NamedTuple):
    """The images to make, in order."""

    seeds: list[int]  # one per image
    # Class of each, or None where the seeds draw them or there are no classes
    labels: list[int] | None
    captions: list[str] | None  # caption of each, or None
    grid: set[int]  # which of them the grid shows: a row per class or caption, or the first hundred
    columns: int | None  # images in a row of the grid
    row_names: list[str] | None  # names of the grid's rows, if rows mean something
    names: list[str]  # file name of each image, without suffix


def plan_request(
    seeds: Sequence[int],
    classes: Sequence[int] | None,
    captions: Sequence[str] | None,
    class_names: Sequence[str] = (),
) -> Request:
    """Return every seed for every class or caption, one row of the grid for each of those."""
    for key, given in (("--seeds", seeds), ("--classes", classes or ())):
        if len({*given}) < len(given):
            raise DiffusionError(f"{key}: a number stands twice, and its images would share a name")
    if captions is not None:
        rows = [(f"caption{row:03d}_", text) for row, text in enumerate(captions)]
    else:
        known = dict(enumerate(class_names))
        rows = [(f"class{n:04d}_", known.get(n, str(n))) for n in classes or ()]
    starts = [start for start, _ in rows] or [""]
    columns = min(len(seeds), MOST_COLUMNS) if rows else None
    shown = {r * len(seeds) + c for r in range(len(rows[:MOST_ROWS])) for c in range(columns or 0)}
    return Request(
        seeds=list(seeds) * len(starts),
        labels=[n for n in classes or () for _ in seeds] or None,
        captions=[text for text in captions or () for _ in seeds] or None,
        grid=shown or set(range(100)),
        columns=columns,
        row_names=[name for _, name in rows[:MOST_ROWS]] or None,
        names=[f"{start}seed{seed:06d}" for start in starts for seed in seeds],
    )
