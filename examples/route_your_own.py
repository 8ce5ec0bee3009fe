"""Add routing to an unmodified model: timm's ViT on real handwritten digits.

python examples/route_your_own.py [route] [steps]
"""

import sys

import torch
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer

import routing


def main(route: str = "1-3@0.5", steps: int = 300) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels, train = torch.tensor(digits.target), torch.randperm(len(images)) < 1500
    vit = VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=5, num_heads=4
    )
    optimizer = torch.optim.AdamW(vit.parameters(), lr=3e-3)
    with routing.attach(vit, route) as attached:  # 16 tokens; the class token is never routed
        for step in range(steps):
            batch = torch.randint(int(train.sum()), (64,))
            logits = vit(images[train][batch])
            loss = torch.nn.functional.cross_entropy(logits, labels[train][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                inside = [layout.tokens for layout in attached.inner]
                print(f"step {step:4d}  loss {loss.item():.3f}  tokens 16 -> {inside} in {route}")
    vit.eval()  # the hooks are gone: the model is plain timm again
    with torch.no_grad():
        accuracy = (vit(images[~train]).argmax(1) == labels[~train]).float().mean().item()
    print(f"held-out accuracy {accuracy:.1%} (dense)")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
