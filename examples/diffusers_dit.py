"""A diffusers DiT trained with routing through accelerate, and sampled by diffusers' DiTPipeline.

python examples/diffusers_dit.py [steps]    (pip install diffusers accelerate scikit-learn)
"""

import sys
from itertools import chain, repeat

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import routing

ROUTE = "2-4@0.5"  # half of the 64 tokens skip blocks 2, 3 and 4 of 6


def fit_autoencoder(images: torch.Tensor, steps: int) -> AutoencoderKL:
    """A stand-in for a pretrained autoencoder: as many latents as pixels."""
    vae = AutoencoderKL(block_out_channels=(16,), norm_num_groups=4, sample_size=16)
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    for _ in range(steps):
        x = images[torch.randint(len(images), (32,))]
        loss = F.mse_loss(vae(x).sample, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return vae.eval().requires_grad_(False)


def main(steps: int = 1500) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, scale_factor=2).expand(-1, 3, -1, -1).contiguous()
    vae = fit_autoencoder(images, min(steps, 300))
    with torch.no_grad():
        latents = torch.cat([vae.encode(part).latent_dist.mean for part in images.split(100)])
    vae.register_to_config(scaling_factor=1 / latents.std().item())
    data = TensorDataset(latents * vae.config.scaling_factor, torch.tensor(digits.target))

    shape = {"num_layers": 6, "num_attention_heads": 4, "attention_head_dim": 24}
    # DiTPipeline's "no class" is 1000, so the table of classes keeps its 1001 rows.
    transformer = DiTTransformer2DModel(sample_size=16, in_channels=4, out_channels=4, **shape)
    scheduler = DDIMScheduler()
    accelerator = Accelerator()
    attached = routing.attach(transformer, ROUTE)  # before or after `prepare`, both will do
    model, optimizer, loader = accelerator.prepare(
        transformer,
        torch.optim.AdamW(transformer.parameters(), lr=1e-3),
        DataLoader(data, batch_size=64, shuffle=True, drop_last=True),
    )
    batches = chain.from_iterable(repeat(loader))
    for step, (x, labels) in zip(range(steps), batches, strict=False):
        noise, t = torch.randn_like(x), torch.randint(1000, (len(x),), device=x.device)
        out = model(scheduler.add_noise(x, noise, t), timestep=t, class_labels=labels).sample
        loss = F.mse_loss(out, noise)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            inside = attached.inner[0].tokens
            print(f"step {step:4d}  loss {loss.item():.3f}  tokens 64 -> {inside} in {ROUTE}")
    accelerator.end_training()
    attached.remove()  # or leave it: evaluation is dense either way
    pipeline = DiTPipeline(accelerator.unwrap_model(model).eval(), vae, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(list(range(10)), guidance_scale=2.0, num_inference_steps=min(steps, 30)).images
    for k, image in enumerate(made):
        image.resize((64, 64), 0).save(f"diffusers_dit_{k}.png")
    print("diffusers_dit_0.png to diffusers_dit_9.png: one digit of each class, sampled densely")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
