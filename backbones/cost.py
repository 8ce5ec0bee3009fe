"""Parameters, multiply-accumulates (MACs) and memory of a model, dense and routed (no torch here).

A MAC is one multiplication and one addition. What papers print as "GFLOPs" of a DiT are MACs: 118.6
G for DiT-XL/2 at 256 tokens. Two conventions are in use, and both are counted: with everything that
mixes tokens (QK^T and AV, scans, bi-WKV, convolutions, shifts), and linear layers only
(`*_no_attention`), as TREAD's authors count (114.42 G for the same model). Element-wise work
(norms, activations, gates) is in neither.

A step of guidance by two routed passes costs the sum of both: 97.67 G for Sparse Guidance with
DiT-XL/2, route 2-24, is 67.5 G at rate 0.5 plus 30.1 G at rate 0.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backbones.sizes import (
    BackboneError,
    Size,
    hidden_for,
    low_rank,
    matrix_head,
    parse_size,
)
from routing.route import Route, keep_count


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block.

    Attributes:
        params: Parameters without the block's share of the modulation.
        linear: MACs of the linear layers per token.
        mixing: Function of the number of tokens: MACs of everything that mixes them, per sample.
        saved: Floats that training keeps for the backward pass, per token (measured, within 15 %).
    """

    params: int
    linear: int
    mixing: Callable[[int], int]
    saved: int


@dataclass(frozen=True)
class Cost:
    """Cost of a model and of one forward pass of one sample.

    Attributes:
        params: Trainable parameters.
        macs_dense: MACs of a dense pass.
        macs_routed: MACs of a training pass with the route (the dense pass if the route is `none`).
        macs_dense_no_attention: `macs_dense` with linear layers only.
        macs_routed_no_attention: `macs_routed` with linear layers only.
        per_block: MACs of each block in the routed pass.
        tokens: Tokens in each block of the routed pass, prefix included.
        activation_bytes: What a routed training pass keeps for the backward pass, per sample.
    """

    params: int
    macs_dense: int
    macs_routed: int
    macs_dense_no_attention: int
    macs_routed_no_attention: int
    per_block: tuple[int, ...]
    tokens: tuple[int, ...]
    activation_bytes: int

    @property
    def speedup(self) -> float:
        """The speed-up that MACs allow: dense over routed."""
        return self.macs_dense / self.macs_routed

    def training_bytes(self, batch: int, ema: bool = True) -> int:
        """Predict the peak memory of a training step in bytes.

        Weights, gradients and Adam's two moments are float32, as is the EMA; temporaries of the
        backward pass are not counted.

        Args:
            batch: Samples in one forward pass.
            ema: Whether an averaged copy of the weights is kept.
        """
        return self.params * 4 * (5 if ema else 4) + batch * self.activation_bytes


def cost(
    name: str,
    size: str | Size = "S/2",
    *,
    route: str | Sequence[str] | Route = "none",
    in_channels: int = 4,
    input_size: int | Sequence[int] = 32,
    num_classes: int = 1000,
    text: Sequence[int] | None = None,
    learn_sigma: bool = False,
    attention: int | Sequence[int] = 0,
    depth: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    bytes_per_value: int = 4,
    **options: Any,
) -> Cost:
    """Count a model: the arguments of `backbones.create`, and a route.

    Args:
        name: Family.
        size: Letter and patch, as "S/2".
        route: Route of the training pass.
        in_channels: As in `Backbone`, with the nine arguments that follow.
        input_size: Side in pixels, or (height, width).
        num_classes: Classes; 0 for none.
        text: (L, E) of text prefix tokens.
        learn_sigma: Twice the output channels.
        attention: Attention blocks of a hybrid stack.
        depth: Overrides the size's depth.
        width: Overrides the size's width.
        heads: Overrides the size's heads.
        bytes_per_value: Of an activation: 4 in float32, 2 under bf16 autocast (an estimate then:
            the residual stream stays in float32).
        **options: The family's options.

    Raises:
        BackboneError: No count for this family or option.
        RouteError: A route that does not fit the depth.
    """
    shape = parse_size(size, depth, width, heads)
    d, patch = shape.width, shape.patch
    sides = (input_size, input_size) if isinstance(input_size, int) else tuple(input_size)
    grid = (sides[0] // patch) * (sides[1] // patch)
    prefix = text[0] if text else 0
    blocks = _stack(name, shape, options, attention)
    parsed = (route if isinstance(route, Route) else Route.parse(route)).resolve(shape.depth)
    inside = [grid] * shape.depth
    for segment in parsed.segments:
        for block in range(segment.start, segment.end + 1):
            inside[block] = keep_count(grid, segment.rate)
    tokens = tuple(prefix + n for n in inside)
    dense = (prefix + grid,) * shape.depth

    out = patch * patch * in_channels * (2 if learn_sigma else 1)
    patch_in = patch * patch * in_channels
    params = patch_in * d + d + 256 * d + d * d + 2 * d  # patches, time
    params += (num_classes + 1) * d if num_classes else 0
    params += shape.depth * 6 * (d * d + d) + 2 * (d * d + d) + out * (d + 1)  # modulation, head
    around = grid * d * (patch_in + out) + 256 * d + 3 * d * d + shape.depth * 6 * d * d
    if text:
        length, channels = text
        params += 2 * (channels * d + d) + length * channels
        around += (length + 1) * channels * d
    params += sum(b.params for b in blocks) + (d if name == "lightningdit" else 0)  # Head's norm.

    def macs(counts: Sequence[int], mixing: bool) -> list[int]:
        mod = 6 * d * d
        return [
            mod + b.linear * n + mixing * b.mixing(n) for b, n in zip(blocks, counts, strict=True)
        ]

    outside = around - shape.depth * 6 * d * d
    routed = macs(tokens, True)
    saved = sum(b.saved * n for b, n in zip(blocks, tokens, strict=True)) + 2 * d * grid
    return Cost(
        params=params,
        macs_dense=outside + sum(macs(dense, True)),
        macs_routed=outside + sum(routed),
        macs_dense_no_attention=outside + sum(macs(dense, False)),
        macs_routed_no_attention=outside + sum(macs(tokens, False)),
        per_block=tuple(routed),
        tokens=tokens,
        activation_bytes=bytes_per_value * saved,
    )


def _stack(
    name: str, size: Size, options: Mapping[str, Any], attention: int | Sequence[int]
) -> list[BlockCost]:
    if name not in COUNTS:
        raise BackboneError(
            f"backbones/cost.py has no count for {name!r}: it counts {', '.join(COUNTS)}; add one"
        )
    count = COUNTS[name]
    first, own, dit = count(size, {**options, "first": True}), count(size, options), _dit(size, {})
    if isinstance(attention, int):
        chosen = set(range(attention - 1, size.depth, attention)) if attention else set()
    else:
        chosen = set(attention)
    return [dit if i in chosen else own if i else first for i in range(size.depth)]


def _dit(size: Size, options: Mapping[str, Any]) -> BlockCost:
    d = size.width
    norms = 2 * (d // size.heads) if options.get("qk_norm", False) else 0
    extra = (3 if options.get("rope") else 0) + (5 if norms else 0)
    return BlockCost(
        params=12 * d * d + 9 * d + norms,
        linear=12 * d * d,
        mixing=lambda n: 2 * n * n * d,
        saved=(18 + extra) * d,
    )


def _rwkv(size: Size, options: Mapping[str, Any]) -> BlockCost:
    d = size.width
    hidden = round(d * options.get("ratio", 3.5) / 8) * 8
    norm = 2 * d if options.get("key_norm", False) else 0
    return BlockCost(
        params=5 * d * d + 2 * d * hidden + 7 * d + norm,
        linear=5 * d * d + 2 * d * hidden,
        # Two mixtures of 3 and 2 shifted inputs; two scans of a numerator and a denominator, and
        # the bonus.
        mixing=lambda n: n * d * (5 + 2 * 2 + 2),
        saved=(22 + (1 if norm else 0)) * d + 2 * hidden,
    )


def _mamba(size: Size, options: Mapping[str, Any]) -> BlockCost:
    if options.get("mixer", "mamba2") == "mamba1":
        return _mamba1(size, options)
    d, inner = size.width, 2 * size.width
    state = options.get("state") or size.state
    heads, mixed = inner // size.headdim, inner + 2 * state
    ways = 2 if options.get("scan", "alternate") == "bidirectional" else 1
    conv = 5 * mixed if options.get("conv", "true") != "none" else 0
    linear = d * (inner + mixed) + ways * d * heads + inner * d
    # h = a h + (dt x) B is two products a state entry, y = C h a third; dt x and skip x one each a
    # channel.
    scan = ways * (3 * inner * state + 2 * inner + (4 * mixed if conv else 0))
    return BlockCost(
        params=2 * (linear + ways * 3 * heads + conv + inner),
        linear=2 * linear,
        mixing=lambda n: 2 * n * scan,
        saved=2 * (5 * d + 4 * inner + 2 * mixed + (2 * mixed if conv else 0))
        + 2 * (ways - 1) * (d + 4 * inner + 3 * mixed),
    )


def _mamba1(size: Size, options: Mapping[str, Any]) -> BlockCost:
    d, inner, state = size.width, 2 * size.width, options.get("state") or 16
    rank = max(8, math.ceil(d / 16 / 8) * 8)
    ways = 2 if options.get("scan", "alternate") == "bidirectional" else 1
    conv = 5 * inner if options.get("conv", "true") != "none" else 0
    way = inner * (rank + 2 * state) + rank * inner
    linear = 2 * d * inner + ways * way + inner * d
    scan = ways * (3 * inner * state + 2 * inner + (4 * inner if conv else 0))
    return BlockCost(
        params=2 * (linear + ways * (2 * inner + inner * state) + conv),
        linear=2 * linear,
        mixing=lambda n: 2 * n * scan,
        saved=2 * (5 * d + 4 * inner + ways * (7 * inner + 2 * rank + 4 * state)),
    )


def _lightningdit(size: Size, options: Mapping[str, Any]) -> BlockCost:
    d, hidden = size.width, int(8 * size.width / 3)
    norms = 2 * (d // size.heads) if options.get("qk_norm", True) else 0
    extra = (3 if options.get("rope", True) else 0) + (5 if norms else 0)
    return BlockCost(
        params=4 * d * d + 3 * d * hidden + 7 * d + 2 * hidden + norms,
        linear=4 * d * d + 3 * d * hidden,
        mixing=lambda n: 2 * n * n * d,
        saved=(9 + extra) * d + 5 * hidden,
    )


def _hydra(size: Size, options: Mapping[str, Any]) -> BlockCost:
    d, inner = size.width, 2 * size.width
    state = options.get("state") or max(8, size.state // 2)
    heads, mixed = inner // size.headdim, inner + 4 * state
    conv = 0 if options.get("conv", "true") == "none" else 1
    linear = d * (inner + mixed) + 2 * d * heads + inner * heads + inner * d
    scan = 2 * (3 * inner * state + 2 * inner) + inner + conv * 8 * mixed
    return BlockCost(
        params=2 * (linear + 5 * heads + inner + conv * 8 * mixed),
        linear=2 * linear,
        mixing=lambda n: 2 * n * scan,
        saved=2 * (5 * d + 8 * inner + (3 + 3 * conv) * mixed),
    )


def _matrix_scan(width: int) -> int:
    """Products per token of a matrix state: decay, write and read of D x head entries."""
    return 3 * width * matrix_head(width)


def _gla(size: Size, options: Mapping[str, Any]) -> BlockCost:
    d, rank = size.width, low_rank(size.width)
    mixer = 4 * d * d + d * rank + rank * (d // 2)
    hidden = hidden_for(d, mixer + d // 2 + 2 * d, 3)
    return BlockCost(
        params=mixer + d // 2 + 2 * d + 3 * d * hidden,
        linear=mixer + 3 * d * hidden,
        mixing=lambda n: n * _matrix_scan(d) // 2,
        saved=23 * d + 5 * hidden,
    )


def _rwkv6(size: Size, options: Mapping[str, Any]) -> BlockCost:
    d, rank = size.width, low_rank(size.width)
    linear = 5 * d * d + 10 * d * (rank // 2) + 2 * d * rank
    mixer = linear + 10 * d
    hidden = hidden_for(d, mixer, 2, d * d)
    return BlockCost(
        params=mixer + d * d + 2 * d * hidden + 2 * d,
        linear=linear + d * d + 2 * d * hidden,
        mixing=lambda n: n * (_matrix_scan(d) + 2 * d + 13 * d),
        saved=51 * d + 2 * hidden,
    )


def _rwkv7(size: Size, options: Mapping[str, Any]) -> BlockCost:
    d, rank = size.width, low_rank(size.width)
    # Decay, rate, gate, and the blend with block 0's values (which block 0 has not), each of low
    # rank.
    blend = 0 if options.get("first") else 2 * d * rank
    linear = 4 * d * d + 6 * d * rank + blend
    mixer = linear + (13 + bool(blend)) * d
    hidden = hidden_for(d, 4 * d * d + 8 * d * rank + 14 * d, 2, d * d)
    return BlockCost(
        params=mixer + d * d + 2 * d * hidden + 2 * d,
        linear=linear + d * d + 2 * d * hidden,
        mixing=lambda n: n * (2 * _matrix_scan(d) + 10 * d),
        saved=79 * d + 2 * hidden,
    )


COUNTS: dict[str, Callable[[Size, Mapping[str, Any]], BlockCost]] = {
    "dit": _dit,
    "mamba": _mamba,
    "rwkv": _rwkv,
    "rwkv6": _rwkv6,
    "rwkv7": _rwkv7,
    "gla": _gla,
    "hydra": _hydra,
    "lightningdit": _lightningdit,
}
