"""Parameters, multiply-accumulates (MACs) and memory of a model, dense and routed (no torch here).

A MAC is one multiplication and one addition. The "GFLOPs" of a DiT in papers are MACs: 118.6 G for
DiT-XL/2 at 256 tokens. Two conventions are in use, and both are counted: with everything that mixes
tokens (QK^T and AV, scans, bi-WKV, convolutions, shifts), and linear layers only
(`*_no_attention`), as TREAD's authors count (114.42 G for the same model). Element-wise operations
(norms, activations, gates) are in neither.

A step of guidance by two routed passes costs the sum of both: 97.67 G for Sparse Guidance with
DiT-XL/2, route 2-24, is 67.5 G at rate 0.5 plus 30.1 G at rate 0.9.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backbones.options import BlockCost, ModelConfig, dit
from backbones.registry import branches, find, model_config
from backbones.sizes import AlignOptions, BackboneError, DecoderOptions, Size, build_options
from routing.options import check_reinsertion
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
        activation_bytes: Bytes that a routed training pass saves for the backward pass, per sample.
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
        """Dense over routed MACs: the speed-up if time were proportional to them."""
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
    reinsert: str = "identity",
    remove: str = "start",
    bytes_per_value: int = 4,
    **options: Any,
) -> Cost:
    """Return the cost of the model that `backbones.create` builds, with a route.

    Args:
        name: Family.
        size: Letter and patch, as in "S/2".
        route: The route of the training pass.
        reinsert: How routed tokens return, as in `routing.RoutingOptions`; with `none` never.
        remove: When routed tokens leave, as in `routing.RoutingOptions`.
        bytes_per_value: Bytes of an activation: 4 in float32, 2 under bf16 autocast (then an
            estimate, since the residual stream stays in float32).
        **options: The other arguments of `backbones.create`. `align` (REPA) adds to the parameters
            but not to the MACs, since it only runs in training.

    Raises:
        BackboneError: Unknown family, size or option, or values that do not fit.
        RouteError: A route that does not fit the depth.
        RoutingError: An unknown `reinsert` or `remove`, or one that does not fit the route.
    """
    config = model_config(name, size, **options)
    return model_cost(config, route, reinsert, remove, bytes_per_value)


def model_cost(
    config: ModelConfig,
    route: str | Sequence[str] | Route = "none",
    reinsert: str = "identity",
    remove: str = "start",
    bytes_per_value: int = 4,
) -> Cost:
    """Return the cost of a model with a route; arguments and errors as for `cost`."""
    shape, num_tokens = config.shape, config.num_tokens
    width, depth = shape.width, shape.depth
    blocks = block_costs(config)
    parts = _parts_before_head(config) + _head_parts(config)
    parsed = Route.parse(route).resolve(depth)
    check_reinsertion(reinsert, remove, parsed)
    prefixes = _prefixes(config)
    tokens = []
    for prefix, present in zip(
        prefixes, _present(parsed, depth, num_tokens, reinsert, remove), strict=True
    ):
        tokens.append(prefix + present)
    dense = [prefix + num_tokens for prefix in prefixes]
    predicted = num_tokens if reinsert != "none" or not parsed else tokens[-1] - config.prefix
    per_block = []
    modulation = 0 if config.condition == "prefix" else 3 * branches(config) * width * width
    saved = 2 * width * num_tokens
    for block, present in zip(blocks, tokens, strict=True):
        per_block.append(modulation + block.linear * present + block.mixing(present))
        saved += block.saved * present
    params = sum(block.params for block in blocks) + sum(part.params for part in parts)
    return Cost(
        params=params,
        macs_dense=_macs(parts, blocks, dense, num_tokens),
        macs_routed=_macs(parts, blocks, tokens, predicted),
        macs_dense_no_attention=_macs(parts, blocks, dense, num_tokens, mixing=False),
        macs_routed_no_attention=_macs(parts, blocks, tokens, predicted, mixing=False),
        per_block=tuple(per_block),
        tokens=tuple(tokens),
        activation_bytes=bytes_per_value * saved,
    )


def features_macs(
    config: ModelConfig, block: int, mixing: bool = True, to_the_end: bool = False
) -> int:
    """Return the MACs of a dense pass of one sample that ends with the output of a block.

    Args:
        config: The model; its head or decoder does not run.
        block: The block.
        mixing: False counts linear layers only.
        to_the_end: Run all blocks, as SPRINT's fused span needs.
    """
    num_tokens = config.num_tokens
    blocks = block_costs(config)
    if not to_the_end:
        blocks = blocks[: block + 1]
    tokens = [prefix + num_tokens for prefix in _prefixes(config)[: len(blocks)]]
    return _macs(_parts_before_head(config), blocks, tokens, num_tokens, mixing)


def _prefixes(config: ModelConfig) -> list[int]:
    """Return the number of prefix tokens in each block; class tokens start at one of them."""
    before, after = config.context_block, config.shape.depth - config.context_block
    return [config.prefix - config.context_tokens] * before + [config.prefix] * after


def block_costs(config: ModelConfig) -> list[BlockCost]:
    """Return the cost of each block; a hybrid's attention blocks are DiT's."""
    shape, family = config.shape, find(config.name)
    options = family.parse(shape, config.grid, config.options)
    costs = []
    for index in range(shape.depth):
        if index in config.attention_blocks:
            block = dit.block_cost(shape, index, config.grid, dit.DiTOptions())
        else:
            block = family.cost(shape, index, config.grid, options)
        if config.skips and index >= shape.depth - shape.depth // 2:
            block = _with_long_skip(block, shape.width)
        costs.append(block)
    return costs


def check_block_params(config: ModelConfig, params: Sequence[int]) -> None:
    """Compare the parameters of each built block with its family's count.

    Raises:
        BackboneError: They differ by more than 1 %.
    """
    for index, (built, block) in enumerate(zip(params, block_costs(config), strict=True)):
        if abs(built - block.params) > 0.01 * built:
            raise BackboneError(
                f"block {index} of {config.name} has {built} parameters where its block_cost "
                f"counts {block.params}; correct the count, which banners, budgets and tables use"
            )


def _with_long_skip(block: BlockCost, width: int) -> BlockCost:
    """Add the layer that joins a block's input with the stored output of its partner."""
    return replace(
        block,
        params=block.params + 2 * width * width + width,
        linear=block.linear + 2 * width * width,
        saved=block.saved + 2 * width,
    )


@dataclass(frozen=True)
class Part:
    """Cost of a part of the model outside the blocks.

    Attributes:
        params: Parameters.
        linear: MACs of linear layers per sample.
        per_predicted: Further MACs of linear layers for each grid token after the stack.
        mixing: MACs of token mixing per sample.
    """

    params: int = 0
    linear: int = 0
    per_predicted: int = 0
    mixing: int = 0


def _parts_before_head(config: ModelConfig) -> list[Part]:
    """Return the cost of embedders, modulation and fusion."""
    width, depth, patch = config.shape.width, config.shape.depth, config.shape.patch
    num_tokens, prefix = config.num_tokens, config.prefix
    patch_values = patch * patch * config.in_channels
    waves, hidden = config.time_shape
    inputs = config.bottleneck or patch_values
    parts = [_layer(inputs, width, num_tokens), _layer(2 * waves, hidden), _layer(hidden, width)]
    if config.bottleneck:
        weights = patch_values * config.bottleneck
        parts.append(Part(weights, weights * num_tokens))
    if config.num_classes:
        parts.append(Part((config.num_classes + 1) * width))
    if config.context_tokens:
        parts.append(Part(config.context_tokens * width))
    if config.text:
        length, channels = config.text
        parts += [_layer(channels, width, length), _layer(channels, width), Part(length * channels)]
    if config.condition == "prefix":
        parts.append(Part(2 * depth * branches(config) * width))
    else:
        parts.append(_layer(width, 3 * depth * branches(config) * width))
    if config.fuse:
        # SPRINT's fusion of two streams.
        parts.append(Part(2 * width * width + 2 * width, 2 * width * width * (prefix + num_tokens)))
    return parts


def _head_parts(config: ModelConfig) -> list[Part]:
    """Return the cost of the head or decoder and of REPA's projector."""
    width = config.shape.width
    predicted_values = config.shape.patch**2 * config.out_channels
    if config.decoder is None:
        weights = width if find(config.name).weighted_norms else 0
        parts = [
            _layer(width, 2 * width),
            Part((width + 1) * predicted_values + weights, per_predicted=width * predicted_values),
        ]
    else:
        decoder = build_options(DecoderOptions, config.decoder, "decoder")
        parts = _decoder(config, decoder, predicted_values)
    if config.align is not None:
        align = build_options(AlignOptions, config.align, "align")
        hidden = align.hidden
        for inputs, outputs in ((width, hidden), (hidden, hidden), (hidden, align.channels)):
            parts.append(_layer(inputs, outputs, 0))
    return parts


def _macs(
    parts: Sequence[Part],
    blocks: Sequence[BlockCost],
    tokens: Sequence[int],
    predicted: int,
    mixing: bool = True,
) -> int:
    """Return the MACs of a pass with these tokens in each block and predicted grid tokens.

    Without `mixing`, linear layers only.
    """
    total = 0
    for part in parts:
        total += part.linear + part.per_predicted * predicted
        if mixing:
            total += part.mixing
    for block, present in zip(blocks, tokens, strict=True):
        total += block.linear * present
        if mixing:
            total += block.mixing(present)
    return total


def _present(route: Route, depth: int, num_tokens: int, reinsert: str, remove: str) -> list[int]:
    """Return the grid tokens in each block of a routed pass."""
    inside = [num_tokens] * depth
    for segment in route.segments:
        stop = depth if reinsert == "none" else segment.end + 1
        for block in range(segment.drop_before(remove), stop):
            inside[block] = keep_count(num_tokens, segment.rate)
    return inside


def _layer(inputs: int, outputs: int, tokens: int = 1) -> Part:
    """Return the cost of a linear layer with a bias, applied to this many tokens."""
    return Part((inputs + 1) * outputs, inputs * outputs * tokens)


def _decoder(config: ModelConfig, options: DecoderOptions, predicted_values: int) -> list[Part]:
    """Return the cost of MaskDiT's decoder, which predicts so many values of each patch."""
    width, prefix, num_tokens = config.shape.width, config.prefix, config.num_tokens
    depth, inner, tokens = options.depth, options.width, prefix + num_tokens
    size = Size("custom", depth, inner, options.heads)
    block = dit.block_cost(size, 0, config.grid, dit.DiTOptions())
    return [
        _layer(width, 2 * width),
        Part((width + 1) * inner, width * inner * prefix, per_predicted=width * inner),
        Part(inner),  # The mask token.
        _layer(width, inner),
        _layer(inner, depth * 6 * inner),
        Part(depth * block.params, depth * block.linear * tokens, 0, depth * block.mixing(tokens)),
        _layer(inner, 2 * inner),
        _layer(inner, predicted_values, num_tokens),
    ]
