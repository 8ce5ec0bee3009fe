"""Latent diffusion's autoencoder written out in plain operations, against diffusers' under our renaming."""

import pickle

import pytest
import torch
from torch.nn import functional as F

from experiments.data import DataError
from experiments.data.encoders import Autoencoder, why_not

CHANNELS, LEVELS, BLOCKS, LATENT = 32, (1, 1, 2), 2, 6


def make_state():
    """A state dict in latent diffusion's layout: attention at the lowest resolution, as VA-VAE has."""
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
            if i == last:
                attention(f"encoder.down.{i}.attn.{j}", width)
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
            if i == last:
                attention(f"decoder.up.{i}.attn.{j}", before)
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
            if f"{name}.attn.{j}.q.weight" in self.state:
                x = self.attention(x, f"{name}.attn.{j}")
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


@pytest.fixture(scope="module")
def state():
    return make_state()


@pytest.mark.parametrize("kind", ["pt", "ckpt", "safetensors", "whole model"])
def test_single_files_decode_as_the_original_code_does(tmp_path, state, kind):
    if kind == "safetensors":
        from safetensors.torch import save_file

        path = tmp_path / "vae.safetensors"
        save_file(state, path)
    elif kind == "whole model":
        path = tmp_path / "sd.ckpt"
        whole = {f"first_stage_model.{k}": v for k, v in state.items()}
        torch.save({"state_dict": {**whole, "model.diffusion_model.x": torch.zeros(1)}}, path)
    else:
        path = tmp_path / f"vae.{kind}"
        # VA-VAE's file holds more than the autoencoder.
        torch.save({"state_dict": {**state, "linear_proj.weight": torch.zeros(2, 2)}}, path)
    assert why_not(str(path)) == ""
    vae = Autoencoder(str(path))
    reference = Reference(state)
    assert (vae.channels, vae.factor, vae.scale_factor) == (LATENT, 4, 1.0)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    moments = vae.encode(images)
    torch.testing.assert_close(moments, reference.encode(images / 127.5 - 1), atol=1e-4, rtol=1e-4)
    z = moments[:, :LATENT]
    torch.testing.assert_close(
        vae.network.decode(z).sample, reference.decode(z), atol=1e-4, rtol=1e-4
    )
    assert vae.decode(z).shape == images.shape


def test_what_is_no_autoencoder_is_refused(tmp_path, state):
    ran = tmp_path / "ran"

    class Malicious:
        def __reduce__(self):
            return open, (str(ran), "w")

    def refused(name, content, words):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(DataError) as error:
            Autoencoder(str(path))
        assert words in str(error.value) and "\n" not in str(error.value)

    refused("a.pt", pickle.dumps(Malicious()), "can run code")
    refused("b.pt", {"state_dict": Malicious()}, "can run code")
    assert not ran.exists()
    refused("c.pt", {"weight": torch.zeros(2)}, "is no autoencoder of latent diffusion")
    broken = dict(state)
    del broken["decoder.up.0.block.1.conv1.weight"]
    refused("d.pt", broken, "is no autoencoder of latent diffusion")
    refused("e.safetensors", b"nonsense", "is damaged")
    refused("f.onnx", b"x", "expected one of .pt")
