"""Train the network that reads images of data=scenes, store it in the package, and print its accuracy.

python tests/tools/train_scenes_probe.py
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.data import scenes
from experiments.data.probe import HEADS, WEIGHTS, Probe, read
from experiments.runtime.files import atomic_write
from routing.rng import Draws


def make_images(split: str, start: int, count: int) -> tuple[Tensor, scenes.Attributes]:
    draws = Draws(0, scenes.STREAMS[split], torch.arange(start, start + count))
    attributes, free = scenes.choose(draws)
    return scenes.draw(attributes, free), attributes


def train(steps: int = 2500) -> Probe:
    """Train the probe on its own stream of images, with noise and blur as in samples."""
    batch, lr = 64, 2e-3
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Probe()
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    for step in range(steps):
        pixels, truth = make_images("probe", step * batch, batch)
        images = pixels.float() / 127.5 - 1
        noise = torch.randn(images.shape, generator=generator)
        images = images + noise * torch.rand(batch, 1, 1, 1, generator=generator) * 0.15
        soft = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
        images = images.lerp(soft, torch.rand(batch, 1, 1, 1, generator=generator) * 0.6)
        answers = network(images.clamp(-1, 1))
        loss = F.cross_entropy(answers["background"], truth.background)
        for key in HEADS:
            loss = loss + F.cross_entropy(answers[key].flatten(0, 1), getattr(truth, key).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.4f}", flush=True)
    return network.eval()


def main() -> None:
    network = train()
    state = {key: value.half().contiguous() for key, value in network.state_dict().items()}
    atomic_write(WEIGHTS, save(state))
    images, truth = make_images("test", 0, 4096)
    answers = read(images)
    for name in ("shape", "colour", "size", "background"):
        right = getattr(answers, name) == getattr(truth, name)
        print(f"{name}: {float(right.double().mean()):.4f} right on images of the test stream")


if __name__ == "__main__":
    main()
