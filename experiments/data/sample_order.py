"""The order of samples: a keyed permutation per epoch, whose whole state is the position.

A Feistel network over the next power of four above the size, walked until it lands inside (Black
and Rogaway, "Ciphers with arbitrary finite domains", 2002), gives the i-th sample of any epoch in
O(1), with nothing to store, to broadcast or to restore. Integers only, so every device gives the
same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.data.data_options import DataError

_WORD = 0xFFFFFFFF
_ROUNDS = 6
# Up to this size an epoch's order is kept: a lookup per batch is 200 small operations.
_SMALL = 1 << 16


def _mix(value: Tensor) -> Tensor:
    """Hash 32-bit words in int64; constants below 2^31 keep every product from overflowing."""
    value = ((value ^ (value >> 16)) * 0x45D9F3B) & _WORD
    value = ((value ^ (value >> 15)) * 0x2C1B3C6D) & _WORD
    value = ((value ^ (value >> 13)) * 0x297A2D39) & _WORD
    return value ^ (value >> 16)


class SampleOrder:
    """Which sample comes at a position of an endless training stream.

    Args:
        seed: Another seed is another order.
        size: Number of samples, or None for an endless stream, which needs no shuffling.

    Raises:
        DataError: The data set is empty.
    """

    def __init__(self, seed: int, size: int | None) -> None:
        if size is not None and not 1 <= size < 1 << 40:
            raise DataError(f"a data set of {size} samples cannot be shuffled; it needs at least 1")
        self.seed = int(seed)
        self.size = size
        halves = torch.tensor([self.seed & _WORD, (self.seed >> 32) & _WORD])
        self._key = int(_mix(_mix(halves[:1]) ^ halves[1:]))
        self._known: dict[int, Tensor] = {}
        # Small domains make a weak cipher: 6 bits at least.
        self._half = 3 if size is None else max(3, (max(size - 1, 1).bit_length() + 1) // 2)

    def lookup(self, positions: Tensor) -> Tensor:
        """Return the samples at `positions`, every sample once per epoch.

        Args:
            positions: int64, any shape: 0, 1, 2, ... counted over the whole run.

        Returns:
            Sample indices in `0..size-1`, shaped as `positions`.
        """
        if self.size is None:
            return positions
        epoch = torch.div(positions, self.size, rounding_mode="floor")
        place = positions - epoch * self.size
        if self.size > _SMALL or positions.device.type != "cpu" or not positions.numel():
            return self._walk(place, epoch)
        first, last = int(epoch.min()), int(epoch.max())
        if last - first > 1:
            return self._walk(place, epoch)
        return torch.stack([self._epoch(first), self._epoch(last)])[epoch - first, place]

    def _epoch(self, epoch: int) -> Tensor:
        """Return a whole epoch's order: at small sizes it costs little more than one batch's."""
        if epoch not in self._known:
            while len(self._known) > 1:
                del self._known[next(iter(self._known))]
            place = torch.arange(self.size or 0)
            self._known[epoch] = self._walk(place, torch.full_like(place, epoch))
        return self._known[epoch]

    def _walk(self, place: Tensor, epoch: Tensor) -> Tensor:
        value = self._permute(place, epoch)
        while bool((outside := value >= (self.size or 0)).any()):
            value = torch.where(outside, self._permute(value, epoch), value)
        return value

    def _permute(self, value: Tensor, epoch: Tensor) -> Tensor:
        mask = (1 << self._half) - 1
        # Hashed one after the other, so that (seed, epoch) and (seed + 1, epoch - 1) differ.
        key = _mix(_mix((epoch + self._key) & _WORD) ^ ((epoch >> 32) & _WORD))
        left, right = value >> self._half, value & mask
        for step in range(_ROUNDS):
            key = _mix((key + 0x6A09E667 + step) & _WORD)
            left, right = right, left ^ (_mix((right + key) & _WORD) & mask)
        return (left << self._half) | right
