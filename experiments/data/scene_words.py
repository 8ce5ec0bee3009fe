"""What a scene is in words: attributes, class labels, captions and their embedding.

A picture has four quadrants. Each is empty or holds one shape with a colour and a size; exactly one
shape is large, and the class names it. The caption names everything that was chosen:

    a large red circle at the top left, a small blue ring at the top right and
    a small green cross at the bottom left on a gray background

Captions become tensors without any trained weights: row w of a Hadamard matrix for a word, plus row
32 + i for its place i in the sentence. The 64 rows are orthogonal, so a linear layer can read both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from experiments.data.data_options import DataError
from routing.errors import suggest
from routing.paths import table

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

_OBJECT = re.compile(
    rf"a ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) at the ({'|'.join(PLACES)})"
)
_END = re.compile(rf" on a ({'|'.join(BACKGROUNDS)}) background$")
_EXAMPLE = '"a large red circle at the top left on a black background"'


@dataclass(frozen=True)
class Attributes:
    """What is in each of B pictures: 0 for an empty quadrant, k for word k - 1 of a tuple above."""

    shape: Tensor  # (B, 4) int64 in reading order of `PLACES`
    colour: Tensor  # (B, 4) int64
    size: Tensor  # (B, 4) int64
    background: Tensor  # (B,) int64, counted from 0

    def __len__(self) -> int:
        return len(self.background)

    def to(self, device: torch.device | str) -> Attributes:
        """Return the attributes on another device."""
        return Attributes(*(getattr(self, f.name).to(device) for f in fields(self)))

    def labels(self) -> Tensor:
        """Return the class of the large shape, (B,) int64; -1 where not exactly one is large."""
        large = self.size == 1
        at = large.int().argmax(1, keepdim=True)
        label = (self.shape.gather(1, at) - 1) * len(COLOURS) + self.colour.gather(1, at) - 1
        return torch.where(large.sum(1) == 1, label[:, 0], -1)

    def captions(self) -> list[str]:
        """Return one English sentence for each picture, the large shape first."""
        parts = (self.shape, self.colour, self.size, self.background)
        return [_caption(*row) for row in zip(*(part.tolist() for part in parts), strict=True)]

    def tokens(self) -> Tensor:
        """Return the captions as word indices, (B, 32) int64: `tokenize(captions())` without words.

        Training needs no strings, and making them would wait for the device.
        """
        device = self.shape.device
        # Sorted by (absent, small, quadrant): the order in which the caption names them.
        rank = (self.shape == 0) * 16 + self.size * 4 + torch.arange(4, device=device)
        order = rank.argsort(1)[:, :3]
        count = (self.shape > 0).sum(1)
        parts = [_lookup(SIZES, self.size), _lookup(COLOURS, self.colour)]
        parts.append(_lookup(SHAPES, self.shape))
        places = tuple(zip(*([_INDEX[w] for w in place.split()] for place in PLACES), strict=True))
        vertical, horizontal = constant(places, torch.int64, device)
        phrase = torch.full((len(self), 4, 9), _INDEX["a"], device=device)
        phrase[..., 1:4] = torch.stack(parts, -1)
        phrase[..., 4], phrase[..., 5] = _INDEX["at"], _INDEX["the"]
        phrase[..., 6], phrase[..., 7] = vertical, horizontal
        rows = phrase.gather(1, order[..., None].expand(-1, -1, 9))
        # Behind each phrase: a comma if two more follow, "and" if one does.
        left = count[:, None] - torch.arange(1, 4, device=device)
        rows[..., 8] = torch.where(left > 1, _INDEX[","], _INDEX["and"])
        ids = torch.zeros(len(self), LENGTH, dtype=torch.int64, device=device)
        ids[:, :27] = rows.flatten(1)
        end = (9 * count - 1)[:, None] + torch.arange(LENGTH, device=device)
        tail = torch.zeros_like(end)
        tail[:, 0], tail[:, 1], tail[:, 3] = _INDEX["on"], _INDEX["a"], _INDEX["background"]
        tail[:, 2] = _INDEX[BACKGROUNDS[0]] + self.background
        wide = torch.cat((ids, torch.zeros_like(ids)), 1).scatter(1, end, tail)
        return wide[:, :LENGTH]


@table
def constant(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return constants on a device, copied there once: each copy would wait for the device."""
    return torch.tensor(values, dtype=dtype, device=device)


def _lookup(words: tuple[str, ...], values: Tensor) -> Tensor:
    # The words of one kind are neighbours in the vocabulary; an empty quadrant's is never read.
    return values + (_INDEX[words[0]] - 1)


def _caption(shape: list[int], colour: list[int], size: list[int], background: int) -> str:
    order = sorted((q for q in range(4) if shape[q]), key=lambda q: (size[q], q))
    parts = [
        f"a {SIZES[size[q] - 1]} {COLOURS[colour[q] - 1]} {SHAPES[shape[q] - 1]} at the {PLACES[q]}"
        for q in order
    ]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"{listed} on a {BACKGROUNDS[background]} background"


def read_captions(captions: Sequence[str]) -> Attributes:
    """Return what captions say: the inverse of `Attributes.captions`."""
    rows = torch.zeros(len(captions), 3, 4, dtype=torch.int64)
    grounds = torch.zeros(len(captions), dtype=torch.int64)
    for row, caption in enumerate(captions):
        text = " ".join(caption.lower().split())
        end = _END.search(text)
        found = _OBJECT.findall(text)
        rest = _OBJECT.sub("", _END.sub("", text)).replace(",", "").replace("and", "").strip()
        places = [place for *_, place in found]
        if end is None or not found or rest or len(set(places)) != len(places):
            raise DataError(
                f"caption {caption!r} does not describe a scene; expected sentences like {_EXAMPLE}"
            )
        for size, colour, shape, place in found:
            words = SHAPES.index(shape), COLOURS.index(colour), SIZES.index(size)
            rows[row, :, PLACES.index(place)] = torch.tensor(words) + 1
        grounds[row] = BACKGROUNDS.index(end[1])
    shapes, colours, sizes = rows.unbind(1)
    return Attributes(shapes, colours, sizes, grounds)


def tokenize(captions: Sequence[str]) -> Tensor:
    """Return word indices, (B, 32) int64, padded with 0."""
    ids = torch.zeros(len(captions), LENGTH, dtype=torch.int64)
    for row, caption in enumerate(captions):
        words = re.findall(r"[^\s,]+|,", caption.lower())
        if len(words) > LENGTH:
            raise DataError(
                f"a caption has {len(words)} words and commas; expected at most {LENGTH}"
            )
        for place, word in enumerate(words):
            if word not in _INDEX:
                raise DataError(
                    f"data=scenes has no word {word!r}{suggest(word, WORDS)}; it knows "
                    + " ".join(WORDS[1:])
                )
            ids[row, place] = _INDEX[word]
    return ids


def embed(ids: Tensor) -> Tensor:
    """Return (B, 32, 64) float32 embeddings of word indices (B, 32)."""
    vectors = _hadamard(WIDTH, ids.device)
    place = vectors[WIDTH - LENGTH :]
    return (vectors[ids] + place) / 2**0.5


@table
def _hadamard(n: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


_INDEX = {word: i for i, word in enumerate(WORDS) if word}
