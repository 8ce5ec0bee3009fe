"""RWKV for images: a spatial mix (bidirectional WKV) and a channel mix, each after a token shift.

Vision-RWKV (arXiv 2403.02308) as Diffusion-RWKV (arXiv 2404.04478) uses it; the latter's long skips
are `backbone.skips`. Two operators depend on a token's position: the shift takes a quarter of the
channels from each grid neighbour, and in bi-WKV a token's weight decays with its distance along the
raster path. Inside a route both ask the layout, so that they compute what the dense operators would
with the absent tokens masked.
"""

import math

import torch
from torch import Tensor, nn

from backbones.layers import Block
from backbones.ops.biwkv import biwkv
from backbones.ops.native import OPERATIONS
from backbones.ops.shift import shift_mix
from backbones.options.rwkv import RWKVOptions
from backbones.sizes import Size
from routing.layout import Layout


class Shift(nn.Module):
    """Mix every token with its four grid neighbours, once for each of several inputs.

    Args:
        width: Channels D; a quarter comes from each neighbour.
        mixes: How many differently weighted mixtures to return.
        missing: What replaces a neighbour that a route removed: `self`, `zero`, or the `nearest`
            token present in the same direction. Outside the image it is 0, as in the dense
            operator.
    """

    def __init__(self, width: int, mixes: int, missing: str) -> None:
        super().__init__()
        self.missing = missing
        self.mix = nn.Parameter(torch.ones(mixes, width))

    def forward(self, x: Tensor, layout: Layout) -> list[Tensor]:
        """Return x mix + shifted (1 - mix) for each mix: tokens (B, T, D) each."""
        grid = layout.grid if layout.is_full else None
        table = layout.neighbours(self.missing)
        return shift_mix(x, table, self.mix, grid, layout.prefix)


class SpatialMix(nn.Module):
    """Receptance-gated bi-WKV.

    out = W_o (sigmoid(r) * biwkv(k, v)),  r, k, v = W (x mix + shift(x) (1 - mix))
    """

    def __init__(self, width: int, options: RWKVOptions) -> None:
        super().__init__()
        self.wkv, self.kernel = options.wkv, options.kernel
        self.shift = Shift(width, 3, options.missing)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.key_norm = nn.LayerNorm(width) if options.key_norm else nn.Identity()
        self.decay = nn.Parameter(torch.zeros(width))
        self.bonus = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Mix tokens (B, T, D)."""
        to_key, to_value, to_receptance = self.shift(x, layout)
        k, v = self.key_norm(self.key(to_key)), self.value(to_value)
        receptance = self.receptance(to_receptance)
        # True distances and the full length make the routed layer the dense one with absent keys at
        # -inf; by rank, distances and the length shrink together, as in the released code.
        true = self.wkv == "true"
        position = layout.positions("raster") if true and not layout.is_full else None
        length = layout.full_length if true else layout.length
        # Raster order already, so nothing moves; but the control `unsorted` shuffles every scan
        # order.
        k, v = layout.to_scan(k, "raster"), layout.to_scan(v, "raster")
        mixed = biwkv(k, v, self.decay, self.bonus, position, length, kernel=self.kernel)
        mixed = layout.from_scan(mixed, "raster").to(receptance.dtype)
        return self.output(OPERATIONS[x.device.type].sigmoid_gate(receptance, mixed))


class ChannelMix(nn.Module):
    """Gated MLP with squared ReLU: out = sigmoid(r) * W_v relu(W_k x')^2."""

    def __init__(self, width: int, hidden: int, missing: str) -> None:
        super().__init__()
        self.shift = Shift(width, 2, missing)
        self.key = nn.Linear(width, hidden, bias=False)
        self.value = nn.Linear(hidden, width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Mix channels of tokens (B, T, D)."""
        to_key, to_receptance = self.shift(x, layout)
        ops = OPERATIONS[x.device.type]
        hidden = ops.squared_relu(self.key(to_key))
        return ops.sigmoid_gate(self.receptance(to_receptance), self.value(hidden))

    def initialise(self, index: int, depth: int) -> None:
        """Initialise the mixtures: neighbours weigh more in early channels, less in deep blocks."""
        width = self.receptance.in_features
        self.shift.mix.copy_((torch.arange(width) / width).pow(1 - index / depth).expand(2, -1))


class RWKVBlock(Block):
    """Spatial mix, then channel mix."""

    def __init__(self, size: Size, index: int, grid: tuple[int, int], options: RWKVOptions) -> None:
        super().__init__(index)
        self.depth, width = size.depth, size.width
        self.spatial = SpatialMix(width, options)
        self.channel = ChannelMix(width, options.hidden(width), options.missing)
        self.kernels = [("biwkv", options.kernel), ("shift", "auto")]
        self.scans = ("raster",)
        self.tables = [("neighbours", options.missing)]
        if options.wkv == "true":
            self.tables.append(("positions", "raster"))

    def forward(self, x: Tensor, cond: Tensor, layout: Layout) -> Tensor:
        """Run the block on tokens (B, T, D) under its modulation (B, 6, 1, D)."""
        ops = OPERATIONS[x.device.type]
        shift1, scale1, gate1, shift2, scale2, gate2 = cond.unbind(1)
        x = ops.gated_sum(x, gate1, self.spatial(ops.adaln(x, shift1, scale1), layout))
        return ops.gated_sum(x, gate2, self.channel(ops.adaln(x, shift2, scale2), layout))

    def initialise(self) -> None:
        """Initialise as RWKV-4 ("fancy"): decay, bonus and mixes depend on the depth."""
        super().initialise()
        width = self.spatial.decay.numel()
        depth_01 = self.index / max(self.depth - 1, 1)
        fall = 1 - self.index / self.depth
        channel = torch.arange(width, dtype=torch.float32)
        ramp = channel / width
        self.spatial.decay.copy_(-5 + 8 * (channel / max(width - 1, 1)) ** (0.7 + 1.3 * depth_01))
        # A small ripple keeps neighbouring channels from starting equal.
        self.spatial.bonus.copy_(math.log(0.3) + ((channel + 1) % 3 - 1) * 0.5)
        key, value, receptance = self.spatial.shift.mix
        key.copy_(ramp**fall)
        value.copy_(ramp**fall + 0.3 * depth_01)
        receptance.copy_(ramp ** (0.5 * fall))
        self.channel.initialise(self.index, self.depth)
