"""How alike the blocks of a trained model are (TREAD, Fig. 4), for any run of any backbone.

The paper does not publish its protocol, so this is ours, and it is stored with the result. For
every held-out sample x0 and every noise level of a fixed grid, x_t is made as in training and goes
through the averaged weights in eval mode with all tokens. For the input h_{-1} of block 0 and the
outputs h_0 .. h_{D-1},

    S[i, j] = mean over levels, samples and tokens n of  <h_i[n], h_j[n]> / (|h_i[n]| |h_j[n]|),

the cosine over channels per token, averaged. Prefix (text) tokens do not count. Everything is
summed batch by batch in float64, so memory does not grow with the samples and the largest sizes
fit.

The result is an `.npz` with the map and the protocol as JSON text; nothing in it is unpickled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.errors import AnalysisError
from analysis.measurements.measured import check_protocol
from analysis.measurements.similarity_file import SimilarityFile, read
from experiments.evaluation.heldout import HeldOut
from routing.errors import require

# Noise levels sigma / alpha in units of the data's standard deviation: from almost clean to almost
# noise.
LEVELS = (0.1, 0.3, 1.0, 3.0, 10.0)
__all__ = ["LEVELS", "Protocol", "SimilarityFile", "cosine", "measure", "read"]


@dataclass(frozen=True)
class Protocol:
    """What is averaged over."""

    levels: tuple[float, ...] = LEVELS  # sigma / alpha over the data's standard deviation
    samples: int = 64  # held-out ones, the same for every level and run
    batch: int = 16  # samples per pass
    seed: int = 0  # of the noise
    weights: str = "ema"  # or `raw`

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


def measure(
    run: str | Path, protocol: Protocol | None = None, device: str | None = None
) -> SimilarityFile:
    """Measure a run.

    Args:
        run: Run folder or exported weights.
        protocol: What to average over; None is the default protocol.
        device: Where to compute; None is CUDA where there is one.

    Raises:
        UserError: What `HeldOut.open` refuses.
    """
    protocol = protocol or Protocol()
    data = HeldOut.open(run, weights=protocol.weights, device=device)
    size = data.dataset.sizes.get("test")
    if size:
        protocol = replace(protocol, samples=min(protocol.samples, size))
    config = data.config
    return SimilarityFile(_mean_cosine(data, protocol), {
        "run": Path(run).name, "backbone": config.backbone.name, "size": config.size,
        "data": config.data.name, "route": str(config.first_route), "seed_of_run": config.seed,
        "step": data.step, "weights": protocol.weights, "samples": protocol.samples,
        "batch": protocol.batch, "noise_seed": protocol.seed, "split": "test",
        "levels": list(protocol.levels),
        "level_unit": "sigma / alpha over the data's standard deviation",
        "tokens": "all grid tokens, eval mode; prefix tokens left out",
        "layers": "index 0 is the input of block 0, index i + 1 the output of block i",
        "average": "per token over channels, then tokens, samples and levels alike",
    })  # fmt: skip


@torch.inference_mode()
def _mean_cosine(data: HeldOut, protocol: Protocol) -> np.ndarray:
    """Return the cosine of every two layers, averaged over samples, noise levels and tokens."""
    total: Any = 0.0
    tokens = 0
    for batch in torch.arange(protocol.samples).split(protocol.batch):
        held_out = data.sample(batch, seed=protocol.seed, stream="similarity")
        for level in protocol.levels:
            noisy, time = data.noisy(held_out, level)
            hidden = _hidden(data, noisy, time, held_out.cond)
            total = total + cosine(hidden).cpu()
            tokens += hidden[0].shape[0] * hidden[0].shape[1]
    return np.asarray(total / tokens)


def _hidden(data: HeldOut, noisy: Tensor, time: Tensor, conditions: dict[str, Any]) -> list[Tensor]:
    """Return the input and the output of every block in a dense pass, (B, T, D) each."""
    hidden: list[Tensor] = []
    model, blocks = data.model, tuple(range(-1, data.model.depth))

    def net(x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        output = model(x, t, taps=blocks, return_output=True, routing=None, **cond)
        for block in blocks:
            hidden.append(output.taps[block][:, model.prefix :])
        return output.sample

    data.objective.predict(net, noisy, time, **conditions)
    return hidden


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
