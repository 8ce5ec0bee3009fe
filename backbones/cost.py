"""Parameters, multiply-accumulates (MACs) and memory of a model, dense and routed (no torch here).

A MAC is one multiplication and one addition. What papers print as "GFLOPs" of a DiT are MACs: 118.6
G for DiT-XL/2 at 256 tokens. Two conventions are in use, and both are counted: with everything that
mixes tokens (QK^T and AV, scans, bi-WKV, convolutions, shifts), and linear layers only
(`*_no_attention`), as TREAD's authors count (114.42 G for the same model). Element-wise work
(norms, activations, gates) is in neither.

A step of guidance by two routed passes costs the sum of both: 97.67 G for Sparse Guidance with
DiT-XL/2, route 2-24, is 67.5 G at rate 0.5 plus 30.1 G at rate 0.9.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backbones import dit_spec
from backbones.registry import build_options, find
from backbones.sizes import (
    AlignOptions,
    DecoderOptions,
    Size,
    attention_blocks,
    parse_size,
    patch_grid,
)
from routing.options import check_words
from routing.route import Route, keep_count


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
    fuse: str | None = None,
    decoder: Mapping[str, int] | None = None,
    align: Mapping[str, int] | None = None,
    reinsert: str = "identity",
    remove: str = "start",
    bytes_per_value: int = 4,
    **options: Any,
) -> Cost:
    """Count a model built by `backbones.create` with these arguments, and a route.

    `route` is the route of the training pass; `reinsert` (after `none` dropped tokens never return)
    and `remove` (when tokens leave) are as in `routing.Routing`. `bytes_per_value` of an activation
    is 4 in float32, 2 under bf16 autocast (an estimate then: the residual stream stays in float32).
    Of `align` (REPA) the parameters count, the MACs (training only) do not.

    Raises:
        BackboneError: Unknown family, size or option, or values that do not fit.
        RouteError: A route that does not fit the depth.
        RoutingError: A `reinsert` or `remove` that there is not, or that does not fit the route.
    """
    shape = parse_size(size, depth, width, heads)
    d, patch = shape.width, shape.patch
    rows, columns = patch_grid(input_size, patch)
    grid, prefix = rows * columns, text[0] if text else 0
    family, hybrid = find(name), attention_blocks(attention, shape.depth)
    own, dit = family.parse(shape, options), dit_spec.block_cost(shape, dit_spec.DiTOptions())
    blocks = [dit if i in hybrid else family.cost(shape, own, i) for i in range(shape.depth)]
    parsed = Route.parse(route).resolve(shape.depth)
    check_words(reinsert, remove, parsed)
    tokens = tuple(prefix + n for n in _present(parsed, shape.depth, grid, reinsert, remove))
    dense = (prefix + grid,) * shape.depth
    last = grid if reinsert != "none" or not parsed else tokens[-1] - prefix
    patch_in = patch * patch * in_channels
    out = patch_in * (2 if learn_sigma else 1)
    parts = [_layer(patch_in, d, grid), _layer(256, d), _layer(d, d)]  # Patches and time.
    parts += [Part((num_classes + 1) * d)] if num_classes else []
    if text:
        length, channels = text
        parts += [_layer(channels, d, length), _layer(channels, d), Part(length * channels)]
    parts += [Part(sum(b.params for b in blocks)), _layer(d, shape.depth * 6 * d)]
    # SPRINT's fusion of two streams.
    parts += [Part(2 * d * d + 2 * d, 2 * d * d * (prefix + grid))] if fuse else []
    if decoder is None:
        weights = d if family.weighted_norms else 0
        parts += [_layer(d, 2 * d), Part((d + 1) * out + weights, kept=d * out)]
    else:
        given = build_options(DecoderOptions, decoder, "decoder")
        parts += _decoder(d, out, grid, prefix, given)
    if align is not None:
        to = build_options(AlignOptions, align, "align")
        sides = ((d, to.hidden), (to.hidden, to.hidden), (to.hidden, to.channels))
        parts += [_layer(inputs, outputs, 0) for inputs, outputs in sides]

    def total(counts: Sequence[int], kept: int, mixing: bool) -> int:
        around = sum(p.linear + p.kept * kept + mixing * p.mixing for p in parts)
        pairs = zip(blocks, counts, strict=True)
        return around + sum(b.linear * n + mixing * b.mixing(n) for b, n in pairs)

    pairs = list(zip(blocks, tokens, strict=True))
    saved = sum(b.saved * n for b, n in pairs) + 2 * d * grid
    return Cost(
        params=sum(part.params for part in parts),
        macs_dense=total(dense, grid, True),
        macs_routed=total(tokens, last, True),
        macs_dense_no_attention=total(dense, grid, False),
        macs_routed_no_attention=total(tokens, last, False),
        per_block=tuple(6 * d * d + b.linear * n + b.mixing(n) for b, n in pairs),
        tokens=tokens,
        activation_bytes=bytes_per_value * saved,
    )


@dataclass(frozen=True)
class Part:
    """Cost of what is around the blocks.

    Attributes:
        params: Parameters.
        linear: MACs of linear layers per sample.
        kept: More of these per grid token that comes out of the stack.
        mixing: MACs per sample of what mixes tokens.
    """

    params: int = 0
    linear: int = 0
    kept: int = 0
    mixing: int = 0


def _present(route: Route, depth: int, grid: int, reinsert: str, remove: str) -> list[int]:
    """Return the grid tokens in each block of a routed pass."""
    inside = [grid] * depth
    for segment in route.segments:
        stop = depth if reinsert == "none" else segment.end + 1
        for block in range(segment.drop_before(remove), stop):
            inside[block] = keep_count(grid, segment.rate)
    return inside


def _layer(inputs: int, outputs: int, tokens: int = 1) -> Part:
    """Count a linear layer with a bias that is run on this many tokens."""
    return Part((inputs + 1) * outputs, inputs * outputs * tokens)


def _decoder(d: int, out: int, grid: int, prefix: int, shape: DecoderOptions) -> list[Part]:
    depth, w, tokens = shape.depth, shape.width, prefix + grid
    block = dit_spec.block_cost(Size("custom", depth, w, shape.heads), dit_spec.DiTOptions())
    return [
        _layer(d, 2 * d),
        Part((d + 1) * w, d * w * prefix, kept=d * w),
        Part(w),  # The mask token.
        _layer(d, w),
        _layer(w, depth * 6 * w),
        Part(depth * block.params, depth * block.linear * tokens, 0, depth * block.mixing(tokens)),
        _layer(w, 2 * w),
        _layer(w, out, grid),
    ]
