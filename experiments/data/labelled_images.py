"""Labelled images as the readers of data sets return them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

#: Images (N, C, h, w) uint8, and their labels (N,).
Split: TypeAlias = tuple[np.ndarray, np.ndarray]


class LabelledImages(NamedTuple):
    """Contents of the files of a data set."""

    splits: dict[str, Split]  # `train` and `test`
    class_names: Sequence[str]  # one name per class
    white: int = 255  # largest pixel value
    fingerprint: str = ""  # identity of the contents; empty: a checksum of the splits
