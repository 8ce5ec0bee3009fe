"""Routed guidance on your own flow model: the pass with fewer tokens is the weaker model.

python examples/routed_guidance.py [steps] [samples]    (pip install scikit-learn)
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import routing


class Flow(nn.Module):
    """A transformer on the 64 pixels of a digit that predicts the velocity noise - image."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.pixel, self.place = nn.Linear(1, width), nn.Parameter(torch.randn(64, width) * 0.1)
        self.label, self.time = nn.Embedding(10, width), nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        waves = torch.cos(t[:, None] * torch.pi * torch.arange(16, device=t.device))
        condition = self.label(label) + self.time(waves)
        tokens = self.pixel(x[..., None]) + self.place + condition[:, None]
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens)[..., 0]


@torch.no_grad()
def sample(model: Flow, labels: Tensor, scale: float, steps: int = 20) -> Tensor:
    """Euler steps from noise; each pushes the dense prediction away from the routed one."""
    x = torch.randn(len(labels), 64, generator=torch.Generator().manual_seed(1))
    with routing.attach(model.blocks, "1-4@0.8", grid=(8, 8), when="never") as attached:
        for time in torch.linspace(1, 0, steps + 1)[:-1]:
            t = time.expand(len(x))
            strong = model(x, t, labels)  # dense
            with attached.mode("always"):  # four fifths of the tokens skip blocks 1 to 4
                weak = model(x, t, labels)
            x = x - (weak + scale * (strong - weak)) / steps
    return x


def main(steps: int = 2000, samples: int = 200) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 8 - 1, torch.tensor(digits.target)
    model = Flow()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with routing.attach(model.blocks, "1-4@0.5", grid=(8, 8)) as attached:
        for step in range(steps):
            pick = torch.randint(len(images), (64,))
            x, noise, t = images[pick], torch.randn(64, 64), torch.rand(64)
            noisy = torch.lerp(x, noise, t[:, None])
            loss = F.mse_loss(model(noisy, t, labels[pick]), noise - x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0 or step == steps - 1:
                inside = attached.inner[0].tokens
                print(f"step {step:4d}  loss {loss.item():.3f}  tokens 64 -> {inside}")
    model.eval()
    reader, wanted = LogisticRegression().fit(images / 2, labels), torch.arange(samples) % 10
    for scale in (1.0, 1.5, 2.0):
        right = reader.score(sample(model, wanted, scale).clamp(-1, 1) / 2, wanted)
        print(f"scale {scale}: a classifier reads the digit asked for in {right:.1%} of samples")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
