"""State dicts with the published names and shapes of DiT, SiT, TREAD and LightningDiT, made on the spot."""

import torch

from backbones.heads import sincos_2d

D, HEADS, DEPTH, CLASSES, SIDE, PATCH, C = 32, 2, 3, 5, 4, 2, 4


def published(source, patch=PATCH, learn_sigma=True):
    """A state dict with the published names and shapes, random values."""
    torch.manual_seed(0)
    out = C * (2 if learn_sigma else 1) * patch**2
    shapes = {
        "x_embedder.proj": (D, C, patch, patch),
        "t_embedder.mlp.0": (D, 256),
        "t_embedder.mlp.2": (D, D),
        "final_layer.linear": (out, D),
        "final_layer.adaLN_modulation.1": (2 * D, D),
    }
    for b in range(DEPTH):
        shapes[f"blocks.{b}.attn.qkv"] = (3 * D, D)
        shapes[f"blocks.{b}.attn.proj"] = (D, D)
        shapes[f"blocks.{b}.adaLN_modulation.1"] = (6 * D, D)
        if source == "lightningdit":
            shapes[f"blocks.{b}.mlp.w12"] = (2 * int(8 * D / 3), D)
            shapes[f"blocks.{b}.mlp.w3"] = (D, int(8 * D / 3))
        else:
            shapes[f"blocks.{b}.mlp.fc1"] = (4 * D, D)
            shapes[f"blocks.{b}.mlp.fc2"] = (D, 4 * D)
    state = {}
    for name, shape in shapes.items():
        state[f"{name}.weight"] = torch.randn(shape) / 8
        state[f"{name}.bias"] = torch.randn(shape[0]) / 8
    state["y_embedder.embedding_table.weight"] = torch.randn(CLASSES + 1, D)
    state["pos_embed"] = sincos_2d(D, (SIDE // patch, SIDE // patch))[None]
    if source == "lightningdit":
        size = D // HEADS
        state["final_layer.norm_final.weight"] = torch.rand(D)
        for b in range(DEPTH):
            for norm in ("norm1", "norm2"):
                state[f"blocks.{b}.{norm}.weight"] = torch.rand(D)
            for norm in ("q_norm", "k_norm"):
                state[f"blocks.{b}.attn.{norm}.weight"] = torch.rand(size)
        for part in ("cos", "sin"):
            wave = getattr(torch, part)
            state[f"feat_rope.freqs_{part}"] = wave(rotary(size, SIDE // patch))
    return state


def rotary(size, side):
    """The published table of angles (side^2, size): pairs of channels, first by row, then by column."""
    rates = 1 / 10000 ** (torch.arange(0, size // 2, 2).float() / (size // 2))
    line = (torch.arange(side)[:, None] * rates).repeat_interleave(2, dim=1)
    return torch.cat([line.repeat_interleave(side, dim=0), line.repeat(side, 1)], dim=1)
