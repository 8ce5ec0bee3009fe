"""Similarity arrays on disk: an `.npz` with the arrays and the protocol as JSON text.

Nothing in it is unpickled.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.runs.run_records import AnalysisError
from experiments.runtime.files import atomic_write

FORMAT = "tread-suite-similarity/1"
# A hundred levels of a model of 100 blocks take 8 MB.
_LARGEST = 256 * 2**20


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
            protocol = json.loads(str(stored["protocol"]))
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
