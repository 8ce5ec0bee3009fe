"""Plain dense references of every block, with a presence mask: what a routed block must equal.

Written from the definitions, token by token, in the dtype they are given (tests use float64); nothing of
`backbones` but its weights is used, and nothing of `routing` at all. The sequence keeps its full length
everywhere. `present` (B, T) says which tokens a route left in; prefix tokens are always in. Masking semantics:

* attention: an absent key has weight 0;
* scan: dt = 0 at an absent token (no decay, no write);
* causal convolution over true distances: an absent token's input is 0;
* bi-WKV: k = -inf at an absent token, distances and length those of the full sequence;
* token shift: an absent neighbour is replaced by the policy; outside the image is 0.
"""

import math

import torch


def layer_norm(x, eps=1e-6):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)


def rms_norm(x, weight, eps=1e-6):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def silu(x):
    return x / (1 + torch.exp(-x))


def softplus(x):
    return torch.log1p(torch.exp(x))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(layer, x):
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias


def snake(grid, k):
    """Raster ids along path zigzag:k: bit 0 walks columns, bit 1 starts right, bit 2 at the bottom."""
    rows, columns = grid
    ys = list(range(rows))[:: -1 if k & 4 else 1]
    xs = list(range(columns))[:: -1 if k & 2 else 1]
    out = []
    if k & 1:
        for n, x in enumerate(xs):
            out += [y * columns + x for y in (ys if n % 2 == 0 else ys[::-1])]
    else:
        for n, y in enumerate(ys):
            out += [y * columns + x for x in (xs if n % 2 == 0 else xs[::-1])]
    return out


def scan_order(grid, prefix, name):
    """Token index at each step of a scan over the full sequence."""
    reverse = name.endswith(":reversed")
    base = name.removesuffix(":reversed")
    steps = list(range(grid[0] * grid[1])) if base == "raster" else snake(grid, int(base[-1]))
    steps = steps[::-1] if reverse else steps
    return list(range(prefix)) + [prefix + s for s in steps]


def gaps_along(order, present, prefix):
    """Distance to the previous present token along a path, for each token (B, T); 1 for the first."""
    batch, tokens = present.shape
    gaps = torch.ones(batch, tokens, dtype=torch.float64)
    for b in range(batch):
        last = None
        for step, token in enumerate(order):
            if token < prefix or not present[b, token]:
                continue
            gaps[b, token] = 1 if last is None else step - last
            last = step
    return gaps


def rope_angles(size, grid):
    rows, columns = grid
    out = torch.zeros(rows * columns, size // 2, dtype=torch.float64)
    for y in range(rows):
        for x in range(columns):
            for i in range(size // 4):
                rate = 10000.0 ** (-i / (size // 4))
                out[y * columns + x, i] = y * rate
                out[y * columns + x, size // 4 + i] = x * rate
    return out.float().double()


def rotated(x, angles, prefix):
    """Rotate channel pairs (2 i, 2 i + 1) of the grid tokens of (B, heads, T, size)."""
    out = x.clone()
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[:, :, prefix:, 0::2], x[:, :, prefix:, 1::2]
    out[:, :, prefix:, 0::2] = even * cos - odd * sin
    out[:, :, prefix:, 1::2] = even * sin + odd * cos
    return out


def attention(module, x, present, grid, prefix):
    batch, tokens, width = x.shape
    size = width // module.heads
    q, k, v = linear(module.qkv, x).split(width, dim=-1)

    def heads(z):
        return torch.stack([z[..., h * size : (h + 1) * size] for h in range(module.heads)], dim=1)

    q, k, v = heads(q), heads(k), heads(v)
    if getattr(module.q_norm, "weight", None) is not None:
        q, k = rms_norm(q, module.q_norm.weight), rms_norm(k, module.k_norm.weight)
    if module.angles is not None:
        angles = rope_angles(size, grid)
        q, k = rotated(q, angles, prefix), rotated(k, angles, prefix)
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    scores = scores.masked_fill(~present[:, None, None, :], -math.inf)
    weight = torch.exp(scores - scores.max(-1, keepdim=True).values)
    weight = weight / weight.sum(-1, keepdim=True)
    out = weight @ v
    return linear(module.proj, torch.cat([out[:, h] for h in range(module.heads)], dim=-1))


def dit(block, branch, x, present, grid, prefix):
    if branch == 0:
        return attention(block.attention, x, present, grid, prefix)
    return linear(block.fc2, gelu_tanh(linear(block.fc1, x)))


def causal_conv(conv, x, present, order):
    """Depthwise convolution along a path over the masked input; x (B, T, C) in canonical order."""
    masked = x * present[..., None]
    out = torch.zeros_like(x)
    for step, token in enumerate(order):
        total = conv.bias
        for tap in range(conv.weight.shape[1]):
            earlier = step - (conv.weight.shape[1] - 1 - tap)
            if earlier >= 0:
                total = total + conv.weight[:, tap] * masked[:, order[earlier]]
        out[:, token] = total.expand_as(out[:, token])
    return silu(out)


def steps_and_decay(raw, bias, gap, present, order, prefix):
    dt = softplus(raw + bias)
    gaps = gaps_along(order, present, prefix).clamp(max=4.0).to(dt.dtype)[..., None]
    if gap == "dt":
        dt = dt * gaps
    dt = dt * present[..., None]
    return dt, dt * gaps if gap == "decay" else dt


def mamba2(mixer, u, present, grid, prefix):
    inner, state, size = mixer.inner, mixer.state, mixer.headdim
    z, mixed = linear(mixer.in_proj, u).split([inner, inner + 2 * state], dim=-1)
    y = 0
    for n, way in enumerate(mixer.directions):
        order = scan_order(grid, prefix, mixer.path + (":reversed" if n else ""))
        m = silu(mixed) if mixer.conv is None else causal_conv(mixer.conv, mixed, present, order)
        x, b, c = m.split([inner, state, state], dim=-1)
        raw = linear(way.dt_proj, u)
        dt, fade = steps_and_decay(raw, way.dt_bias, mixer.options.gap, present, order, prefix)
        a = -torch.exp(way.log_a)
        x = x.reshape(*x.shape[:2], -1, size)
        h = torch.zeros(*x[:, 0].shape, state, dtype=x.dtype)
        outs = [None] * u.shape[1]
        for token in order:
            decay = torch.exp(fade[:, token] * a)[..., None, None]
            write = (dt[:, token, :, None] * x[:, token])[..., None] * b[:, token, None, None, :]
            h = decay * h + write
            out = (h * c[:, token, None, None, :]).sum(-1) + way.skip[:, None] * x[:, token]
            outs[token] = out.reshape(u.shape[0], -1)
        y = y + torch.stack(outs, dim=1)
    return linear(mixer.out_proj, rms_norm(y * silu(z), mixer.scale))


def mamba1(mixer, u, present, grid, prefix):
    rank, state = mixer.rank, mixer.state
    whole, z = linear(mixer.in_proj, u).split(mixer.inner, dim=-1)
    y = 0
    for n, way in enumerate(mixer.directions):
        order = scan_order(grid, prefix, mixer.path + (":reversed" if n else ""))
        x = silu(whole) if mixer.conv is None else causal_conv(mixer.conv, whole, present, order)
        low, b, c = linear(way.project, x).split([rank, state, state], dim=-1)
        raw = linear(way.dt_proj, low)
        dt, fade = steps_and_decay(raw, way.dt_bias, mixer.options.gap, present, order, prefix)
        a = -torch.exp(way.log_a)
        h = torch.zeros(*x[:, 0].shape, state, dtype=x.dtype)
        outs = [None] * u.shape[1]
        for token in order:
            write = (dt[:, token] * x[:, token])[..., None] * b[:, token, None, :]
            h = torch.exp(fade[:, token, :, None] * a) * h + write
            outs[token] = (h * c[:, token, None, :]).sum(-1) + way.skip * x[:, token]
        y = y + torch.stack(outs, dim=1)
    return linear(mixer.out_proj, y * silu(z))


def mamba(block, branch, x, present, grid, prefix):
    mixer = (block.one, block.two)[branch]
    run = mamba2 if mixer.options.mixer == "mamba2" else mamba1
    return run(mixer, x, present, grid, prefix)


def neighbour(b, y, x, step, grid, present, prefix, missing):
    """Index of the token that stands for a neighbour, or None for a row of zeros."""
    rows, columns = grid
    ny, nx = y + step[0], x + step[1]
    if not (0 <= ny < rows and 0 <= nx < columns):
        return None
    if present[b, prefix + ny * columns + nx]:
        return prefix + ny * columns + nx
    if missing == "self":
        return prefix + y * columns + x
    while missing == "nearest" and 0 <= ny < rows and 0 <= nx < columns:
        if present[b, prefix + ny * columns + nx]:
            return prefix + ny * columns + nx
        ny, nx = ny + step[0], nx + step[1]
    return None


def shift(x, present, grid, prefix, missing):
    """A quarter of the channels from each of the left, right, upper and lower neighbour."""
    batch, _, width = x.shape
    quarter = width // 4
    rows = []
    for b in range(batch):
        row = [torch.zeros(width, dtype=x.dtype)] * prefix
        for y in range(grid[0]):
            for x_ in range(grid[1]):
                parts = []
                for n, step in enumerate(((0, -1), (0, 1), (-1, 0), (1, 0))):
                    source = neighbour(b, y, x_, step, grid, present, prefix, missing)
                    stop = (n + 1) * quarter if n < 3 else width
                    piece = slice(n * quarter, stop)
                    zeros = torch.zeros(stop - n * quarter, dtype=x.dtype)
                    parts.append(zeros if source is None else x[b, source, piece])
                row.append(torch.cat(parts))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def biwkv(k, v, decay, bonus, present, rank=False):
    """Literal sum over all pairs, distances on the full sequence (raster after the prefix).

    By rank, distances count the present tokens alone, and the length is their number.
    """
    tokens = k.shape[1]
    place = torch.arange(tokens).expand(k.shape[:2])
    if rank:
        place = present.cumsum(1) - 1
        tokens = present.sum(1).view(-1, 1, 1, 1)
    distance = (place[:, :, None] - place[:, None, :]).abs()[..., None]
    score = k[:, None] - decay / tokens * (distance - 1)
    own = torch.eye(k.shape[1], dtype=torch.bool)[None, ..., None]
    score = torch.where(own, k[:, None] + bonus / tokens, score)
    score = score.masked_fill(~present[:, None, :, None], -math.inf)
    weight = torch.exp(score - score.max(2, keepdim=True).values)
    return (weight * v[:, None]).sum(2) / weight.sum(2)


def rwkv(block, branch, x, present, grid, prefix, missing=None):
    module = (block.spatial, block.channel)[branch]
    other = shift(x, present, grid, prefix, missing or module.shift.missing)
    mixed = [x * mu + other * (1 - mu) for mu in module.shift.mix]
    if branch == 0:
        k, v = linear(module.key, mixed[0]), linear(module.value, mixed[1])
        gate = 1 / (1 + torch.exp(-linear(module.receptance, mixed[2])))
        out = biwkv(k, v, module.decay, module.bonus, present, module.wkv == "rank")
        return linear(module.output, gate * out)
    hidden = torch.clamp(linear(module.key, mixed[0]), min=0) ** 2
    return linear(module.value, hidden) / (1 + torch.exp(-linear(module.receptance, mixed[1])))


def lightningdit(block, branch, x, present, grid, prefix):
    if branch == 0:
        return attention(block.attention, x, present, grid, prefix)
    gate, value = linear(block.mlp.w12, x).split(block.mlp.w3.in_features, dim=-1)
    return linear(block.mlp.w3, silu(gate) * value)


def branches():
    import reference_scans as scans

    return {
        "DiTBlock": dit,
        "LightningDiTBlock": lightningdit,
        "MambaBlock": mamba,
        "RWKVBlock": rwkv,
        "RWKV7Block": scans.rwkv7,
    }


def run_block(block, x, modulation, present, grid, prefix, **changes):
    """One block with adaLN-zero on the full sequence; absent tokens pass by unchanged."""
    branch = branches()[type(block).__name__]
    y = x
    for n in range(1 if getattr(block, "two", block) is None else 2):
        shift_, scale, gate = (modulation[:, 3 * n + i] for i in range(3))
        plain = rms_norm(y, block.norms[n].weight) if hasattr(block, "norms") else layer_norm(y)
        inside = plain * (1 + scale) + shift_
        y = y + gate * branch(block, n, inside, present, grid, prefix, **changes)
    return torch.where(present[..., None], y, x)


def run_stack(blocks, x, cond, grid, prefix, segments=(), **changes):
    """All blocks; `segments` lists (start, end, present (B, T)) with both ends inclusive."""
    everything = torch.ones(x.shape[:2], dtype=torch.bool)
    memory = {}
    skips = {}  # outputs of the first half's blocks, where long skips take them
    for i, block in enumerate(blocks):
        present = everything
        for start, end, kept in segments:
            if start <= i <= end:
                present = kept
        before = x
        if type(block).__name__ == "LongSkipBlock":
            if block.join is not None:
                joined = linear(block.join, torch.cat([x, skips[len(blocks) - 1 - i]], dim=-1))
                x = torch.where(present[..., None], joined, x)
            block = block.block
        own = {"memory": memory} if type(block).__name__ == "RWKV7Block" else {}
        x = run_block(block, x, cond[i], present, grid, prefix, **changes, **own)
        assert torch.equal(x[~present], before[~present])
        skips[i] = x
    return x
