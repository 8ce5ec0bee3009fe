"""Latent diffusion's autoencoder written out in plain operations, against ours from a single file."""

import json

import pytest
import torch
from torch.nn import functional as F

from experiments.data import DataError
from experiments.data.encoders import Autoencoder

CHANNELS, LEVELS, BLOCKS, LATENT = 32, (1, 1, 2), 2, 6


def make_state():
    """A state dict in latent diffusion's layout."""
    generator = torch.Generator().manual_seed(0)
    state = {}

    def conv(name, cin, cout, kernel=3):
        state[f"{name}.weight"] = (
            torch.randn(cout, cin, kernel, kernel, generator=generator) / (cin * kernel**2) ** 0.5
        )
        state[f"{name}.bias"] = torch.randn(cout, generator=generator) * 0.1

    def norm(name, c):
        state[f"{name}.weight"] = 1 + 0.1 * torch.randn(c, generator=generator)
        state[f"{name}.bias"] = 0.1 * torch.randn(c, generator=generator)

    def resnet(name, cin, cout):
        norm(f"{name}.norm1", cin)
        conv(f"{name}.conv1", cin, cout)
        norm(f"{name}.norm2", cout)
        conv(f"{name}.conv2", cout, cout)
        if cin != cout:
            conv(f"{name}.nin_shortcut", cin, cout, 1)

    def attention(name, c):
        norm(f"{name}.norm", c)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", c, c, 1)

    def middle(name, c):
        resnet(f"{name}.block_1", c, c)
        attention(f"{name}.attn_1", c)
        resnet(f"{name}.block_2", c, c)

    widths = [CHANNELS * m for m in LEVELS]
    last = len(widths) - 1
    conv("encoder.conv_in", 3, CHANNELS)
    before = CHANNELS
    for i, width in enumerate(widths):
        for j in range(BLOCKS):
            resnet(f"encoder.down.{i}.block.{j}", before, width)
            before = width
        if i != last:
            conv(f"encoder.down.{i}.downsample.conv", width, width)
    middle("encoder.mid", before)
    norm("encoder.norm_out", before)
    conv("encoder.conv_out", before, 2 * LATENT)
    conv("quant_conv", 2 * LATENT, 2 * LATENT, 1)
    conv("post_quant_conv", LATENT, LATENT, 1)
    conv("decoder.conv_in", LATENT, before)
    middle("decoder.mid", before)
    for i in reversed(range(len(widths))):
        for j in range(BLOCKS + 1):
            resnet(f"decoder.up.{i}.block.{j}", before, widths[i])
            before = widths[i]
        if i != 0:
            conv(f"decoder.up.{i}.upsample.conv", before, before)
    norm("decoder.norm_out", before)
    conv("decoder.conv_out", before, 3)
    return state


class Reference:
    def __init__(self, state):
        self.state = state

    def conv(self, x, name, **options):
        return F.conv2d(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"], **options)

    def same(self, x, name):
        return self.conv(x, name, padding=self.state[f"{name}.weight"].shape[-1] // 2)

    def norm(self, x, name):
        return F.group_norm(x, 32, self.state[f"{name}.weight"], self.state[f"{name}.bias"], 1e-6)

    def resnet(self, x, name):
        h = self.same(F.silu(self.norm(x, f"{name}.norm1")), f"{name}.conv1")
        h = self.same(F.silu(self.norm(h, f"{name}.norm2")), f"{name}.conv2")
        short = f"{name}.nin_shortcut"
        return h + (self.same(x, short) if f"{short}.weight" in self.state else x)

    def attention(self, x, name):
        h = self.norm(x, f"{name}.norm")
        q, k, v = (self.conv(h, f"{name}.{p}").flatten(2) for p in "qkv")
        weights = torch.softmax(q.transpose(1, 2) @ k / q.shape[1] ** 0.5, -1)
        return x + self.conv((v @ weights.transpose(1, 2)).view_as(x), f"{name}.proj_out")

    def middle(self, x, name):
        x = self.attention(self.resnet(x, f"{name}.block_1"), f"{name}.attn_1")
        return self.resnet(x, f"{name}.block_2")

    def blocks(self, x, name, count):
        for j in range(count):
            x = self.resnet(x, f"{name}.block.{j}")
        return x

    def encode(self, x):
        x = self.same(x, "encoder.conv_in")
        for i in range(len(LEVELS)):
            x = self.blocks(x, f"encoder.down.{i}", BLOCKS)
            if i != len(LEVELS) - 1:
                x = self.conv(F.pad(x, (0, 1, 0, 1)), f"encoder.down.{i}.downsample.conv", stride=2)
        x = self.middle(x, "encoder.mid")
        x = self.same(F.silu(self.norm(x, "encoder.norm_out")), "encoder.conv_out")
        return self.conv(x, "quant_conv")

    def decode(self, z):
        x = self.middle(
            self.same(self.conv(z, "post_quant_conv"), "decoder.conv_in"), "decoder.mid"
        )
        for i in reversed(range(len(LEVELS))):
            x = self.blocks(x, f"decoder.up.{i}", BLOCKS + 1)
            if i != 0:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
                x = self.same(x, f"decoder.up.{i}.upsample.conv")
        return self.same(F.silu(self.norm(x, "decoder.norm_out")), "decoder.conv_out")


def test_a_single_file_is_turned_into_a_folder_offline(tmp_path, monkeypatch):
    from diffusers import AutoencoderKL
    from safetensors.torch import save_file

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    state, path, folder = make_state(), tmp_path / "vae.safetensors", tmp_path / "vae"
    save_file(state, path)
    with pytest.raises(DataError, match=r"vae.safetensors is a single file, .*from_single_file"):
        Autoencoder(str(path))
    config = {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [CHANNELS * m for m in LEVELS],
        "layers_per_block": BLOCKS,
        "down_block_types": ["DownEncoderBlock2D"] * len(LEVELS),
        "up_block_types": ["UpDecoderBlock2D"] * len(LEVELS),
        "latent_channels": LATENT,
        "scaling_factor": 1.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    AutoencoderKL.from_single_file(str(path), config=str(tmp_path)).save_pretrained(folder)
    vae, reference = Autoencoder(str(folder)), Reference(state)
    assert (vae.channels, vae.factor, vae.scale_factor) == (LATENT, 4, 1.0)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    moments = vae.encode(images)
    torch.testing.assert_close(moments, reference.encode(images / 127.5 - 1), atol=1e-4, rtol=1e-4)
    z = moments[:, :LATENT]
    torch.testing.assert_close(
        vae.network.decode(z).sample, reference.decode(z), atol=1e-4, rtol=1e-4
    )
    assert vae.decode(z).shape == images.shape
