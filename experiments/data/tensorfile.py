"""Tensors in a safetensors file, mapped into memory: nothing is read until it is indexed.

The format (8 bytes of header length, a JSON header, raw little-endian data) is parsed here rather
than
by the library because random rows of a mapped tensor are what training needs, and because a damaged
file deserves one sentence that names it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from experiments.data.data_options import DataError
from routing.plain import json_of

_TYPES = {
    "F64": (torch.float64, 8),
    "F32": (torch.float32, 4),
    "F16": (torch.float16, 2),
    "BF16": (torch.bfloat16, 2),
    "I64": (torch.int64, 8),
    "I32": (torch.int32, 4),
    "I16": (torch.int16, 2),
    "I8": (torch.int8, 1),
    "U8": (torch.uint8, 1),
    "BOOL": (torch.bool, 1),
}
_HEADER_LIMIT = 100_000_000


def map_file(path: Path) -> Tensor:
    """Return a file's bytes as a uint8 tensor that reads them as they are touched.

    The mapping is private: writing to it would not change the file. It holds no file descriptor, of
    which a process has 1024 and ImageNet's shards may be more.
    """
    size = path.stat().st_size
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise DataError(f"{path} cannot be mapped: {str(error).splitlines()[0]}") from None


class TensorFile:
    """A safetensors file whose tensors are views of the file.

    Args:
        path: The file.

    Raises:
        DataError: The file is missing, truncated or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as handle:
                prefix = handle.read(8)
                length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
                if length > min(size, _HEADER_LIMIT):
                    raise DataError(
                        f"{path} is no safetensors file, or only its first bytes arrived"
                    )
                header = json_of(handle.read(length))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path} has a damaged header: it is no safetensors file") from None
        self._start = 8 + length
        self._entries = _entries(path, header)
        needed = self._start + max((end for *_, end in self._entries.values()), default=0)
        if size < needed:
            raise DataError(
                f"{path} is truncated: its header promises {needed} bytes and {size} are there; "
                "copy it again, or delete it and rerun prepare"
            )
        self._bytes: Tensor | None = None
        self._views: dict[str, Tensor] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without mapping it."""
        return self._entries[name][1]

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type without mapping it."""
        return self._entries[name][0]

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor that reads the file as it is indexed; do not write to it."""
        if name not in self._views:
            dtype, shape, begin, end = self._entries[name]
            if begin == end:
                self._views[name] = torch.empty(shape, dtype=dtype)
                return self._views[name]
            if self._bytes is None:
                self._bytes = map_file(self.path)
            data = self._bytes[self._start + begin : self._start + end]
            if (self._start + begin) % dtype.itemsize:
                data = data.clone()
            self._views[name] = data.view(dtype).view(shape)
        return self._views[name]


def _entries(
    path: Path, header: object
) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    entries = {}
    try:
        assert isinstance(header, dict)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, size = _TYPES[entry["dtype"]]
            shape = tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            whole = [*shape, begin, end]
            assert all(type(value) is int and value >= 0 for value in whole)
            assert end - begin == math.prod(shape) * size
            entries[name] = (dtype, shape, begin, end)
    except (AssertionError, KeyError, TypeError, ValueError):
        raise DataError(f"{path} has a damaged header: it is no safetensors file") from None
    return entries
