"""Random latents to time training steps on, and weights that are not zero."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.benchmark.bench_options import BenchError
from experiments.data.data_options import DataOptions
from experiments.data.dataset import Batch, Dataset
from routing.rng import Draws

CLASSES = 1000


class RandomLatents(Dataset):
    """Normal latents (4, side, side) of 1000 classes in memory, repeated endlessly."""

    fingerprint = ""
    cannot_decode = "the benchmark's latents are random numbers"

    def __init__(self, side: int, count: int, device: torch.device) -> None:
        super().__init__(DataOptions("latents", sigma_data=1.0), device=device)
        self.shape, self.num_classes, self.sizes = (4, side, side), CLASSES, {"train": None}
        rows = torch.randn(count, *self.shape, generator=torch.Generator().manual_seed(1))
        self.x, self.y = rows.to(device), torch.arange(count, device=device) % CLASSES

    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Return latents and labels."""
        rows = (index % len(self.x)).to(self.device, non_blocking=True)
        return Batch(self.x[rows], self.y[rows])

    def to_pixels(self, x: Tensor) -> Tensor:
        """Raise `BenchError`: there is nothing to decode."""
        raise BenchError(self.cannot_decode)


@torch.no_grad()
def open_gates(model: torch.nn.Module) -> None:
    """Replace the zeros of adaLN-zero by small numbers, as after some training."""
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        if p.requires_grad and not bool(p.any()):
            noise = torch.randn(p.shape, generator=generator) * 0.02
            p.copy_(noise.to(p.device))
