"""One block of each family by number of tokens: where attention stops being the cheapest.

Forward and backward of a middle block, in turn. Beside the time, what a block keeps for its
backward pass, per token: the same at every length if memory is linear in tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import backbones
from backbones.sizes import parse_size
from experiments.benchmark.bench_options import BenchOptions
from experiments.benchmark.step_times import interleave, kept_bytes
from routing.layout import Layout

# Tokens times channels in a batch: the same work for linear operators at all lengths.
VALUES = 1 << 21


class BlockRun:
    """Forward and backward of one block of a family, on `batch` samples of `tokens` tokens."""

    def __init__(self, name: str, size: str, tokens: int, batch: int, device: torch.device) -> None:
        side = math.isqrt(tokens)
        shape = parse_size(size)
        torch.manual_seed(0)
        model = backbones.create(
            name, size, depth=2, input_size=side * shape.patch, num_classes=0
        ).to(device)
        self.block = model.stack.blocks[1]
        self.layout = Layout((side, side), device=device)
        self.x = torch.randn(batch, tokens, shape.width, device=device, requires_grad=True)
        self.cond = torch.randn(batch, 6, 1, shape.width, device=device)

    def forward(self) -> torch.Tensor:
        """Run the block forward."""
        return self.block(self.x, self.cond, self.layout)

    def __call__(self) -> None:
        """Run the block forward and back."""
        y = self.forward()
        y.backward(y.detach())


def measure(o: BenchOptions, device: torch.device) -> list[dict[str, Any]]:
    """Time a block of every family at every length; return one row per length."""
    rows = []
    for size in o.size:
        width = parse_size(size).width
        for tokens in o.block_tokens:
            batch = max(1, VALUES // (tokens * width)) if device.type == "cpu" else o.batch
            blocks = [BlockRun(name, size, tokens, batch, device) for name in o.backbone]
            timed = interleave(blocks, o, device)
            row: dict[str, Any] = {"size": size, "tokens": tokens, "batch": batch}
            for i, (name, block) in enumerate(zip(o.backbone, blocks, strict=True)):
                kept = kept_bytes(block.forward, block.block)
                row[name] = {
                    "seconds_per_image": timed.median(i) / batch,
                    "relative": timed.ratio(i, 0),
                    "kept_bytes_per_token": kept / (batch * tokens),
                }
            rows.append(row)
    return rows


def crossings(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, int | None]:
    """Return for each family after the first the fewest tokens from which on it is cheaper."""
    found: dict[str, int | None] = {}
    for name in names[1:]:
        found[name] = None
        for row in sorted(rows, key=lambda r: r["tokens"], reverse=True):
            if row[name]["relative"] >= 1:
                break
            found[name] = row["tokens"]
    return found
