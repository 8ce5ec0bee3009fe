"""Routing in an SD3 LoRA training loop: frozen base, trained adapters, gradient checkpointing.

python examples/sd3_lora.py [steps]    (pip install diffusers peft; weights are small and random)
"""

import sys

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model_state_dict

import routing

ROUTE = "1-4@0.5"  # half of the image's tokens skip blocks 1 to 4; text is never routed


def build() -> SD3Transformer2DModel:
    """For real weights: SD3Transformer2DModel.from_pretrained(name, subfolder="transformer")."""
    return SD3Transformer2DModel(
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
    )


def main(steps: int = 300) -> None:
    torch.manual_seed(0)
    transformer = build()
    transformer.requires_grad_(False)
    names = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"]
    transformer.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=names))
    transformer.enable_gradient_checkpointing()
    adapters = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    # Stand-ins for what a script has cached: latents, states of the text encoders, pooled states.
    latents, text, pooled = torch.randn(4, 16, 16, 16), torch.randn(4, 20, 32), torch.randn(4, 48)

    def velocity(noisy: torch.Tensor, t: torch.Tensor, pick: torch.Tensor) -> torch.Tensor:
        return transformer(noisy, text[pick], pooled[pick], t * 1000, return_dict=False)[0]

    with routing.attach(transformer, ROUTE) as attached:
        transformer.train()
        for step in range(steps):
            pick, t = torch.randint(4, (16,)), torch.sigmoid(torch.randn(16))
            x, noise = latents[pick], torch.randn(16, 16, 16, 16)
            noisy = torch.lerp(x, noise, t[:, None, None, None])
            loss = F.mse_loss(velocity(noisy, t, pick), noise - x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0 or step == steps - 1:
                inside = attached.inner[0].tokens
                print(f"step {step:4d}  loss {loss.item():.3f}  tokens 64 -> {inside} in {ROUTE}")
        transformer.eval()  # validation while training is dense, without a word about routing
        with torch.no_grad():
            attached_output = velocity(latents, torch.ones(4), torch.arange(4))
    with torch.no_grad():
        plain = velocity(latents, torch.ones(4), torch.arange(4))
    print(f"dense output, attached and detached: {(attached_output - plain).abs().max():.1f} apart")
    StableDiffusion3Pipeline.save_lora_weights("sd3_lora", get_peft_model_state_dict(transformer))
    print("sd3_lora/pytorch_lora_weights.safetensors: for any SD3 pipeline's load_lora_weights")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
