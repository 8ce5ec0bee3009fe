"""The scenes probe: a network that reads shapes, colours, sizes and positions from an image.

A small convolutional network classifies, for every quadrant, its shape, colour and size (or none),
and the background. Its weights are part of the project, so that scores and Frechet distances (on
its 128 features) are the same numbers everywhere (`tests/tools/train_scenes_probe.py` made them).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.data import scenes
from experiments.data.data_options import require

WEIGHTS = Path(__file__).with_name("scenes_probe.safetensors")
FEATURES = 128
HEADS = {"shape": len(scenes.SHAPES) + 1, "colour": len(scenes.COLOURS) + 1, "size": 3}


class Probe(nn.Module):
    """Four convolutions, one 2x2 pooling, one linear head per attribute."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 64, 96)
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        for width_in, width_out in itertools.pairwise(widths):
            stride = 1 if width_in == 3 else 2
            self.convolutions.append(nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1))
            self.norms.append(nn.GroupNorm(8, width_out))
        self.quadrant = nn.Linear(4 * widths[-1], FEATURES // 4)
        self.heads = nn.ModuleDict()
        for name, answers in HEADS.items():
            self.heads[name] = nn.Linear(FEATURES // 4, answers)
        self.background = nn.Linear(FEATURES, len(scenes.BACKGROUNDS))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Classify images (B, 3, 32, 32), uint8 or float in -1..1.

        Returns:
            `shape` (B, 4, 6), `colour` (B, 4, 7), `size` (B, 4, 3), `background` (B, 3) as logits,
            `features` (B, 128) and `spatial` (B, 96, 4, 4).
        """
        shape = tuple(images.shape[1:])
        require(shape == (3, 32, 32), f"the scenes probe reads RGB images of 32x32; got {shape}")
        x = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.silu(norm(convolution(x)))
        # (B, C, 4, 4) -> (B, 4 quadrants, 4 C): positions inside a quadrant keep their channels.
        cells = x.unflatten(2, (2, 2)).unflatten(4, (2, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        quadrants = F.silu(self.quadrant(cells.flatten(1, 2)))
        answers = {key: head(quadrants) for key, head in self.heads.items()}
        features = quadrants.flatten(1)
        answers["background"] = self.background(features)
        return {**answers, "features": features, "spatial": x}


@lru_cache(maxsize=4)
def load(device: str = "cpu") -> Probe:
    """Return the project's probe on `device`."""
    network = Probe()
    network.load_state_dict(load_file(WEIGHTS))  # float16 in the file
    return network.to(device).eval().requires_grad_(False)


@torch.inference_mode()
def probe(images: Tensor, batch: int = 512) -> dict[str, Tensor]:
    """Classify any number of images: logits, `features` and `spatial` as in `Probe.forward`."""
    network = load(str(images.device))
    outputs: dict[str, list[Tensor]] = defaultdict(list)
    for part in images.split(batch):
        for name, tensor in network(part).items():
            outputs[name].append(tensor)
    return {name: torch.cat(tensors) for name, tensors in outputs.items()}


def read(images: Tensor) -> scenes.Attributes:
    """Return the attributes that the probe sees in images (N, 3, 32, 32), on the CPU."""
    logits = probe(images)

    def answer(name: str) -> Tensor:
        return logits[name].argmax(-1).cpu()

    return scenes.Attributes(
        answer("shape"), answer("colour"), answer("size"), answer("background")
    )


def adherence(
    images: Tensor, *, labels: Tensor | None = None, captions: Sequence[str] | None = None
) -> dict[str, tuple[int, int]]:
    """Count how often images (N, 3, 32, 32) match their labels (N,) or captions.

    Returns:
        Hits and number of trials, by criterion. For labels: `class` (exactly one large shape, of
        that shape and colour), and `shape` and `colour` of it alone. For captions: `caption`
        (everything right and nothing else); `shape`, `colour` and `size` in the quadrants that the
        caption fills; `place` (quadrants rightly empty or filled), and `background`.
    """
    seen_attributes = read(images)
    if captions is not None:
        expected = scenes.read_captions(captions)
        filled, hits = expected.shape > 0, _hits(seen_attributes, expected)
        return {
            "caption": _count(hits["everything"]),
            "shape": _count(hits["shape"][filled]),
            "colour": _count(hits["colour"][filled]),
            "size": _count(hits["size"][filled]),
            "place": _count((seen_attributes.shape > 0) == filled),
            "background": _count(hits["background"]),
        }
    assert labels is not None
    seen_labels, expected_labels = seen_attributes.labels(), labels.cpu()
    colours = len(scenes.COLOURS)
    one_large = seen_labels >= 0
    return {
        "class": _count(seen_labels == expected_labels),
        "shape": _count(one_large & (seen_labels // colours == expected_labels // colours)),
        "colour": _count(one_large & (seen_labels % colours == expected_labels % colours)),
    }


def _count(hits: Tensor) -> tuple[int, int]:
    return int(hits.sum()), hits.numel()


def _hits(seen_attributes: scenes.Attributes, expected: scenes.Attributes) -> dict[str, Tensor]:
    """Return matches by attribute: (N, 4) for those of shapes, (N,) for all others."""
    shape = seen_attributes.shape == expected.shape
    colour = seen_attributes.colour == expected.colour
    size = seen_attributes.size == expected.size
    background = seen_attributes.background == expected.background
    everything = (shape & colour & size).all(1) & background
    return {
        "shape": shape,
        "colour": colour,
        "size": size,
        "background": background,
        "everything": everything,
    }
