"""Procedural images: sample i is a function of (seed, split, i), on any device and any worker.

An image has four quadrants. Each is empty or holds one shape with a colour and a size; exactly one
shape is large, and it determines the class. The caption describes all shapes and the background:

    a large red circle at the top left, a small blue ring at the top right and
    a small green cross at the bottom left on a gray background

Captions are embedded without trained weights: row w of a Hadamard matrix for word w, plus row
32 + i for its position i in the sentence. The 64 rows are orthogonal, so a linear layer can read
both.

Shapes are signed distance functions s(p), in pixels; a pixel is covered by clamp(1/2 - s, 0, 1),
which antialiases every edge. No shape leaves its quadrant, so each quadrant is rendered alone and
the whole batch is one tensor expression. Arithmetic is float64 and ends in uint8: the last-bit
differences between devices vanish in the rounding.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.data.data_options import DataError, require
from experiments.data.dataset import Batch, Condition, Dataset, to_uint8
from experiments.data.image_options import ScenesOptions
from routing.errors import suggest
from routing.grid import table
from routing.rng import Draws, widest

SHAPES = ("circle", "square", "triangle", "ring", "cross")
COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
SIZES = ("large", "small")
PLACES = ("top left", "top right", "bottom left", "bottom right")
BACKGROUNDS = ("black", "gray", "white")

CLASSES = tuple(f"{colour} {shape}" for shape in SHAPES for colour in COLOURS)
WORDS = (
    ("", "a", "at", "the", "top", "bottom", "left", "right", "and", "on", "background", ",")
    + SIZES
    + SHAPES
    + COLOURS
    + BACKGROUNDS
)
LENGTH = 32
WIDTH = 64

_OBJECT = (
    rf"a ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) at the ({'|'.join(PLACES)})"
)
_ONE = _OBJECT.replace("(", "(?:")
_CAPTION = rf"{_ONE}(?:(?:,| and|, and) {_ONE})* on a ({'|'.join(BACKGROUNDS)}) background"
_EXAMPLE = '"a large red circle at the top left on a black background"'


@dataclass(frozen=True)
class Attributes:
    """Contents of B images: 0 for an empty quadrant, k for entry k - 1 of a tuple above."""

    shape: Tensor  # (B, 4) int64 in reading order of `PLACES`
    colour: Tensor  # (B, 4) int64
    size: Tensor  # (B, 4) int64
    background: Tensor  # (B,) int64, counted from 0

    def labels(self) -> Tensor:
        """Return the class of the large shape, (B,) int64; -1 unless exactly one is large."""
        large = self.size == 1
        quadrant = large.int().argmax(1, keepdim=True)
        shape, colour = self.shape.gather(1, quadrant) - 1, self.colour.gather(1, quadrant) - 1
        label = shape * len(COLOURS) + colour
        return torch.where(large.sum(1) == 1, label[:, 0], -1)

    def captions(self) -> list[str]:
        """Return one English sentence for each image, the large shape first."""
        sentences = []
        for row in self.tokens().tolist():
            sentence = " ".join(WORDS[token] for token in row if token)
            sentences.append(sentence.replace(" ,", ","))
        return sentences

    def tokens(self) -> Tensor:
        """Return the captions as word indices, (B, 32) int64.

        Training uses these instead of strings, which would synchronise with the device.
        """
        device = self.shape.device
        # Sorted by (absent, small, quadrant): the order of the caption.
        rank = (self.shape == 0) * 16 + self.size * 4 + torch.arange(4, device=device)
        order = rank.argsort(1)[:, :3]
        count = (self.shape > 0).sum(1, keepdim=True)
        # Words of one kind are consecutive in the vocabulary: offsets from the first one suffice.
        phrase = _ids("a large red circle at the top left and", device).repeat(len(order), 4, 1)
        phrase[..., 1:4] += torch.stack((self.size, self.colour, self.shape), -1) - 1
        phrase[..., 6:8] += constant(((0, 0), (0, 1), (1, 0), (1, 1)), torch.int64, device)
        rows = phrase.gather(1, order[..., None].expand(-1, -1, 9))
        # After each phrase: a comma if two more follow, "and" if one does.
        remaining = count - torch.arange(1, 4, device=device)
        rows[..., 8] = torch.where(remaining > 1, _INDEX[","], rows[..., 8])
        position, end = torch.arange(LENGTH, device=device), 9 * count - 1
        ids = F.pad(rows.flatten(1), (0, LENGTH - 27)) * (position < end)
        tail = _ids("on a black background", device).repeat(len(order), 1)
        tail[:, 2] += self.background
        return ids.scatter(1, end + position[:4], tail)


@table
def constant(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return constants on a device, copied there once: each copy synchronises with the device."""
    return torch.tensor(values, dtype=dtype, device=device)


def _ids(words: str, device: torch.device) -> Tensor:
    return constant(tuple(_INDEX[word] for word in words.split()), torch.int64, device)


def read_captions(captions: Sequence[str]) -> Attributes:
    """Parse captions: the inverse of `Attributes.captions`."""
    attributes = torch.zeros(len(captions), 3, 4, dtype=torch.int64)  # shape, colour, size
    backgrounds = torch.zeros(len(captions), dtype=torch.int64)
    for row, caption in enumerate(captions):
        text = " ".join(caption.lower().split())
        sentence, objects = re.fullmatch(_CAPTION, text), re.findall(_OBJECT, text)
        quadrants = {position for *_, position in objects}
        if sentence is None or len(quadrants) != len(objects):
            raise DataError(
                f"caption {caption!r} does not describe a scene; expected sentences like {_EXAMPLE}"
            )
        for size, colour, shape, position in objects:
            indices = SHAPES.index(shape), COLOURS.index(colour), SIZES.index(size)
            attributes[row, :, PLACES.index(position)] = torch.tensor(indices) + 1
        backgrounds[row] = BACKGROUNDS.index(sentence[1])
    shapes, colours, sizes = attributes.unbind(1)
    return Attributes(shapes, colours, sizes, backgrounds)


def tokenize(captions: Sequence[str]) -> Tensor:
    """Return word indices, (B, 32) int64, padded with 0."""
    ids = torch.zeros(len(captions), LENGTH, dtype=torch.int64)
    for row, caption in enumerate(captions):
        tokens = re.findall(r"[^\s,]+|,", caption.lower())
        require(
            len(tokens) <= LENGTH,
            f"a caption has {len(tokens)} words and commas; expected at most {LENGTH}",
        )
        for position, token in enumerate(tokens):
            if token not in _INDEX:
                raise DataError(
                    f"data=scenes has no word {token!r}{suggest(token, WORDS)}; it knows "
                    + " ".join(WORDS[1:])
                )
            ids[row, position] = _INDEX[token]
    return ids


def embed(ids: Tensor) -> Tensor:
    """Return (B, 32, 64) float32 embeddings of word indices (B, 32)."""
    vectors = _hadamard(ids.device)
    positions = vectors[WIDTH - LENGTH :]
    return (vectors[ids] + positions) / 2**0.5


@table
def _hadamard(device: torch.device) -> Tensor:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device)
    return functools.reduce(torch.kron, [two] * (WIDTH.bit_length() - 1))


_INDEX = {word: i for i, word in enumerate(WORDS) if word}


# --- images ---------------------------------------------------------------------------------------


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
_STATISTICS_SAMPLES = 1024


def choose(draws: Draws, max_shapes: int = 3) -> tuple[Attributes, Tensor]:
    """Sample the contents of images, one for each row of `draws`.

    Returns:
        The attributes, and (B, 4, 7) uniform numbers for the properties that captions do not
        describe: radius, x, y, brightness and a tint for each channel (of the background in the
        last one of quadrant 0).
    """
    u = draws.uniform("scene", 42, dtype=torch.float64)
    count = (u[:, 0] * max_shapes).long() + 1
    background = (u[:, 1] * len(BACKGROUNDS)).long()
    # rank[q] = 0 is the quadrant of the large shape, 1 and 2 those of small ones.
    rank = u[:, 2:6].argsort(1).argsort(1)
    present = rank < count[:, None]
    shape = (u[:, 6:10] * len(SHAPES)).long() + 1
    colour = (u[:, 10:14] * len(COLOURS)).long() + 1
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
    """Render uint8 RGB images (B, 3, 32, 32); `free` (B, 4, 7) are the numbers of `choose`."""
    radii = constant(((0.0, 0.0), *_RADIUS), free.dtype, free.device)[attributes.size]
    radius = radii[..., 0] + free[..., 0] * (radii[..., 1] - radii[..., 0])
    # A margin of half a pixel separates shapes of neighbouring quadrants.
    max_offset = _CELL / 2 - 0.5 - radius
    centre = _CELL / 2 + (2 * free[..., 1:3] - 1) * max_offset[..., None]
    axis = torch.arange(_CELL, dtype=free.dtype, device=free.device) + 0.5
    x = axis - centre[..., 0, None, None]
    y = axis[:, None] - centre[..., 1, None, None]
    distance = _distance(attributes.shape[..., None, None], x, y, radius[..., None, None])
    cover = (0.5 - distance).clamp(0, 1) * (attributes.shape > 0)[..., None, None]
    ink = constant(((0.0,) * 3, *_INK), free.dtype, free.device)[attributes.colour]
    ink = ink * (0.85 + 0.15 * free[..., 3:4]) + 0.1 * (free[..., 4:7] - 0.5)
    ground = constant(_GROUND, free.dtype, free.device)[attributes.background]
    ground = ground + 0.1 * (free[:, 0, 6] - 0.5)
    ground = ground.view(-1, 1, 1, 1, 1)
    cells = ground + (ink.clamp(0, 1)[..., None, None] - ground) * cover[:, :, None]
    images = cells.view(-1, 2, 2, 3, _CELL, _CELL).permute(0, 3, 1, 4, 2, 5)
    return to_uint8(images.reshape(-1, 3, SIDE, SIDE) * 255)


class Scenes(Dataset):
    """Endless images with classes and captions; `train` and `test` are separate streams.

    The class is colour and shape of the large shape (30 classes). The caption describes every shape
    with size, colour and position, and the background. Pixels are shifted and scaled to mean 0 and
    standard deviation `sigma_data`.
    """

    options: ScenesOptions

    def _open(self) -> None:
        self.class_names = CLASSES if self.task == "class" else ()
        self.sizes = {"train": None, "test": None}
        first = draw(*self._choose(torch.arange(_STATISTICS_SAMPLES), "train")).cpu().long()
        count = first.numel()
        self._mean = int(first.sum()) / count
        self._std = (int((first * first).sum()) / count - self._mean**2) ** 0.5
        digest = hashlib.sha256(
            first.to(torch.uint8).numpy().tobytes() + repr(self.options).encode()
        )
        self.fingerprint = digest.hexdigest()[:16]

    def _choose(self, index: Tensor, split: str) -> tuple[Attributes, Tensor]:
        # Apple's GPUs lack float64: there, images are rendered on the CPU and moved.
        device = torch.device("cpu") if widest(self.device) != torch.float64 else self.device
        draws = Draws(self.options.seed, STREAMS[split], index, device)
        return choose(draws, self.options.max_shapes)

    def attributes(self, index: Tensor, split: str = "train") -> Attributes:
        """Return the contents of images `index` (B,) without rendering them."""
        return self._choose(index, split)[0]

    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Return images with labels or captions, functions of the index alone."""
        self._check(index, split)
        attributes, free = self._choose(index, split)
        x = self.from_pixels(draw(attributes, free).to(self.device))
        condition = self._condition(attributes, as_text=split != "train")
        return Batch(x, condition.y, condition.text, condition.captions)

    def condition(self, index: Tensor, split: str = "test") -> Condition:
        """Return labels or captions of images `index` (B,) without rendering them."""
        return self._condition(self.attributes(index, split), as_text=True)

    def _condition(self, attributes: Attributes, as_text: bool) -> Condition:
        if self.task == "class":
            return Condition(y=attributes.labels().to(self.device))
        if self.task == "text":
            text = embed(attributes.tokens().to(self.device))
            return Condition(text=text, captions=attributes.captions() if as_text else None)
        return Condition()

    def from_pixels(self, pixels: Tensor) -> Tensor:
        """Scale uint8 RGB (B, 3, 32, 32) to model space."""
        return (pixels.float() - self._mean) * (self.sigma_data / self._std)

    def to_pixels(self, x: Tensor) -> Tensor:
        """Decode model space (B, 3, 32, 32) to uint8 RGB."""
        return to_uint8(x.float() * (self._std / self.sigma_data) + self._mean)

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embed captions as (B, 32, 64) float32 with the fixed word table."""
        return embed(tokenize(captions).to(self.device))
