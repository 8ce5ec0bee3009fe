"""LoRA with a masked loss, dense and routed: tokens under the mask never skip (`keep=`).

python examples/masked_lora.py [steps]    (pip install diffusers peft; weights are small and random)
"""

import sys

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from peft import LoraConfig

import routing

ROUTE = "1-4@0.5"  # half of the image's tokens skip blocks 1 to 4; text is never routed


def build() -> SD3Transformer2DModel:
    """For real weights: SD3Transformer2DModel.from_pretrained(name, subfolder="transformer")."""
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        num_layers=6,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=48,
        pos_embed_max_size=16,
    ).requires_grad_(False)
    names = ["to_q", "to_k", "to_v", "to_out.0"]
    transformer.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=names))
    return transformer


def train(route: str, steps: int) -> None:
    transformer = build()
    adapters = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    latents, text, pooled = torch.randn(4, 16, 16, 16), torch.randn(4, 20, 32), torch.randn(4, 48)
    masks = torch.zeros(4, 1, 16, 16)  # stand-ins for the area of a subject: 4 x 4 of 8 x 8 tokens
    for sample in range(4):
        masks[sample, :, 2 * sample : 2 * sample + 8, 4:12] = 1

    def masked_loss(pick: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x, mask, noise = latents[pick], masks[pick], torch.randn(len(pick), 16, 16, 16)
        noisy = torch.lerp(x, noise, t[:, None, None, None])
        velocity = transformer(noisy, text[pick], pooled[pick], t * 1000, return_dict=False)[0]
        return ((velocity - noise + x).square() * mask).sum() / mask.sum() / x.shape[1]

    with routing.attach(transformer, route) as attached:
        transformer.train()
        for step in range(steps):
            pick, t = torch.randint(4, (16,)), torch.sigmoid(torch.randn(16))
            # A token stays where any pixel of its patch is in the loss.
            attached.keep = F.max_pool2d(masks[pick], 2).flatten(1).bool()
            loss = masked_loss(pick, t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0 or step == steps - 1:
                inside = attached.inner[0].tokens if route != "none" else 64
                print(f"{route}: step {step:3d}  loss {loss.item():.3f}  tokens 64 -> {inside}")
    with torch.no_grad():
        held_out = masked_loss(torch.arange(64) % 4, torch.rand(64)).item()
    print(f"{route}: masked loss of a dense pass on new noise {held_out:.3f}")


def main(steps: int = 200) -> None:
    train("none", steps)
    train(ROUTE, steps)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
