"""Read shape, colour, size and place back from a scene, to score what samples show.

A small convolutional network looks at a picture and answers, for every quadrant, which shape,
colour and size it holds (or none), and which background lies behind. Its weights come with the
project, so that scores and Frechet distances (on its 128 features) are the same numbers everywhere;
`python -m experiments.data.probe` made them: it trains anew, stores them and prints their accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.data import scenes
from experiments.data.data_options import DataError
from experiments.runtime.files import atomic_write
from routing.rng import Draws

WEIGHTS = Path(__file__).with_name("scenes_probe.safetensors")
FEATURES = 128
_HEADS = {"shape": len(scenes.SHAPES) + 1, "colour": len(scenes.COLOURS) + 1, "size": 3}


class Probe(nn.Module):
    """Four convolutions, one 2x2 pooling, one linear head per attribute."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 64, 96)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=1 if a == 3 else 2, padding=1)
            for a, b in zip(widths, widths[1:], strict=False)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in widths[1:])
        self.quadrant = nn.Linear(4 * widths[-1], FEATURES // 4)
        self.heads = nn.ModuleDict({k: nn.Linear(FEATURES // 4, n) for k, n in _HEADS.items()})
        self.background = nn.Linear(FEATURES, len(scenes.BACKGROUNDS))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Look at pictures (B, 3, 32, 32), uint8 or float in -1..1.

        Returns:
            `shape` (B, 4, 6), `colour` (B, 4, 7), `size` (B, 4, 3), `background` (B, 3) as logits,
            `features` (B, 128) and `spatial` (B, 96, 4, 4).
        """
        if (shape := tuple(images.shape[1:])) != (3, 32, 32):
            raise DataError(f"the scenes probe reads RGB pictures of 32x32; got {shape}")
        x = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.silu(norm(convolution(x)))
        # (B, C, 4, 4) -> (B, 4 quadrants, 4 C): the place inside a quadrant stays visible.
        cells = x.unflatten(2, (2, 2)).unflatten(4, (2, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        quadrants = F.silu(self.quadrant(cells.flatten(1, 2)))
        answers = {key: head(quadrants) for key, head in self.heads.items()}
        features = quadrants.flatten(1)
        answers["background"] = self.background(features)
        return {**answers, "features": features, "spatial": x}


@lru_cache(maxsize=4)
def load(device: str = "cpu") -> Probe:
    """Return the project's probe on `device`."""
    made = Probe()
    made.load_state_dict({key: value.float() for key, value in load_file(WEIGHTS).items()})
    return made.to(device).eval().requires_grad_(False)


@torch.inference_mode()
def probe(images: Tensor, batch: int = 512) -> dict[str, Tensor]:
    """Read any number of pictures: logits, `features` and `spatial` as in `Probe.forward`."""
    network = load(str(images.device))
    parts = [network(part) for part in images.split(batch)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def read(images: Tensor) -> scenes.Attributes:
    """Return what the probe sees in pictures (N, 3, 32, 32), on the CPU."""
    answers = probe(images)
    keys = ("shape", "colour", "size", "background")
    return scenes.Attributes(*(answers[key].argmax(-1).cpu() for key in keys))


def adherence(
    images: Tensor, *, labels: Tensor | None = None, captions: Sequence[str] | None = None
) -> dict[str, tuple[int, int]]:
    """Count what of pictures (N, 3, 32, 32) is as asked, of how many, by labels (N,) or captions.

    Returns:
        Hits and of how many, by part. For labels: `class` (exactly one large shape, of that shape
        and colour), and `shape` and `colour` of it alone. For captions: `caption` (everything right
        and nothing else), asked-for shapes whose quadrant shows the right `shape`, `colour`,
        `size`, quadrants rightly empty or filled (`place`), and right `background`s.
    """
    seen = read(images)
    if captions is not None:
        asked = scenes.read_captions(captions)
        filled, hits = asked.shape > 0, _hits(seen, asked)
        return {
            "caption": _count(hits["everything"]),
            **{key: _count(hits[key][filled]) for key in _HEADS},
            "place": _count((seen.shape > 0) == filled),
            "background": _count(hits["background"]),
        }
    assert labels is not None
    found, wanted = seen.labels(), labels.cpu()
    colours = len(scenes.COLOURS)
    one = found >= 0
    return {
        "class": _count(found == wanted),
        "shape": _count(one & (found // colours == wanted // colours)),
        "colour": _count(one & (found % colours == wanted % colours)),
    }


def _count(hits: Tensor) -> tuple[int, int]:
    return int(hits.sum()), hits.numel()


def _hits(seen: scenes.Attributes, asked: scenes.Attributes) -> dict[str, Tensor]:
    """Return what is right, by attribute: (N, 4) for those of shapes, (N,) for all others."""
    hits = {key: getattr(seen, key) == getattr(asked, key) for key in (*_HEADS, "background")}
    shapes = torch.stack([hits[key].all(1) for key in _HEADS]).all(0)
    return hits | {"everything": shapes & hits["background"]}


def _pictures(split: str, start: int, count: int) -> tuple[Tensor, scenes.Attributes]:
    draws = Draws(0, scenes.STREAMS[split], torch.arange(start, start + count))
    attributes, free = scenes.choose(draws)
    return scenes.draw(attributes, free), attributes


def train(steps: int = 2500, batch: int = 64, lr: float = 2e-3, log: bool = False) -> Probe:
    """Train the probe on its own stream of pictures, with noise and blur as samples have them."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Probe()
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    for step in range(steps):
        pixels, truth = _pictures("probe", step * batch, batch)
        images = pixels.float() / 127.5 - 1
        noise = torch.randn(images.shape, generator=generator)
        images = images + noise * torch.rand(batch, 1, 1, 1, generator=generator) * 0.15
        soft = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
        images = images.lerp(soft, torch.rand(batch, 1, 1, 1, generator=generator) * 0.6)
        answers = network(images.clamp(-1, 1))
        loss = F.cross_entropy(answers["background"], truth.background)
        for key in _HEADS:
            loss = loss + F.cross_entropy(answers[key].flatten(0, 1), getattr(truth, key).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if log and step % 100 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.4f}", flush=True)
    return network.eval()


if __name__ == "__main__":
    network = train(log=True)
    state = {key: value.half().contiguous() for key, value in network.state_dict().items()}
    atomic_write(WEIGHTS, save(state))
    images, truth = _pictures("test", 0, 4096)
    for name, hits in _hits(read(images), truth).items():
        print(f"{name}: {float(hits.double().mean()):.4f} right of pictures of the test stream")
