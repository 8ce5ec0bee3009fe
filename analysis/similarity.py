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
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.runs.run_records import AnalysisError, one_by_one, result_path, with_weights
from experiments.config.routes import first_route
from experiments.evaluation.heldout import HeldOut
from experiments.runtime.files import atomic_write
from experiments.runtime.parsing import is_number, json_of
from routing import Draws, Routing, Selection
from routing.route import Route

# Noise levels sigma / alpha in units of the data's standard deviation: from almost clean to almost
# noise.
LEVELS = (0.1, 0.3, 1.0, 3.0, 10.0)
FORMAT = "tread-suite-similarity/1"
# A hundred levels of a model of 100 blocks take 8 MB.
_LARGEST = 256 * 2**20


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
        if self.samples < 1 or self.batch < 1:
            raise AnalysisError("similarity needs at least 1 sample and a batch of at least 1")
        if not 0 <= self.seed < 2**63:
            raise AnalysisError(f"similarity seed {self.seed}: a whole number of 0 or more")
        if not self.levels or not all(0 < level < math.inf for level in self.levels):
            raise AnalysisError("similarity needs noise levels above 0, such as 0.1 1 10")


@dataclass(frozen=True, eq=False)
class SimilarityFile:
    """Similarity of one run's blocks."""

    # `cosine` (D+1, D+1), index 0 the input; options: `per_level` (levels, D+1, D+1), `centred`,
    # `cka`, `routed`, `stayed`.
    arrays: dict[str, np.ndarray]
    # How they were computed, JSON-able (run, backbone, route, levels, samples, ...).
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def route(self) -> str:
        """Resolved route of the run."""
        return str(self.protocol["route"])

    @property
    def model(self) -> str:
        """Backbone and size."""
        return "{backbone}-{size}".format_map(self.protocol)

    @property
    def label(self) -> str:
        """Backbone, size and route."""
        text = "dense" if self.route == "none" else f"route {self.route}"
        return f"{self.model}, {text}"

    def protocol_line(self) -> str:
        """Return the protocol in one sentence."""
        levels = ", ".join(f"{v:.3g}" for v in self.protocol["levels"])
        about = "{weights} weights in eval mode, all tokens, {samples} held-out samples"
        return f"Protocol: {about.format_map(self.protocol)}, noise levels sigma/alpha {levels}."

    def save(self, path: str | Path) -> None:
        """Write the arrays and the protocol."""
        stream = io.BytesIO()
        text = json.dumps({"format": FORMAT, **self.protocol}, sort_keys=True)
        np.savez_compressed(stream, protocol=np.array(text), **self.arrays)  # type: ignore[arg-type]
        atomic_write(path, stream.getvalue())


def read(path: str | Path) -> SimilarityFile:
    """Read a similarity file; `AnalysisError` if it is not one."""
    try:
        # numpy leaves a file open that it cannot read: this one is closed here.
        with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if sum(info.file_size for info in stored.zip.infolist()) > _LARGEST:
                raise ValueError("unpacks to more than a similarity file can hold")
            protocol = json_of(str(stored["protocol"]))
            arrays = {key: stored[key] for key in stored.files if key != "protocol"}
            if not isinstance(protocol, dict) or protocol.pop("format", None) != FORMAT:
                raise ValueError(f"not of the format {FORMAT}")
            _check(arrays, protocol)
    except Exception as error:
        # Zip, zlib, numpy's parser of headers and JSON raise a dozen types between them.
        raise AnalysisError(
            f"{path} is not a {FORMAT} file ({type(error).__name__}); "
            "make one with python -m analysis similarity RUN"
        ) from None
    return SimilarityFile(arrays, protocol)


def _check(arrays: dict[str, np.ndarray], protocol: dict[str, Any]) -> None:
    """Raise `ValueError` where a map, or what a figure says of it, is not what `measure` stores."""
    texts = ("run", "backbone", "size", "data", "route", "weights")
    levels = protocol.get("levels")
    if (
        not all(isinstance(protocol.get(name), str) for name in texts)
        or not isinstance(levels, list)
        or not all(is_number(value) for value in (*levels, protocol.get("samples")))
    ):
        raise ValueError("its protocol is not whole")
    layers = len(arrays["cosine"])
    for name, values in arrays.items():
        square = values.shape[-2:] == (layers, layers) and values.ndim == 2 + (name == "per_level")
        if layers < 2 or not square or values.dtype.kind != "f" or not np.isfinite(values).any():
            raise ValueError(f"{name} is no map of {layers} layers")
    Route.parse(protocol["route"]).resolve(layers - 1)


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
    if size := data.dataset.sizes.get("test"):
        protocol = replace(protocol, samples=min(protocol.samples, size))
    route = first_route(data.config)
    sums: dict[Any, Tensor] = {}
    counts: Counter[Any] = Counter()
    with torch.inference_mode():
        for name, value, count in _products(data, protocol, route):
            sums[name] = sums.get(name, 0) + value.cpu()
            counts[name] += count
    means = {name: (total / counts[name]).numpy() for name, total in sums.items()}
    maps = np.stack([means.pop(place) for place in range(len(protocol.levels))])
    arrays = {"cosine": maps.mean(axis=0)} | ({"per_level": maps} if protocol.per_level else {})
    if protocol.centred:
        products = means.pop("hsic")
        own = np.sqrt(np.clip(np.diag(products), 1e-30, None))
        arrays["cka"] = products / own[:, None] / own[None, :]
    config = data.config
    return SimilarityFile(arrays | means, {
        "run": Path(run).name, "backbone": config.backbone["name"], "size": config.size,
        "data": config.data["name"], "route": str(route), "seed_of_run": config.seed,
        "step": data.step, "weights": protocol.weights, "samples": protocol.samples,
        "batch": protocol.batch, "noise_seed": protocol.seed, "split": "test",
        "levels": list(protocol.levels),
        "level_unit": "sigma / alpha over the data's standard deviation",
        "tokens": "all grid tokens, eval mode; prefix tokens left out",
        "layers": "index 0 is the input of block 0, index i + 1 the output of block i",
        "average": "per token over channels, then tokens, samples and levels alike",
    })  # fmt: skip


def _products(data: HeldOut, protocol: Protocol, route: Route) -> Iterator[tuple[Any, Tensor, int]]:
    """Yield what is summed over samples and levels: its name, its value, how many it is the sum of.

    The cosines of a level have its place as their name.
    """
    for part in torch.arange(protocol.samples).split(protocol.batch):
        found = data.sample(part, seed=protocol.seed, stream="similarity")
        for place, level in enumerate(protocol.levels):
            given = (*data.noisy(found, level), found.cond)
            hidden, _ = _hidden(data, None, *given)
            tokens = hidden[0].shape[0] * hidden[0].shape[1]
            yield place, cosine(hidden), tokens
            if protocol.centred:
                yield "centred", cosine(centre(hidden)), tokens
                # At most 2,048 tokens, evenly: a kernel matrix needs their square.
                some = [h.flatten(0, 1)[:: math.ceil(tokens / 2048)] for h in hidden]
                yield "hsic", hsic(some), 1
            if protocol.routed:
                hidden, stayed = _routed(data, route, found.draws, given)
                for name, mask in (("routed", ~stayed), ("stayed", stayed)):
                    if mask.any():
                        yield name, cosine([h[mask].unsqueeze(0) for h in hidden]), int(mask.sum())


def _hidden(
    data: HeldOut, routing: Any, noisy: Tensor, time: Tensor, conditions: dict[str, Any]
) -> tuple[list[Tensor], list[Any]]:
    """Return the input and every block's output, (B, T, D), and who stayed in each segment."""
    found: list[Tensor] = []
    inner: list[Any] = []
    model, places = data.model, tuple(range(-1, data.model.depth))

    def net(x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        output = model(x, t, taps=places, return_output=True, routing=routing, **cond)
        found.extend(output.taps[i][:, model.prefix :] for i in places)
        inner.extend(output.inner)
        return output.sample

    data.objective.predict(net, noisy, time, **conditions)
    return found, inner


def _routed(data: HeldOut, route: Route, draws: Draws, given: Any) -> tuple[list[Tensor], Tensor]:
    """Return a routed pass, skipping tokens as they were at the route's start, and who stayed."""
    options = data.config.routing
    selection = Selection(options.selection, options.shared, options.block)
    hidden, inner = _hidden(data, Routing(route, selection, draws), *given)
    stayed = torch.ones(hidden[0].shape[:2], dtype=torch.bool, device=data.device)
    for segment, layout in zip(route.segments, inner, strict=True):
        stayed &= layout.mask()
        # Index 0 of `hidden` is the input, so this is the state right before the route.
        entry = hidden[segment.start]
        where = layout.ids.unsqueeze(-1).expand(len(entry), -1, entry.shape[-1])
        for block in range(segment.start, segment.end + 1):
            hidden[block + 1] = entry.scatter(1, where, hidden[block + 1].to(entry.dtype))
    return hidden, stayed


def command(options: argparse.Namespace) -> int:
    """Measure every run with weights below the folders given; store the arrays, draw the map.

    Both go to the run's folder, of an exported file to the current one.
    """
    # The figures import this module.
    from analysis.figures.layer_maps import similarity as draw

    given = vars(options) | {"levels": tuple(options.levels or LEVELS)}
    protocol = Protocol(**{option.name: given[option.name] for option in fields(Protocol)})

    def stored(folder: Path) -> None:
        result = measure(folder, protocol)
        path = result_path(folder, "similarity.npz")
        picture = path.with_suffix(".png")
        result.save(path)
        atomic_write(picture, draw([result]).png(dpi=200))
        lowest = result.arrays["cosine"].min()
        print(f"{path}  {result.label}, lowest {lowest:.3f}, map in {picture.name}")

    one_by_one(with_weights(options.runs), stored)
    return 0
