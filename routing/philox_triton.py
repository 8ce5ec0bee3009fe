"""Philox4x32-10 words in one kernel launch, where torch operations take a hundred.

The generator is Triton's own (`tl.philox_impl`, the same rounds and constants as `rng.philox`), so
words equal those of `rng.philox` bit for bit.
"""

# Triton reads the signature of its kernel itself.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 256  # Philox blocks of four words per program.


# One compilation serves all: 64 bits whatever the value, and no kernel of its own for a step of 1.
@triton.jit(do_not_specialize=["blocks", "step", "key0", "key1"])
def _words(
    index_ptr, out_ptr, blocks: tl.int64, step: tl.int64, key0: tl.int64, key1: tl.int64,
    SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    sample = tl.load(index_ptr + row)
    zero = tl.zeros((SIZE,), tl.uint32)
    low = zero + (sample & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((sample >> 32) & 0xFFFFFFFF).to(tl.uint32)
    last = zero + step.to(tl.uint32)
    first, second = key0.to(tl.uint32), key1.to(tl.uint32)
    c0, c1, c2, c3 = tl.philox_impl(block.to(tl.uint32), low, high, last, first, second, 10)
    at, live = out_ptr + (row * blocks + block) * 4, block < blocks
    tl.store(at, c0.to(tl.int64), mask=live)
    tl.store(at + 1, c1.to(tl.int64), mask=live)
    tl.store(at + 2, c2.to(tl.int64), mask=live)
    tl.store(at + 3, c3.to(tl.int64), mask=live)


def words(index: Tensor, n: int, step: int, key: tuple[int, int]) -> Tensor:
    """Return 32-bit words as int64, (B, n), for samples `index` (B,) at a step under a key."""
    blocks = (n + 3) // 4
    out = torch.empty(len(index), 4 * blocks, dtype=torch.int64, device=index.device)
    grid = (len(index), triton.cdiv(blocks, BLOCKS))
    _words[grid](index, out, blocks, step, *key, SIZE=BLOCKS)
    return out[:, :n]
