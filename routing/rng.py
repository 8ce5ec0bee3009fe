"""Random numbers that depend on (seed, step, sample index, stream) and on nothing else.

A counter-based generator has no state to lose: the numbers of sample 17 at step 900 are the same
after a resume, on any device, at any world size, and however the batch was split. The generator is
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written in
operations of integers and int64 tensors alike; the key is a hash of (seed, stream), the counter is
(block of four numbers, sample index low, sample index high, step).
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
WITHOUT_FLOAT64 = ("mps",)  # Apple's GPUs
_ROUNDS = 10


def philox(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """One Philox4x32-10 block, or many at once.

    Args:
        counter: Four words below 2**32: plain integers, int64 tensors that broadcast, or both.
        key: Two 32-bit words.

    Returns:
        Four words; tensors where the counter has any.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product may wrap in int64: its 64 bits are right, and only bits are used.
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1 = (p1 >> 32 & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = (p0 >> 32 & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3


@lru_cache(maxsize=4096)
def _key(seed: int, stream: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where the device has no wider one."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def _moved(x: Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Move a tensor; to a GPU without waiting for it (the other way there is no choice)."""
    return x.to(device, dtype, non_blocking=device.type == "cuda")


@lru_cache(maxsize=1)
def kernel() -> Callable[..., Tensor] | None:
    """Return the kernel that draws words in one launch on a GPU, or None without one or Triton."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return None
    from routing.philox_triton import words  # Triton takes a second to import

    return words


class Draws:
    """The random numbers of one step for a batch of samples.

    Args:
        seed: The run's seed.
        step: The step, from 0.
        index: Which samples of the global batch these are, int64 of shape `(B,)`; on the CPU, where
            a device would have to be waited for to read it.
        device: Where numbers are wanted; the index's device if not given.
    """

    def __init__(
        self, seed: int, step: int, index: Tensor, device: torch.device | str | None = None
    ) -> None:
        self.seed, self.step = int(seed), int(step)
        self.device = torch.device(device) if device is not None else index.device
        self._index = index
        self._batch: int | None = None

    def on(self, device: torch.device | str) -> Draws:
        """The same numbers on another device."""
        draws = Draws(self.seed, self.step, self._index, device)
        draws._batch = self._batch
        return draws

    def uniform(self, stream: str, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform numbers in [0, 1), shape `(B, n)`; a larger n leaves the first ones unchanged.

        Args:
            stream: What they are for; streams are independent of each other.
            n: How many for each sample.
            dtype: float32 holds the word's upper 24 bits, float64 all of its 32.
        """
        bits = self._words(stream, n)
        if dtype == torch.float64:
            return self._out(bits.double().mul_(2.0**-32))
        return self._out((bits >> 8).to(torch.float32).mul_(2.0**-24))

    def normal(
        self, stream: str, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Standard normal numbers, shape `(B, *shape)`, by the Box-Muller transform."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        n = math.prod(shape)
        # Computed in float64 and rounded once, so that devices agree although their logarithms
        # and cosines differ in the last bit.
        bits = self._words(stream, n + n % 2).double()
        radius = bits[:, 0::2].add(1.0).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = bits[:, 1::2].mul(2.0**-31 * math.pi)
        pair = torch.stack((angle.cos().mul_(radius), angle.sin().mul_(radius)), -1)
        return self._out(pair.flatten(1)[:, :n].to(dtype)).unflatten(1, shape)

    def integers(self, stream: str, n: int, high: int) -> Tensor:
        """Whole numbers in 0..high-1, int64 of shape `(B, n)`; high is at most 2**31."""
        return self._out((self._words(stream, n) * high) >> 32)

    def scalar(self, stream: str) -> float:
        """One uniform number in [0, 1) for the whole batch, computed on the host without a sync."""
        bits = philox((0, 0, 0, self.step & _WORD), _key(self.seed, stream))[0]
        return bits * 2.0**-32

    def shared(self) -> Draws:
        """The same numbers for the whole batch, those of sample 0."""
        draws = Draws(self.seed, self.step, self._index.new_zeros(1), self.device)
        draws._batch = self.batch
        return draws

    @property
    def batch(self) -> int:
        """The batch size B."""
        return self._index.shape[0] if self._batch is None else self._batch

    def _words(self, stream: str, n: int) -> Tensor:
        """Return 32-bit words as int64, shape `(B, n)`, or `(1, n)` where shared."""
        # float64 is needed and Apple's GPUs have none.
        device = torch.device("cpu") if self.device.type in WITHOUT_FLOAT64 else self.device
        index, key = _moved(self._index, device), _key(self.seed, stream)
        launch = kernel() if device.type == "cuda" else None
        if launch is not None:
            return launch(index, n, self.step & _WORD, key)
        blocks = torch.arange((n + 3) // 4, device=device)
        low, high = (index & _WORD).unsqueeze(1), (index >> 32 & _WORD).unsqueeze(1)
        bits = philox((blocks, low, high, self.step & _WORD), key)
        return torch.stack(torch.broadcast_tensors(*bits), -1).flatten(1)[:, :n]

    def _out(self, values: Tensor) -> Tensor:
        values = _moved(values, self.device, values.dtype)
        return values if self._batch is None else values.expand(self._batch, *values.shape[1:])
