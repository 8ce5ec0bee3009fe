"""Small random models of diffusers' and timm's own classes, with the inputs that they take."""

from __future__ import annotations

import copy

import diffusers
import torch
from checked_models import randomise
from test_attach_models import dit, eva, flux, sd3, vit

import routing
from routing.check import RoutedModel

BATCH, DEPTH, SIDE = 3, 4, 4
IMAGE, TEXT = SIDE * SIDE, 6


def text(width):
    return torch.randn(BATCH, TEXT, width)


def prx():
    model = diffusers.PRXTransformer2DModel(
        in_channels=4, patch_size=2, context_in_dim=12, hidden_size=32, num_heads=2, depth=DEPTH,
        axes_dim=[8, 8],
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "timestep": torch.rand(BATCH),
        "encoder_hidden_states": text(12),
    }
    return model, model, inputs, {}


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=12, freq_dim=16, ffn_dim=32, num_layers=DEPTH, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 2, 4, 8),
        "timestep": torch.tensor([1, 500, 900]),
        "encoder_hidden_states": text(12),
    }
    return model, model, inputs, {}


def qwen(text_length=TEXT):
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=8, out_channels=2, num_layers=DEPTH, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=12, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, IMAGE, 8),
        "encoder_hidden_states": torch.randn(BATCH, text_length, 12),
        "encoder_hidden_states_mask": torch.ones(BATCH, text_length).long(),
        "timestep": torch.rand(BATCH),
        "img_shapes": [[(1, SIDE, SIDE)]] * BATCH,
    }
    return model, model, inputs, {}


def ltx():
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, num_layers=DEPTH, caption_channels=12,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, IMAGE, 8),
        "encoder_hidden_states": text(12),
        "timestep": torch.tensor([1.0, 500.0, 900.0]),
        "encoder_attention_mask": torch.ones(BATCH, TEXT),
        "num_frames": 1, "height": SIDE, "width": SIDE,
    }  # fmt: skip
    return model, model, inputs, {}


def lumina2():
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8, in_channels=4, hidden_size=24, num_layers=DEPTH, num_refiner_layers=1,
        num_attention_heads=2, num_kv_heads=1, axes_dim_rope=(4, 4, 4), axes_lens=(32, 32, 32),
        cap_feat_dim=12,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "timestep": torch.rand(BATCH),
        "encoder_hidden_states": text(12),
        "encoder_attention_mask": torch.ones(BATCH, TEXT).bool(),
    }
    return model, model.layers, inputs, {"prefix": TEXT}


def auraflow():
    """Single blocks get 8 registers, the text and the image in one sequence."""
    model = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=DEPTH,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
        caption_projection_dim=16, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "encoder_hidden_states": text(16),
        "timestep": torch.rand(BATCH),
    }
    return model, model.single_transformer_blocks, inputs, {"prefix": 8 + TEXT}


def z_image_model():
    return diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=48, n_layers=DEPTH, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=12, axes_dims=[8, 8, 8], axes_lens=[256, 32, 32],
    )  # fmt: skip


def z_image():
    """Basic mode: 64 image tokens, then 32 of text (padded)."""
    model = z_image_model()
    inputs = {
        "x": list(torch.randn(BATCH, 4, 1, 16, 16)),
        "t": torch.rand(BATCH),
        "cap_feats": [torch.randn(7, 12) for _ in range(BATCH)],
    }
    return model, model.layers, inputs, {"protect": slice(64, None)}


def z_image_omni():
    """Omni mode: 64 tokens of text, a clean image of 64, then the noisy one of 64."""
    model = z_image_model()
    inputs = {
        "x": [list(torch.randn(2, 4, 1, 16, 16)) for _ in range(BATCH)],
        "t": torch.rand(BATCH),
        "cap_feats": [[torch.randn(7, 12), torch.randn(9, 12)] for _ in range(BATCH)],
        "siglip_feats": [None] * BATCH,
        "image_noise_mask": [[0, 1]] * BATCH,
    }
    return model, model.layers, inputs, {"protect": [slice(0, 128)]}


def known(make):
    """Return a model of the other tests in the form of these."""

    def build():
        model, blocks, inputs, _ = make()
        return model, blocks, inputs, {}

    return build


# As the table of docs/attach.md names them.
MODELS = {
    "DiT": known(dit), "SD3": known(sd3), "Flux": known(flux), "PRX": prx, "Wan": wan,
    "QwenImage": qwen, "LTX": ltx, "AuraFlow": auraflow, "Lumina 2": lumina2, "Z-Image": z_image,
    "Z-Image omni": z_image_omni, "ViT": known(vit), "EVA": known(eva),
}  # fmt: skip
SHARES_A_TABLE = ("Flux", "Wan", "QwenImage", "EVA")


def build_model(name):
    """Return a model, what to attach to, its inputs and arguments for attach; weights are drawn."""
    torch.manual_seed(0)
    model, blocks, inputs, options = MODELS[name]()
    randomise(model)
    return model, blocks, inputs, options


def run(model, inputs):
    """Return the output of a model as one tensor."""
    out = model(**inputs)
    if not isinstance(out, torch.Tensor):
        out = out.sample
    return torch.stack(list(out))


def block_list(model, blocks):
    """Return the blocks that a model was attached by."""
    if blocks is not model:
        return list(blocks)
    names = ("transformer_blocks", "single_transformer_blocks", "blocks")
    return [block for name in names for block in getattr(model, name, [])]


def attached(name, route="1-2@0.75"):
    """Return a function that builds a model with an attached route, for the conformance kit."""

    def build(seed=0):
        model, blocks, inputs, options = build_model(name)
        original = copy.deepcopy(model).eval()
        shared = name in SHARES_A_TABLE
        routing.attach(blocks, route, seed=seed, **options)
        protect = list(range(options.get("prefix", getattr(model, "num_prefix_tokens", 0))))
        if name.startswith("Z-Image"):
            protect = list(range(64, 96)) if name == "Z-Image" else list(range(128))
        return RoutedModel(
            blocks=block_list(model, blocks),
            train=lambda: run(model.train(), inputs),
            evaluate=lambda: run(model.eval(), inputs),
            dense=lambda: run(original, inputs),
            route=route,
            protect=protect,
            shared=shared,
        )

    return build
