"""The stored layer similarity of one run: an `.npz` with its protocol, read without torch."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.errors import AnalysisError
from backbones.parsing import is_number, json_of
from experiments.runtime.files import atomic_write
from routing.route import Route

FORMAT = "tread-suite-similarity/1"
# A hundred levels of a model of 100 blocks take 8 MB.
_LARGEST = 256 * 2**20


@dataclass(frozen=True, eq=False)
class SimilarityFile:
    """Similarity of one run's blocks."""

    # Mean cosine of every two layers, (D+1, D+1); index 0 is the input.
    cosine: np.ndarray
    # How it was computed, JSON-able (run, backbone, route, levels, samples, ...).
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

    def cosine_inside(self, route: str) -> float:
        """Return the mean cosine of every two outputs of the blocks that a route skips."""
        blocks = Route.parse(route).resolve(len(self.cosine) - 1).sparse_blocks
        pairs = []
        for first in blocks:
            for second in blocks:
                if first < second:
                    pairs.append(float(self.cosine[first + 1, second + 1]))  # index 0 is the input
        return sum(pairs) / len(pairs) if pairs else 1.0

    def neighbour_cosine(self) -> float:
        """Return the mean cosine of the outputs of neighbouring blocks, the input included."""
        return float(self.cosine.diagonal(1).mean())

    def protocol_line(self) -> str:
        """Return the protocol in one sentence."""
        levels = ", ".join(f"{v:.3g}" for v in self.protocol["levels"])
        template = "{weights} weights in eval mode, all tokens, {samples} held-out samples"
        return f"Protocol: {template.format_map(self.protocol)}, noise levels sigma/alpha {levels}."

    def save(self, path: str | Path) -> None:
        """Write the map and the protocol."""
        stream = io.BytesIO()
        text = json.dumps({"format": FORMAT, **self.protocol}, sort_keys=True)
        np.savez_compressed(stream, protocol=np.array(text), cosine=self.cosine)
        atomic_write(path, stream.getvalue())


def read(path: str | Path) -> SimilarityFile:
    """Read a similarity file; `AnalysisError` if it is not one."""
    try:
        # numpy leaves a file open that it cannot read: this one is closed here.
        with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if sum(info.file_size for info in stored.zip.infolist()) > _LARGEST:
                raise ValueError("unpacks to more than a similarity file can hold")
            protocol = json_of(str(stored["protocol"]))
            cosine = stored["cosine"]
            if not isinstance(protocol, dict) or protocol.pop("format", None) != FORMAT:
                raise ValueError(f"not of the format {FORMAT}")
            _check_protocol(protocol)
            _check_map(cosine)
            Route.parse(protocol["route"]).resolve(len(cosine) - 1)
    except Exception as error:
        # Zip, zlib, numpy's parser of headers and JSON raise a dozen types between them.
        raise AnalysisError(
            f"{path} is not a {FORMAT} file ({type(error).__name__}); "
            "make one with python -m analysis similarity RUN"
        ) from None
    return SimilarityFile(cosine, protocol)


def _check_protocol(protocol: dict[str, Any]) -> None:
    """Raise `ValueError` where the protocol lacks what figures say of a map."""
    for name in ("run", "backbone", "size", "data", "route", "weights"):
        if not isinstance(protocol.get(name), str):
            raise ValueError(f"its protocol has no {name}")
    levels = protocol.get("levels")
    numbers = [protocol.get("samples"), *levels] if isinstance(levels, list) else [None]
    if not all(map(is_number, numbers)):
        raise ValueError("its protocol has no levels or samples")


def _check_map(cosine: np.ndarray) -> None:
    """Raise `ValueError` if an array is not a square map of at least two layers."""
    is_square = cosine.ndim == 2 and cosine.shape[0] == cosine.shape[1] >= 2
    if not (is_square and cosine.dtype.kind == "f" and np.isfinite(cosine).any()):
        raise ValueError("it contains no square map of layer similarities")
