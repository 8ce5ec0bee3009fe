"""Plain dense references, with a presence mask, of the blocks with a matrix state (see `reference`)."""

import math

import torch
from reference import linear, rms_norm, scan_order, shift, silu, softplus


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


def swiglu(mlp, x):
    gate, value = linear(mlp.w12, x).split(mlp.w3.in_features, dim=-1)
    return linear(mlp.w3, silu(gate) * value)


def channel_mix(module, x, present, grid, prefix):
    other = shift(x, present, grid, prefix, module.shift.missing)
    key, receptance = (x * mu + other * (1 - mu) for mu in module.shift.mix)
    hidden = torch.clamp(linear(module.key, key), min=0) ** 2
    return linear(module.value, hidden) * sigmoid(linear(module.receptance, receptance))


def gla(block, branch, x, present, grid, prefix):
    if branch == 1:
        return swiglu(block.mlp, x)
    mix = block.mixer
    q, k, v, gate = linear(mix.qkv, x).split([mix.narrow, mix.narrow, *[x.shape[-1]] * 2], dim=-1)
    g = -softplus(-linear(mix.decay_up, linear(mix.decay_down, x))) / 16
    q, k, v, g = (heads_of(z, mix.heads) for z in (q, k, v, g))
    k, g = masked(present, k, g)
    state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=x.dtype)
    out = [None] * x.shape[1]
    for t in scan_order(grid, prefix, block.scans[0]):
        state = torch.exp(g[:, t])[..., None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out[t] = (q[:, t, :, :, None] * state).sum(-2) / math.sqrt(q.shape[-1])
    return linear(mix.output, group_norm(torch.stack(out, 1), mix.norm) * silu(gate))


def rwkv6(block, branch, x, present, grid, prefix):
    if branch == 1:
        return channel_mix(block.channel, x, present, grid, prefix)
    mix = block.time
    away = shift(x, present, grid, prefix, mix.missing) - x
    low = torch.tanh(linear(mix.mix_down, x + away * mix.mix[5])).chunk(5, dim=-1)
    mixed = [x + away * (mix.mix[i] + low[i] @ mix.mix_up[i]) for i in range(5)]
    r, k, v = (
        linear(layer, z)
        for layer, z in zip((mix.receptance, mix.key, mix.value), mixed[:3], strict=True)
    )
    g = -torch.exp(linear(mix.decay_up, torch.tanh(linear(mix.decay_down, mixed[4]))))
    r, k, v, g = (heads_of(z, mix.heads) for z in (r, k, v, g.clamp(min=-10)))
    k, g = masked(present, k, g)
    state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=x.dtype)
    out = [None] * x.shape[1]
    for t in scan_order(grid, prefix, mix.path):
        write = k[:, t, :, :, None] * v[:, t, :, None, :]
        out[t] = (r[:, t, :, :, None] * (state + mix.bonus[..., None] * write)).sum(-2)
        state = torch.exp(g[:, t])[..., None] * state + write
    y = group_norm(torch.stack(out, 1), mix.norm) * silu(linear(mix.gate, mixed[3]))
    return linear(mix.output, y)


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


def centred_conv(conv, x, present, order):
    held = x * present[..., None]
    out = torch.zeros_like(x)
    for step, token in enumerate(order):
        total = conv.bias
        for tap in range(7):
            other = step + tap - 3
            if 0 <= other < len(order):
                total = total + conv.weight[:, tap] * held[:, order[other]]
        out[:, token] = total.expand_as(out[:, token])
    return silu(out)


def hydra(block, branch, x, present, grid, prefix):
    mix = (block.one, block.two)[branch]
    inner, state, size = mix.inner, mix.state, mix.headdim
    z, mixed = linear(mix.in_proj, x).split([inner, inner + 4 * state], dim=-1)
    order = scan_order(grid, prefix, mix.path)
    mixed = silu(mixed) if mix.conv is None else centred_conv(mix.conv, mixed, present, order)
    values, *bc = mixed.split([inner, state, state, state, state], dim=-1)
    heads = values.reshape(*values.shape[:2], -1, size)
    y = linear(mix.diagonal, values)[..., None] * heads
    for n, way in enumerate(mix.directions):
        b, c = bc[2 * n], bc[2 * n + 1]
        dt = softplus(linear(way.dt_proj, x) + way.dt_bias) * present[..., None]
        fade = torch.exp(dt * -torch.exp(way.log_a))[..., None, None]
        h = torch.zeros(*heads[:, 0].shape, state, dtype=x.dtype)
        outs = [None] * x.shape[1]
        for t in scan_order(grid, prefix, mix.path + (":reversed" if n else "")):
            h = fade[:, t] * h
            outs[t] = (h * c[:, t, None, None, :]).sum(-1)  # Before the token's own write.
            h = h + (dt[:, t, :, None] * heads[:, t])[..., None] * b[:, t, None, None, :]
        y = y + torch.stack(outs, 1)
    return linear(mix.out_proj, rms_norm(y.flatten(2) * silu(z), mix.scale))
