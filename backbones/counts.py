"""What one block of each family costs: parameters, MACs, kept activations (no torch here).

Linear layers are what torch's counter sees; scans, bi-WKV, convolutions and shifts are counted by
hand, as recurrences: chunked algorithms do more products than that, and are faster all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backbones.sizes import BackboneError, Size, hidden_for, low_rank, matrix_head


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


def count_blocks(
    name: str, size: Size, options: Mapping[str, Any], attention: int | Sequence[int]
) -> list[BlockCost]:
    """Return the cost of every block of a stack.

    Args:
        name: Family.
        size: Depth, width and heads.
        options: The family's options.
        attention: Attention blocks of a hybrid stack, as in `Backbone`.

    Raises:
        BackboneError: Nobody has counted this family.
    """
    if name not in COUNTS:
        raise BackboneError(
            f"backbones/counts.py has no count for {name!r}: it counts {', '.join(COUNTS)}; add one"
        )
    count = COUNTS[name]
    first, own, dit = (
        count(size, {**options, "first": True}),
        count(size, options),
        attention_cost(size, {}),
    )
    chosen = set(attention_blocks(attention, size.depth))
    return [dit if i in chosen else own if i else first for i in range(size.depth)]


def attention_blocks(attention: int | Sequence[int], depth: int) -> tuple[int, ...]:
    """Resolve the option `attention` of a hybrid stack to block indices.

    Args:
        attention: Every so many blocks one (0 for none), or the indices.
        depth: Blocks of the stack.

    Raises:
        BackboneError: Something else, or an index outside the stack.
    """
    if type(attention) is int and attention >= 0:
        return tuple(range(attention - 1, depth, attention)) if attention else ()
    given = [attention] if isinstance(attention, int | str) else list(attention)
    bad = [i for i in given if type(i) is not int or not 0 <= i < depth]
    if bad:
        raise BackboneError(
            f"attention={attention}: there is no block {bad[0]}, blocks "
            f"are 0..{depth - 1}; type 4 for every fourth or [2,5] for these two"
        )
    return tuple(sorted(set(given)))


def attention_cost(size: Size, options: Mapping[str, Any] | None = None) -> BlockCost:
    """Return the cost of a DiT block."""
    options = options or {}
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
        saved=2 * (5 * d + 3 * inner + mixed + (2 * mixed if conv else 0))
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
    "dit": attention_cost,
    "mamba": _mamba,
    "rwkv": _rwkv,
    "rwkv6": _rwkv6,
    "rwkv7": _rwkv7,
    "gla": _gla,
    "hydra": _hydra,
    "lightningdit": _lightningdit,
}
