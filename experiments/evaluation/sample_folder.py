"""The output folder of `experiments/sample.py`: an .npz, a grid and PNGs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.evaluation.images import Images
from experiments.evaluation.pictures import image_grid, save_png
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.sample_request import SampleRequest
from experiments.evaluation.sample_store import SHARD, SampleStore, generate_shards
from experiments.evaluation.small_networks import checksum
from experiments.runtime.console import Console
from experiments.runtime.files import refuse_links, sha256
from experiments.runtime.locks import locked
from experiments.runtime.processes import world


def sample_settings(
    loaded: Any,
    weights: str,
    request: SampleRequest,
    data_changes: Mapping[str, Any],
    pipeline: SamplingPipeline,
) -> dict[str, Any]:
    """Return what identifies the samples besides the pipeline's options, for the manifest."""
    source = loaded.source
    if source.endswith(".safetensors"):
        source = sha256(source)
    settings = {
        "weights": [source, loaded.step, weights],
        "data": loaded.info.get("fingerprint"),
        "captions": request.captions,
    }
    if data_changes:
        settings["changed"] = dict(data_changes)
    if pipeline.weak is not None:
        settings["weaker"] = checksum(pipeline.weak)
    return settings


def sample_to_folder(
    out: Path,
    pipeline: SamplingPipeline,
    request: SampleRequest,
    decoder: Any,
    settings: Mapping[str, Any],
    batch: int,
    pngs: int,
    console: Console,
) -> None:
    """Sample the requested images and write them, resuming an earlier call; a collective call.

    `decoder` turns samples into pixels and captions into text states, `settings` identify the
    samples besides the pipeline's options, and the first `pngs` images are written as PNGs too.
    """
    rank, processes = world()
    refuse_links(out.parent, [], [out.name])
    count, shards = len(request.seeds), out / "shards"
    captions = request.captions

    def text_states(rows: Tensor) -> Tensor:
        assert captions is not None
        return decoder.encode_text([captions[row] for row in rows.tolist()])

    # One writer per folder: a second call would take these shards for its own.
    with contextlib.nullcontext() if rank else locked(out):
        finished = (out / "samples.npz").exists() and (shards / "manifest.json").exists()
        resumed = min(count, SHARD * len(list(shards.glob("shard-*.npz"))))
        with console.progress("sampling", count, resumed) as bar:

            def report(done: int, total: int) -> None:
                # All processes are about equally fast: the first shows the progress of all.
                bar.update(min(count, done * processes))

            generate_shards(
                shards,
                pipeline,
                torch.tensor(request.seeds),
                "from-seed" if request.labels is None else torch.tensor(request.labels),
                None if captions is None else text_states,
                to_pixels=decoder.to_pixels,
                settings=settings,
                batch=batch,
                progress=report,
                finished=finished,
            )
        if not rank:
            write_pictures(out, request, pngs, finished, console)


def write_pictures(
    out: Path, request: SampleRequest, pngs: int, finished: bool, console: Console
) -> None:
    """Join the shards below `out` in `samples.npz`, then write the grid and the PNGs.

    The shards are removed once the npz is complete; `finished` means that an earlier call did
    that. Only missing pictures are written, such as PNGs beyond those of an earlier call.
    """
    npz, grid, count = out / "samples.npz", out / "grid.png", len(request.seeds)
    if not finished:
        grid.unlink(missing_ok=True)  # written last: without it all pictures are made
        SampleStore(out / "shards").write_npz(count, npz)
    for shard in (out / "shards").glob("shard-*.npz"):  # an earlier call may have been killed here
        shard.unlink()
    if not grid.exists() or _png_count(out) < min(pngs, count):
        with console.progress("pictures"):
            _write_pngs_and_grid(out, request, pngs)
    console.say(f"grid      {grid}")
    png_count = _png_count(out)
    if png_count:
        console.say(f"images    {out / 'png'} ({png_count:,} of {count:,})")
    console.say(f"npz       {npz} (arr_0, for ADM's evaluator)")


def _png_count(out: Path) -> int:
    return len(list((out / "png").glob("[!.]*.png")))


def _write_pngs_and_grid(out: Path, request: SampleRequest, pngs: int) -> None:
    """Write the first `pngs` images as PNGs, then the grid."""
    images = Images(out / "samples.npz")
    # Classes drawn from the seeds become part of the file name.
    drawn_classes = images.labels() if request.labels is None else None
    last = max(pngs - 1, *request.grid)
    tiles = []
    for number, image in enumerate(chain.from_iterable(images.batches(range(last + 1)))):
        if number in request.grid:
            tiles.append(image)
        if number < pngs:
            name = request.names[number]
            if drawn_classes is not None:
                name += f"_class{drawn_classes[number]:04d}"
            save_png(image.permute(1, 2, 0).numpy(), out / "png" / f"{name}.png")
    save_png(image_grid(torch.stack(tiles), request.columns, request.row_names), out / "grid.png")
