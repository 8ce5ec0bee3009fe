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

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.runs.run_records import AnalysisError
from analysis.runs.weights import beside, one_by_one, with_weights
from experiments.metrics.heldout import HeldOut
from experiments.runtime.files import atomic_write
from routing import Draws, Routing, Selection
from routing.parsing import json_of
from routing.route import Route, keep_count

# Noise levels sigma / alpha in units of the data's standard deviation: from almost clean to almost
# noise.
LEVELS = (0.1, 0.3, 1.0, 3.0, 10.0)
FORMAT = "tread-suite-similarity/1"
# A hundred levels of a model of 100 blocks take 8 MB.
_LARGEST = 256 * 2**20


@dataclass(frozen=True)
class Protocol:
    """What is averaged over.

    Attributes:
        levels: Noise levels sigma / alpha over the data's standard deviation.
        samples: Held-out samples, the same for every level and run.
        batch: Samples per pass.
        seed: Seed of the noise (and of the route's subset with `routed`).
        weights: `ema` or `raw`.
        centred: Also centred cosine and CKA.
        per_level: Also one map per noise level.
        routed: Also the routed pass, tokens that took the route apart from those that stayed.
    """

    levels: tuple[float, ...] = LEVELS
    samples: int = 64
    batch: int = 16
    seed: int = 0
    weights: str = "ema"
    centred: bool = False
    per_level: bool = False
    routed: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1 or self.batch < 1:
            raise AnalysisError("similarity needs at least 1 sample and a batch of at least 1")
        if not 0 <= self.seed < 2**63:
            raise AnalysisError(f"similarity seed {self.seed}: a whole number of 0 or more")
        if not self.levels or not all(0 < level < math.inf for level in self.levels):
            raise AnalysisError(
                "similarity needs noise levels above 0, such as levels=(0.1, 1, 10)"
            )


@dataclass(frozen=True, eq=False)
class SimilarityFile:
    """Similarity of one run's blocks.

    Attributes:
        arrays: `cosine` (D+1, D+1), index 0 the input; options: `per_level` (levels, D+1, D+1),
            `centred`, `cka`, `routed`, `stayed`.
        protocol: How they were computed, JSON-able (run, backbone, route, levels, samples, ...).
    """

    arrays: dict[str, np.ndarray]
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def backbone(self) -> str:
        """Backbone of the run."""
        return str(self.protocol["backbone"])

    @property
    def route(self) -> str:
        """Resolved route of the run."""
        return str(self.protocol["route"])

    @property
    def label(self) -> str:
        """Backbone, size and route."""
        text = "dense" if self.route == "none" else f"route {self.route}"
        return f"{self.backbone}-{self.protocol['size']}, {text}"

    def protocol_line(self) -> str:
        """Return the protocol in one sentence."""
        p = self.protocol
        levels = ", ".join(f"{v:.3g}" for v in p["levels"])
        return (
            f"Protocol: {p['weights']} weights in eval mode, all tokens, {p['samples']} held-out "
            "samples, noise levels "
            f"sigma/alpha {levels}."
        )

    def save(self, path: str | Path) -> None:
        """Write the arrays and the protocol."""
        stream = io.BytesIO()
        text = json.dumps({"format": FORMAT, **self.protocol}, sort_keys=True)
        np.savez_compressed(stream, protocol=np.array(text), **self.arrays)  # type: ignore[arg-type]
        atomic_write(path, stream.getvalue())


def read(path: str | Path) -> SimilarityFile:
    """Read a similarity file.

    Raises:
        AnalysisError: if it is not one.
    """
    try:
        # numpy leaves a file open that it cannot read: this one is closed here.
        with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if sum(info.file_size for info in stored.zip.infolist()) > _LARGEST:
                raise ValueError("unpacks to more than a similarity file can hold")
            protocol = json_of(str(stored["protocol"]))
            arrays = {key: stored[key] for key in stored.files if key != "protocol"}
    except Exception as error:
        # Zip, zlib, numpy's parser of headers and JSON raise a dozen types between them.
        raise AnalysisError(
            f"{path} is not a similarity file ({type(error).__name__}); "
            "make one with python -m analysis similarity RUN"
        ) from None
    if not isinstance(protocol, dict) or protocol.pop("format", None) != FORMAT:
        raise AnalysisError(
            f"{path} is not a {FORMAT} file; make one with python -m analysis similarity RUN"
        )
    return SimilarityFile(arrays, protocol)


def cosine(hidden: Sequence[Tensor]) -> Tensor:
    """Return the summed per-token cosine of every two layers.

    Args:
        hidden: L tensors (B, T, D).

    Returns:
        (L, L) float64: the sum over B * T tokens; divide by their number for the mean.
    """
    total = torch.zeros(len(hidden), len(hidden), dtype=torch.float64)
    unit = [torch.nn.functional.normalize(h.double(), dim=-1, eps=1e-12) for h in hidden]
    for i, first in enumerate(unit):
        for j in range(i, len(unit)):
            total[i, j] = total[j, i] = (first * unit[j]).sum()
    return total


def centre(hidden: Sequence[Tensor]) -> list[Tensor]:
    """Take each channel's mean over the batch and its tokens away: (B, T, D) each."""
    return [h - h.mean(dim=(0, 1), keepdim=True) for h in hidden]


def hsic(hidden: Sequence[Tensor]) -> Tensor:
    """Return the unbiased linear HSIC of every two layers over tokens (Song et al. 2012).

    Args:
        hidden: L tensors (M, D): M > 3 tokens.

    Returns:
        (L, L) float64.
    """
    kernels = []
    for h in hidden:
        k = h.double() @ h.double().T
        kernels.append(k - torch.diag(torch.diag(k)))
    m = kernels[0].shape[0]
    sums = [k.sum(0) for k in kernels]
    total = torch.zeros(len(kernels), len(kernels), dtype=torch.float64)
    for i, first in enumerate(kernels):
        for j in range(i, len(kernels)):
            trace = (first * kernels[j]).sum()
            outer = sums[i].sum() * sums[j].sum() / ((m - 1) * (m - 2))
            cross = 2.0 / (m - 2) * (sums[i] * sums[j]).sum()
            total[i, j] = total[j, i] = (trace + outer - cross) / (m * (m - 3))
    return total


class _Means:
    """Running means of (L, L) sums, by name."""

    def __init__(self) -> None:
        self.sums: dict[Any, Tensor] = {}
        self.counts: Counter[Any] = Counter()

    def add(self, name: Any, value: Tensor, count: int) -> None:
        """Add a sum over `count` items."""
        self.sums[name] = self.sums.get(name, 0) + value.cpu()
        self.counts[name] += count

    def __getitem__(self, name: Any) -> np.ndarray:
        return (self.sums[name] / self.counts[name]).numpy()  # type: ignore[no-any-return]


def measure(
    run: str | Path, protocol: Protocol | None = None, device: str | None = None
) -> SimilarityFile:
    """Measure a run.

    Args:
        run: Run folder or exported weights.
        protocol: What to average over; None is the default protocol.
        device: Where to compute; None is CUDA where there is one.

    Raises:
        AnalysisError: `routed` was asked for a run without a route.
        UserError: what `HeldOut.open` refuses.
    """
    protocol = protocol or Protocol()
    data = HeldOut.open(run, weights=protocol.weights, device=device)
    work = _Measurement(data, protocol)
    if protocol.routed and work.route.is_none:
        raise AnalysisError(
            f"{run} was trained without a route: leave routed out, or give a routed run"
        )
    with torch.inference_mode():
        for start in range(0, protocol.samples, protocol.batch):
            work.batch(start, min(protocol.batch, protocol.samples - start))
    described = _described(data, protocol, run, str(work.route))
    return SimilarityFile(_arrays(work.means, protocol), described)


def _arrays(means: _Means, protocol: Protocol) -> dict[str, np.ndarray]:
    maps = np.stack([means[place] for place in range(len(protocol.levels))])
    arrays = {"cosine": maps.mean(axis=0)}
    if protocol.per_level:
        arrays["per_level"] = maps
    if protocol.centred:
        arrays["centred"] = means["centred"]
        products = means["hsic"]
        own = np.sqrt(np.clip(np.diag(products), 1e-30, None))
        arrays["cka"] = products / own[:, None] / own[None, :]
    if protocol.routed:
        arrays["routed"], arrays["stayed"] = means["routed"], means["stayed"]
    return arrays


def _described(data: HeldOut, protocol: Protocol, run: str | Path, route: str) -> dict[str, Any]:
    config = data.config
    return {
        "run": Path(run).name,
        "backbone": config.backbone["name"],
        "size": config.size,
        "data": config.data["name"],
        "route": route,
        "seed_of_run": config.seed,
        "step": data.step,
        "weights": protocol.weights,
        "levels": list(protocol.levels),
        "level_unit": "sigma / alpha over the data's standard deviation",
        "samples": protocol.samples,
        "batch": protocol.batch,
        "noise_seed": protocol.seed,
        "split": "test",
        "tokens": "all grid tokens, eval mode; prefix tokens left out",
        "layers": "index 0 is the input of block 0, index i + 1 the output of block i",
        "average": "per token over channels, then tokens, samples and levels alike",
    }


class _Measurement:
    """One measurement: the model before its data, and the running means."""

    def __init__(self, data: HeldOut, protocol: Protocol) -> None:
        self.data, self.protocol, self.model = data, protocol, data.model
        self.route = Route.parse(data.config.resolved_route)
        self.means = _Means()

    def batch(self, start: int, count: int) -> None:
        """Add `count` held-out samples from `start` on, at every noise level."""
        index = torch.arange(start, start + count)
        found = self.data.sample(index, seed=self.protocol.seed, stream="similarity")
        for place, level in enumerate(self.protocol.levels):
            noisy, time = self.data.noisy(found, level)
            run = functools.partial(self.hidden, noisy, time, found.cond)
            self._level(place, found.draws, run)

    def _level(self, place: int, draws: Draws, hidden_of: Callable[[Any], list[Tensor]]) -> None:
        hidden = hidden_of(None)
        tokens = hidden[0].shape[0] * hidden[0].shape[1]
        self.means.add(place, cosine(hidden), tokens)
        if self.protocol.centred:
            apart = centre(hidden)
            self.means.add("centred", cosine(apart), tokens)
            self.means.add("hsic", hsic([_some(h) for h in hidden]), 1)
        if self.protocol.routed:
            self._routed(draws, hidden_of)

    def hidden(
        self, noisy: Tensor, time: Tensor, conditions: dict[str, Any], routing: Any
    ) -> list[Tensor]:
        """Return the input and every block's output, (B, T, D), as the objective feeds them."""
        found: list[Tensor] = []
        places = tuple(range(-1, self.model.depth))

        def net(x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            output = self.model(x, t, taps=places, return_output=True, routing=routing, **cond)
            found.extend(output.taps[i][:, self.model.prefix :] for i in places)
            return output.sample

        self.data.objective.denoise(net, noisy, time, **conditions)
        return found

    def _routed(self, draws: Draws, hidden_of: Callable[[Any], list[Tensor]]) -> None:
        """Add one routed pass; tokens that skip have the state they had at the route's start."""
        options = self.data.config.routing
        selection = Selection(options.selection, options.shared, options.block)
        counts = [
            keep_count(self.model.num_tokens, segment.rate) for segment in self.route.segments
        ]
        ids = [
            selection.ids(draws, k, self.model.grid, count).expand(len(draws.index), -1)
            for k, count in enumerate(counts)
        ]
        hidden = hidden_of(Routing(self.route, selection, draws, ids=ids))
        stayed = torch.ones(hidden[0].shape[:2], dtype=torch.bool, device=self.data.device)
        for segment, kept in zip(self.route.segments, ids, strict=True):
            stayed &= torch.zeros_like(stayed).scatter_(1, kept, True)
            # Index 0 of `hidden` is the input, so this is the state right before the route.
            entry = hidden[segment.start]
            where = kept.unsqueeze(-1).expand(-1, -1, entry.shape[-1])
            for block in range(segment.start, segment.end + 1):
                hidden[block + 1] = entry.scatter(1, where, hidden[block + 1].to(entry.dtype))
        for name, mask in (("routed", ~stayed), ("stayed", stayed)):
            if mask.any():
                chosen = [h[mask].unsqueeze(0) for h in hidden]
                self.means.add(name, cosine(chosen), int(mask.sum()))


def _some(h: Tensor, most: int = 2048) -> Tensor:
    """Return an even subset of at most `most` tokens: a kernel matrix needs their square."""
    flat = h.reshape(-1, h.shape[-1])
    return flat[:: max(1, math.ceil(flat.shape[0] / most))]


def command(options: argparse.Namespace) -> int:
    """Measure every run with weights below the folders given, and store it beside the weights."""
    given = vars(options) | {"levels": tuple(options.levels or LEVELS)}
    protocol = Protocol(**{option.name: given[option.name] for option in fields(Protocol)})

    def stored(folder: Path) -> None:
        routed = protocol.routed and "_none_" not in folder.name
        result = measure(folder, dataclasses.replace(protocol, routed=routed))
        path = beside(folder, "similarity.npz")
        result.save(path)
        print(f"{path}  {result.label}, lowest {result.arrays['cosine'].min():.3f}")

    one_by_one(with_weights(options.runs), stored)
    return 0
