"""Small random models of diffusers' and timm's own classes, with the inputs that they take.

Each function returns a model, what to attach to, its inputs, and further arguments for `attach`.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import contextmanager

import diffusers
import timm
import torch
from checked_models import randomise

import routing
from routing.attached.models import geometry
from routing.check import RoutedModel

BATCH, DEPTH, SIDE = 3, 4, 4
IMAGE, TEXT = SIDE * SIDE, 6


def text(width, length=TEXT):
    return torch.randn(BATCH, length, width)


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=5,
        sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=2, dropout=0.0,
    )  # fmt: skip
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "timestep": torch.tensor([1, 500, 900]),
        "class_labels": torch.tensor([1, 2, 3]),
    }
    return model, model.transformer_blocks, inputs, {}


def sd3(text_length=TEXT):
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=5, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=12, caption_projection_dim=16,
        pooled_projection_dim=10, out_channels=4, pos_embed_max_size=8, dual_attention_layers=(2,),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "encoder_hidden_states": text(12, text_length),
        "pooled_projections": torch.randn(BATCH, 10),
        "timestep": torch.tensor([1.0, 500.0, 900.0]),
    }
    return model, model.transformer_blocks, inputs, {}


def cogview4(text_length=TEXT):
    model = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        out_channels=4, text_embed_dim=16, time_embed_dim=8, condition_dim=4,
    )  # fmt: skip
    size = torch.tensor([[8.0, 8.0]] * BATCH)
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "encoder_hidden_states": text(16, text_length),
        "timestep": torch.tensor([1.0, 2.0, 3.0]),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(BATCH, 2),
    }
    return model, model.transformer_blocks, inputs, {}


def grid_ids(axes):
    """Coordinates of Flux's image tokens, (time, row, column) or with one more axis."""
    ids = torch.zeros(IMAGE, axes)
    ids[:, 1], ids[:, 2] = torch.arange(IMAGE) // SIDE, torch.arange(IMAGE) % SIDE
    return ids


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=3, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=12, pooled_projection_dim=10,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, IMAGE, 4),
        "encoder_hidden_states": text(12),
        "pooled_projections": torch.randn(BATCH, 10),
        "timestep": torch.tensor([0.1, 0.5, 0.9]),
        "img_ids": grid_ids(3),
        "txt_ids": torch.zeros(TEXT, 3),
    }
    return model, [*model.transformer_blocks, *model.single_transformer_blocks], inputs, {}


def flux2():
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=8, num_layers=1, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, IMAGE, 8),
        "encoder_hidden_states": text(16),
        "timestep": torch.tensor([0.1, 0.2, 0.3]),
        "img_ids": grid_ids(4),
        "txt_ids": torch.zeros(TEXT, 4),
        "guidance": torch.ones(BATCH),
    }
    return model, model, inputs, {}


def vit():
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, in_chans=3, num_classes=7, embed_dim=16, depth=5, num_heads=2,
        class_token=True, reg_tokens=2,
    )  # fmt: skip
    return model, model, {"x": torch.randn(BATCH, 3, 16, 16)}, {}


def eva():
    model = timm.models.eva.Eva(
        img_size=16, patch_size=4, in_chans=3, num_classes=7, embed_dim=16, depth=5, num_heads=2,
        use_rot_pos_emb=True,
    )  # fmt: skip
    return model, model, {"x": torch.randn(BATCH, 3, 16, 16)}, {}


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


def qwen():
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=8, out_channels=2, num_layers=DEPTH, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=12, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, IMAGE, 8),
        "encoder_hidden_states": text(12),
        "encoder_hidden_states_mask": torch.ones(BATCH, TEXT).long(),
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
    return model, model.layers, inputs, {"protect": [slice(64, None)]}


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


# As the table of docs/attach.md names them.
MODELS = {
    "DiT": dit, "SD3": sd3, "Flux": flux, "PRX": prx, "Wan": wan, "QwenImage": qwen, "LTX": ltx,
    "AuraFlow": auraflow, "Lumina 2": lumina2, "Z-Image": z_image, "Z-Image omni": z_image_omni,
    "ViT": vit, "EVA": eva,
}  # fmt: skip
SHARES_A_TABLE = ("Flux", "Wan", "QwenImage", "EVA")


def build(make, *arguments):
    """Return what a function above returns, with seeded inputs and weights, none of them zero."""
    torch.manual_seed(0)
    model, blocks, inputs, options = make(*arguments)
    randomise(model)
    return model.train(), blocks, inputs, options


def build_model(name):
    """Return a model of the table, what to attach to, its inputs and arguments for attach."""
    return build(MODELS[name])


def run(model, inputs):
    """Return the output of a model as one tensor."""
    out = model(**inputs)
    if not isinstance(out, torch.Tensor):
        out = out.sample
    return torch.stack(list(out))


@contextmanager
def recorded(block, argument=None, **options):
    """The values of an argument, by default of the first one, in each call of a block meanwhile."""
    names, values = list(inspect.signature(block.forward).parameters), []

    def note(module, args, kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        values.append(given[argument or names[0]])

    handle = block.register_forward_pre_hook(note, with_kwargs=True, **options)
    try:
        yield values
    finally:
        handle.remove()


def attached(name, route="1-2@0.75"):
    """Return a function that builds a model with an attached route, for the conformance kit."""

    def build(seed=0):
        model, blocks, inputs, options = build_model(name)
        original = copy.deepcopy(model).eval()
        attachment = routing.attach(blocks, route, seed=seed, **options)
        return RoutedModel(
            blocks=geometry(model)[0] if blocks is model else blocks,
            train=lambda: run(model.train(), inputs),
            evaluate=lambda: run(model.eval(), inputs),
            dense=lambda: run(original, inputs),
            route=route,
            protect=[slice(0, attachment.prefix), *attachment.protect],
            shared=name in SHARES_A_TABLE,
        )

    return build
