"""Is my routing correct? A model with routing, described for the conformance kit `routing.check`.

python -m routing.check examples/check_routing.py:vit
"""

import copy

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import routing
from routing.check import RoutedModel


def vit(seed: int = 0) -> RoutedModel:
    """timm's ViT, routed by routing.attach: a class token, then 16 image tokens."""
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depth=5, num_heads=2
    )
    images, original = torch.randn(4, 1, 8, 8), copy.deepcopy(model).eval()
    routing.attach(model, "1-3@0.75", seed=seed)
    return RoutedModel(
        blocks=model.blocks,
        train=lambda: model.train()(images),  # one forward pass; each call is another step
        evaluate=lambda: model.eval()(images),
        dense=lambda: original(images),  # what evaluation has to equal, bit for bit
        route="1-3@0.75",  # both ends included; three quarters of the tokens skip
        protect=[0],  # the class token
    )


class Rewrite(nn.Module):
    """Routing in a model's forward, with the structure of the released code of TREAD."""

    def __init__(self, start: int = 2, end: int = 4, rate: float = 0.75, seed: int = 42) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(6))
        self.start, self.end, self.rate = start, end, rate
        self.seed = seed  # stored and never used: random numbers come from torch's generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        for i, block in enumerate(self.blocks):
            if self.training and i == self.start:
                skipping = int(tokens * self.rate)
                order = torch.rand(batch, tokens).argsort(dim=1)
                keep = order[:, skipping:].unsqueeze(-1).expand(-1, -1, width)  # in random order
                everything, x = x, x.gather(1, keep)
            x = block(x)
            if self.training and i == self.end:
                x = everything.clone().scatter(1, keep, x)
        return x


def rewrite(seed: int = 0) -> RoutedModel:
    """The rewrite above: unsorted tokens, drawn with torch's global generator."""
    torch.manual_seed(seed)
    model, x = Rewrite(seed=seed), torch.randn(4, 16, 32)

    def dense() -> torch.Tensor:
        out = x
        for block in model.eval().blocks:
            out = block(out)
        return out

    return RoutedModel(
        blocks=model.blocks,
        train=lambda: model.train()(x),
        evaluate=lambda: model.eval()(x),
        dense=dense,
        route="2-4@0.75",
    )
