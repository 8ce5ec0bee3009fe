"""Plain dense references, with a presence mask, of RWKV-7, whose state is a matrix (see `reference`)."""

import math

import torch
from reference import linear, scan_order, shift


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def heads_of(x, count):
    return x.reshape(*x.shape[:2], count, -1)


def group_norm(y, norm):
    """Normalise each head of (B, T, H, V) and flatten."""
    centred = y - y.mean(-1, keepdim=True)
    unit = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + norm.eps)
    return unit.flatten(2) * norm.weight + norm.bias


def masked(present, *tensors):
    return [x * present.reshape(*present.shape, *[1] * (x.dim() - 2)) for x in tensors]


def channel_mix(module, x, present, grid, prefix):
    other = shift(x, present, grid, prefix, module.shift.missing)
    key, receptance = (x * mu + other * (1 - mu) for mu in module.shift.mix)
    hidden = torch.clamp(linear(module.key, key), min=0) ** 2
    return linear(module.value, hidden) * sigmoid(linear(module.receptance, receptance))


def rwkv7(block, branch, x, present, grid, prefix, memory):
    if branch == 1:
        return channel_mix(block.channel, x, present, grid, prefix)
    mix = block.time
    other = shift(x, present, grid, prefix, mix.shift.missing)
    xr, xk, xv, xw, xa, xg = (x * mu + other * (1 - mu) for mu in mix.shift.mix)
    r, k, v = linear(mix.receptance, xr), linear(mix.key, xk), linear(mix.value, xv)
    # Tokens that are absent from the first block have no values of it: zeros.
    first = memory.setdefault("v_first", masked(present, v)[0])
    if mix.blend is not None:
        share = sigmoid(linear(mix.blend.up, linear(mix.blend.down, xv)))
        v = v + (first - v) * share
    rate = sigmoid(linear(mix.rate.up, linear(mix.rate.down, xa)))
    slow = sigmoid(linear(mix.decay.up, torch.tanh(linear(mix.decay.down, xw))))
    unit = heads_of(k * mix.key_unit, mix.heads)
    unit = unit / torch.sqrt((unit**2).sum(-1, keepdim=True))
    k = k * (1 + (rate - 1) * mix.key_rate)
    g = -math.exp(-0.5) * slow
    r, k, v, g, rate = (heads_of(z, mix.heads) for z in (r, k, v, g, rate))
    held, faded, look, put = masked(present, k, g, -unit, unit * rate)
    state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=x.dtype)
    out = [None] * x.shape[1]
    for t in scan_order(grid, prefix, mix.path):
        found = (look[:, t, :, :, None] * state).sum(-2, keepdim=True)
        state = torch.exp(faded[:, t])[..., None] * state + put[:, t, :, :, None] * found
        state = state + held[:, t, :, :, None] * v[:, t, :, None, :]
        out[t] = (r[:, t, :, :, None] * state).sum(-2)
    own = (r * k * mix.bonus).sum(-1, keepdim=True) * v
    y = group_norm(torch.stack(out, 1), mix.norm) + own.flatten(2)
    gate = linear(mix.gate.up, linear(mix.gate.down, 1 / (1 + torch.exp(-xg))))
    return linear(mix.output, y * gate)
