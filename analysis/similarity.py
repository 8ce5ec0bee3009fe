"""How alike the blocks of a trained model are (TREAD, Fig. 4), for any run of any backbone.

The paper does not publish its protocol, so this is ours, and it is stored with the result. For
every held-out sample x0 and every noise level of a fixed grid, x_t is made as in training and goes
through the averaged weights in eval mode with all tokens. For the input h_{-1} of block 0 and the
outputs h_0 .. h_{D-1},

    S[i, j] = mean over levels, samples and tokens n of  <h_i[n], h_j[n]> / (|h_i[n]| |h_j[n]|),

the cosine over channels per token, averaged. Prefix (text) tokens do not count. Everything is
summed batch by batch in float64, so memory does not grow with the samples and the largest sizes
fit.

Options: `centred` takes each channel's mean over the batch's tokens away first and is returned with
linear CKA (the unbiased estimator of HSIC, Song et al. 2012, per batch of tokens as in Nguyen et
al. 2021); `routed` runs the pass with the run's route instead and keeps tokens that took it apart
from those that stayed.

The result is an `.npz` with the arrays and the protocol as JSON text; nothing in it is unpickled.
Beside `analysis.guidance_scale` this is the one module of `analysis` that reads models.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.errors import AnalysisError
from analysis.figures.layer_maps import similarity as draw_maps
from analysis.measured import check_protocol, one_by_one, result_path, with_weights
from analysis.similarity_file import SimilarityFile, read
from experiments.evaluation.heldout import HeldOut
from experiments.runtime.files import atomic_write
from routing import Draws, Routing, Selection
from routing.errors import require
from routing.route import Route

# Noise levels sigma / alpha in units of the data's standard deviation: from almost clean to almost
# noise.
LEVELS = (0.1, 0.3, 1.0, 3.0, 10.0)
__all__ = ["LEVELS", "Protocol", "SimilarityFile", "centre", "cosine", "hsic", "measure", "read"]
_MOST_KERNEL_TOKENS = 2048  # of a kernel matrix, which needs their square


@dataclass(frozen=True)
class Protocol:
    """What is averaged over."""

    levels: tuple[float, ...] = LEVELS  # sigma / alpha over the data's standard deviation
    samples: int = 64  # held-out ones, the same for every level and run
    batch: int = 16  # samples per pass
    seed: int = 0  # of the noise (and of the route's subset with `routed`)
    weights: str = "ema"  # or `raw`
    centred: bool = False  # also centred cosine and CKA
    per_level: bool = False  # also one map per noise level
    routed: bool = False  # also the routed pass, tokens on the route apart from those that stayed

    def __post_init__(self) -> None:
        check_protocol("similarity", self.levels, self.samples, self.batch)
        text = f"similarity --seed {self.seed}: expected a whole number of 0 or more"
        require(0 <= self.seed < 2**63, text, AnalysisError)


def cosine(hidden: Sequence[Tensor]) -> Tensor:
    """Return the cosine of every two of L layers (B, T, D), summed over their tokens: (L, L)."""
    total = torch.zeros(len(hidden), len(hidden), dtype=torch.float64, device=hidden[0].device)
    for layers in zip(*hidden, strict=True):  # all samples in float64 would be much memory
        unit = torch.nn.functional.normalize(torch.stack(layers).double(), dim=-1, eps=1e-12)
        total += unit.flatten(1) @ unit.flatten(1).T
    return total


def centre(hidden: Sequence[Tensor]) -> list[Tensor]:
    """Take each channel's mean over the batch and its tokens away: (B, T, D) each."""
    return [h - h.mean(dim=(0, 1), keepdim=True) for h in hidden]


def hsic(hidden: Sequence[Tensor]) -> Tensor:
    """Return the unbiased linear HSIC of every two of L layers, (L, L) (Song et al. 2012).

    Each is (M, D), of M > 3 tokens.
    """
    layers = torch.stack(list(hidden)).double()
    kernels = layers @ layers.mT
    kernels.diagonal(dim1=1, dim2=2).zero_()
    m, sums = kernels.shape[1], kernels.sum(1)
    trace = kernels.flatten(1) @ kernels.flatten(1).T
    outer = torch.outer(sums.sum(1), sums.sum(1)) / ((m - 1) * (m - 2))
    return (trace + outer - 2.0 / (m - 2) * sums @ sums.T) / (m * (m - 3))


def measure(
    run: str | Path, protocol: Protocol | None = None, device: str | None = None
) -> SimilarityFile:
    """Measure a run.

    Args:
        run: Run folder or exported weights.
        protocol: What to average over; None is the default protocol.
        device: Where to compute; None is CUDA where there is one.

    A run without a route has no routed pass, whatever the protocol says. `UserError` says what
    `HeldOut.open` refuses.
    """
    protocol = protocol or Protocol()
    data = HeldOut.open(run, weights=protocol.weights, device=device)
    routed = protocol.routed and data.config.resolved_route != "none"
    protocol = replace(protocol, routed=routed)
    size = data.dataset.sizes.get("test")
    if size:
        protocol = replace(protocol, samples=min(protocol.samples, size))
    means = _means(data, protocol)
    levels = [means.pop(index) for index in range(len(protocol.levels))]
    maps = np.stack(levels)
    arrays = {"cosine": maps.mean(axis=0)}
    if protocol.per_level:
        arrays["per_level"] = maps
    if protocol.centred:
        products = means.pop("hsic")
        norms = np.sqrt(np.clip(np.diag(products), 1e-30, None))
        arrays["cka"] = products / norms[:, None] / norms[None, :]
    config = data.config
    return SimilarityFile(arrays | means, {
        "run": Path(run).name, "backbone": config.backbone["name"], "size": config.size,
        "data": config.data["name"], "route": str(config.first_route), "seed_of_run": config.seed,
        "step": data.step, "weights": protocol.weights, "samples": protocol.samples,
        "batch": protocol.batch, "noise_seed": protocol.seed, "split": "test",
        "levels": list(protocol.levels),
        "level_unit": "sigma / alpha over the data's standard deviation",
        "tokens": "all grid tokens, eval mode; prefix tokens left out",
        "layers": "index 0 is the input of block 0, index i + 1 the output of block i",
        "average": "per token over channels, then tokens, samples and levels alike",
    })  # fmt: skip


def _means(data: HeldOut, protocol: Protocol) -> dict[Any, np.ndarray]:
    """Return what `_products` yields, averaged over samples."""
    sums: dict[Any, Tensor] = {}
    counts: Counter[Any] = Counter()
    with torch.inference_mode():
        for name, value, count in _products(data, protocol, data.config.first_route):
            sums[name] = sums.get(name, 0) + value.cpu()
            counts[name] += count
    return {name: (total / counts[name]).numpy() for name, total in sums.items()}


def _products(data: HeldOut, protocol: Protocol, route: Route) -> Iterator[tuple[Any, Tensor, int]]:
    """Yield what is summed over samples and levels: name, value and number of summands.

    The name of a level's cosines is the level's index.
    """
    for batch in torch.arange(protocol.samples).split(protocol.batch):
        held_out = data.sample(batch, seed=protocol.seed, stream="similarity")
        for index, level in enumerate(protocol.levels):
            noisy, time = data.noisy(held_out, level)
            hidden, _ = _hidden(data, None, noisy, time, held_out.cond)
            tokens = hidden[0].shape[0] * hidden[0].shape[1]
            yield index, cosine(hidden), tokens
            if protocol.centred:
                yield "centred", cosine(centre(hidden)), tokens
                stride = math.ceil(tokens / _MOST_KERNEL_TOKENS)
                yield "hsic", hsic([layer.flatten(0, 1)[::stride] for layer in hidden]), 1
            if protocol.routed:
                hidden, stayed = _routed(data, route, held_out.draws, noisy, time, held_out.cond)
                for name, mask in (("routed", ~stayed), ("stayed", stayed)):
                    if mask.any():
                        layers = [layer[mask].unsqueeze(0) for layer in hidden]
                        yield name, cosine(layers), int(mask.sum())


def _hidden(
    data: HeldOut, routing: Any, noisy: Tensor, time: Tensor, conditions: dict[str, Any]
) -> tuple[list[Tensor], list[Any]]:
    """Return the input and every block's output, (B, T, D), and who stayed in each segment."""
    hidden: list[Tensor] = []
    layouts: list[Any] = []
    model, blocks = data.model, tuple(range(-1, data.model.depth))

    def net(x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        output = model(x, t, taps=blocks, return_output=True, routing=routing, **cond)
        for block in blocks:
            hidden.append(output.taps[block][:, model.prefix :])
        layouts.extend(output.inner)
        return output.sample

    data.objective.predict(net, noisy, time, **conditions)
    return hidden, layouts


def _routed(
    data: HeldOut, route: Route, draws: Draws, noisy: Tensor, time: Tensor, cond: dict[str, Any]
) -> tuple[list[Tensor], Tensor]:
    """Return a routed pass, skipping tokens as they were at the route's start, and who stayed."""
    options = data.config.routing
    selection = Selection(options.selection, options.shared, options.block)
    hidden, layouts = _hidden(data, Routing(route, selection, draws), noisy, time, cond)
    stayed = torch.ones(hidden[0].shape[:2], dtype=torch.bool, device=data.device)
    for segment, layout in zip(route.segments, layouts, strict=True):
        stayed &= layout.mask()
        # Index 0 of `hidden` is the input, so this is the state right before the route.
        entry = hidden[segment.start]
        ids = layout.ids.unsqueeze(-1).expand(len(entry), -1, entry.shape[-1])
        for block in range(segment.start, segment.end + 1):
            hidden[block + 1] = entry.scatter(1, ids, hidden[block + 1].to(entry.dtype))
    return hidden, stayed


def pairs(runs: pd.DataFrame, protocol: Protocol | None = None) -> list[SimilarityFile]:
    """Return the similarity of the longest dense and routed run of every backbone.

    Args:
        runs: What `analysis.load` returned.
        protocol: How runs without a stored `similarity.npz` are measured.

    Of several seeds the lowest counts, of several routes the most frequent one at rate 0.5. Runs
    with neither a stored result nor weights are left out.
    """
    readable = []
    for path in map(Path, map(str, runs["path"])):
        names = ("similarity.npz", "model.safetensors")
        readable.append(any((path / name).is_file() for name in names))
    runs = runs[readable]
    runs = runs[runs["seed"] == runs["seed"].min()]
    routes = runs.loc[(runs["method"] == "TREAD") & (runs["rate"] == 0.5), "route"]
    runs = runs[runs["route"].isin(["none", *routes.mode().head(1)])]
    runs = runs.sort_values(["step", "data"], ascending=False, kind="stable")
    runs = runs.drop_duplicates(["backbone", "route"]).sort_values(["backbone", "route"])
    results = []
    for path in map(Path, map(str, runs["path"])):
        stored = path / "similarity.npz"
        results.append(read(stored) if stored.is_file() else measure(path, protocol))
    return results


def command(options: argparse.Namespace) -> int:
    """Measure every run with weights below the folders given; store the arrays, draw the map.

    Both go to the run's folder, of an exported file to the current one.
    """
    values = vars(options) | {"levels": tuple(options.levels or LEVELS)}
    protocol = Protocol(**{option.name: values[option.name] for option in fields(Protocol)})

    def measure_and_store(folder: Path) -> None:
        result = measure(folder, protocol)
        path = result_path(folder, "similarity.npz")
        picture = path.with_suffix(".png")
        result.save(path)
        atomic_write(picture, draw_maps([result]).png(dpi=200))
        lowest = result.arrays["cosine"].min()
        print(f"{path}  {result.label}, lowest {lowest:.3f}, map in {picture.name}")

    one_by_one(with_weights(options.runs), measure_and_store)
    return 0
