"""Procedural pictures: sample i is a function of (seed, split, i), on any device and any worker.

Shapes are signed distance functions s(p), in pixels; a pixel is covered by clamp(1/2 - s, 0, 1),
which antialiases every edge. No shape leaves its quadrant, so each quadrant is rendered alone and
the whole batch is one tensor expression. Arithmetic is float64 and ends in uint8: the last-bit
differences between devices vanish in the rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.data import scene_words as words
from experiments.data.dataset import Batch, Condition, Dataset, Rows, to_uint8
from experiments.data.scene_words import Attributes
from experiments.data.scenes_spec import ScenesOptions
from routing.rng import Draws, widest

SIDE = 32
_CELL = SIDE // 2
STREAMS = {"train": 0, "test": 1, "probe": 2}
# Radii and grey levels of neighbouring words leave a gap, so that every word can be read back.
_RADIUS = ((5.2, 6.8), (2.8, 4.0))
_INK = (
    (0.9, 0.1, 0.1),
    (0.1, 0.75, 0.15),
    (0.12, 0.2, 0.95),
    (0.95, 0.9, 0.1),
    (0.6, 0.1, 0.8),
    (0.1, 0.85, 0.9),
)
_GROUND = (0.06, 0.5, 0.94)
_STATISTICS_FROM = 1024


def choose(draws: Draws, max_shapes: int = 3) -> tuple[Attributes, Tensor]:
    """Choose what is in each picture, a row of `draws` for each.

    Returns:
        The attributes, and (B, 4, 7) uniform numbers for what words leave open: radius, x, y,
        brightness and a tint for each channel (of the background in quadrant 0's last).
    """
    u = draws.uniform("scene", 42, dtype=torch.float64)
    count = (u[:, 0] * max_shapes).long() + 1
    background = (u[:, 1] * len(words.BACKGROUNDS)).long()
    # rank[q] = 0 is the quadrant of the large shape, 1 and 2 those of small ones.
    rank = u[:, 2:6].argsort(1).argsort(1)
    present = rank < count[:, None]
    shape = (u[:, 6:10] * len(words.SHAPES)).long() + 1
    colour = (u[:, 10:14] * len(words.COLOURS)).long() + 1
    size = torch.where(rank == 0, 1, 2)
    attributes = Attributes(shape * present, colour * present, size * present, background)
    return attributes, u[:, 14:42].view(-1, 4, 7)


def _distance(shape: Tensor, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """Signed distance in pixels, (B, 4, 16, 16); `shape` and `r` are (B, 4, 1, 1)."""
    ax, ay, length = x.abs(), y.abs(), (x * x + y * y).sqrt()
    square = torch.maximum(ax, ay) - 0.85 * r
    # Apex (0, -r), base corners (+-0.95 r, 0.8 r): the sides' unit normal is (1.8, -0.95) / 2.0353.
    sides = (1.8 * ax - 0.95 * (y + r)) / 2.0353132437047623
    triangle = torch.maximum(y - 0.8 * r, sides)
    ring = (length - 0.76 * r).abs() - 0.24 * r
    bar, post = torch.maximum(ax - r, ay - 0.3 * r), torch.maximum(ax - 0.3 * r, ay - r)
    result = torch.where(shape == 1, length - r, square)
    result = torch.where(shape == 3, triangle, result)
    result = torch.where(shape == 4, ring, result)
    return torch.where(shape == 5, torch.minimum(bar, post), result)


def draw(attributes: Attributes, free: Tensor) -> Tensor:
    """Render pictures, uint8 RGB (B, 3, 32, 32); `free` (B, 4, 7) are the numbers of `choose`."""
    radii = words.constant(((0.0, 0.0), *_RADIUS), free.dtype, free.device)[attributes.size]
    radius = radii[..., 0] + free[..., 0] * (radii[..., 1] - radii[..., 0])
    # Half a pixel of air keeps shapes of neighbouring quadrants apart.
    room = _CELL / 2 - 0.5 - radius
    centre = _CELL / 2 + (2 * free[..., 1:3] - 1) * room[..., None]
    axis = torch.arange(_CELL, dtype=free.dtype, device=free.device) + 0.5
    x = axis - centre[..., 0, None, None]
    y = axis[:, None] - centre[..., 1, None, None]
    distance = _distance(attributes.shape[..., None, None], x, y, radius[..., None, None])
    cover = (0.5 - distance).clamp(0, 1) * (attributes.shape > 0)[..., None, None]
    ink = words.constant(((0.0,) * 3, *_INK), free.dtype, free.device)[attributes.colour]
    ink = ink * (0.85 + 0.15 * free[..., 3:4]) + 0.1 * (free[..., 4:7] - 0.5)
    ground = words.constant(_GROUND, free.dtype, free.device)[attributes.background]
    ground = ground + 0.1 * (free[:, 0, 6] - 0.5)
    ground = ground.view(-1, 1, 1, 1, 1)
    cells = ground + (ink.clamp(0, 1)[..., None, None] - ground) * cover[:, :, None]
    picture = cells.view(-1, 2, 2, 3, _CELL, _CELL).permute(0, 3, 1, 4, 2, 5)
    return to_uint8(picture.reshape(-1, 3, SIDE, SIDE) * 255)


class Scenes(Dataset):
    """Endless pictures with classes and captions; `train` and `test` are separate streams.

    The class is the large shape's colour and shape (30 classes); the caption names every shape with
    size, colour and place, and the background. Pixels are shifted and scaled by two numbers to mean
    0 and `sigma_data`.
    """

    def __init__(
        self, options: ScenesOptions, task: str = "class", device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(options, task, device)
        self.options = options
        self.class_names = words.CLASSES if task == "class" else ()
        self.sizes = {"train": None, "test": None}
        first = draw(*self._choose(torch.arange(_STATISTICS_FROM), "train")).cpu().long()
        count = first.numel()
        self._mean = int(first.sum()) / count
        self._std = (int((first * first).sum()) / count - self._mean**2) ** 0.5
        digest = hashlib.sha256(first.to(torch.uint8).numpy().tobytes() + repr(options).encode())
        self.fingerprint = digest.hexdigest()[:16]

    def _choose(self, index: Tensor, split: str) -> tuple[Attributes, Tensor]:
        # float64 is missing on Apple's GPUs: pictures are then made on the CPU and moved.
        device = torch.device("cpu") if widest(self.device) != torch.float64 else self.device
        draws = Draws(self.options.seed, STREAMS[split], index, device)
        return choose(draws, self.options.max_shapes)

    def attributes(self, index: Tensor, split: str = "train") -> Attributes:
        """Return what is in pictures `index` (B,) without rendering them."""
        return self._choose(index, split)[0]

    def batch(
        self,
        index: Tensor,
        draws: Draws | None = None,
        split: str = "train",
        rows: Rows | None = None,
    ) -> Batch:
        """Return pictures with labels or captions; the index alone decides what is in them."""
        self._check(index, split)
        attributes, free = self._choose(index, split)
        x = self.from_pixels(draw(attributes, free).to(self.device))
        asked = self._condition(attributes, in_words=split != "train")
        return Batch(x, asked.y, asked.text, asked.captions)

    def condition(self, index: Tensor, split: str = "test") -> Condition:
        """Return labels or captions of pictures `index` (B,) without rendering them."""
        return self._condition(self.attributes(index, split), in_words=True)

    def _condition(self, attributes: Attributes, in_words: bool) -> Condition:
        if self.task == "class":
            return Condition(y=attributes.labels().to(self.device))
        if self.task == "text":
            text = words.embed(attributes.tokens().to(self.device))
            return Condition(text=text, captions=attributes.captions() if in_words else None)
        return Condition()

    def from_pixels(self, pixels: Tensor) -> Tensor:
        """Turn uint8 RGB (B, 3, 32, 32) into model space."""
        return (pixels.float() - self._mean) * (self.sigma_data / self._std)

    def to_pixels(self, x: Tensor) -> Tensor:
        """Turn model space (B, 3, 32, 32) into uint8 RGB."""
        return to_uint8(x.float() * (self._std / self.sigma_data) + self._mean)

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embed captions as (B, 32, 64) float32 with the fixed word table."""
        return words.embed(words.tokenize(captions).to(self.device))
