"""Checks of a whole configuration: the options of each group, and what can be combined."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from backbones.sizes import AlignOptions, parse_size
from backbones.validation import OptionError, validate_value
from experiments.config import groups
from experiments.config.run_options import RunOptions
from experiments.data.registry import parse
from experiments.options.training import ENCODERS, SELF_ENCODER
from experiments.runtime.nested import flatten
from routing.errors import require
from routing.options import RoutingError
from routing.schedule import ScheduleError


def check_combinations(options: RunOptions) -> None:
    """Refuse options of a group that it does not have, and options that contradict each other.

    Raises:
        UserError: One sentence with the key, its value and what was expected.
    """
    for key, value in flatten(options.to_dict()).items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise OptionError(f"{key}={value}: expected an integer below 2^63")
    for group in groups.REQUIRED_GROUPS:
        values = getattr(options, group)
        if "name" not in values:
            raise OptionError(f"missing key {group}.name: choose one with {group}=NAME")
        if group != "backbone":
            groups.parse(group, values)
    grid = _patch_grid(options)
    groups.parse_backbone(options.backbone, options.size, grid)
    for key, path in (("paths.runs", options.paths.runs), ("init", options.init)):
        if path is not None and not path.strip():
            raise OptionError(f"{key}= is empty: expected a folder, such as runs or runs/NAME")
    _check_training(options)
    try:
        options.routing.check(options.route_schedule, options.depth, grid)
    except (RoutingError, ScheduleError) as error:
        # It names the key as in `RoutingOptions`; the route's own key is at the top level.
        prefix = "" if str(error).startswith("route=") else "routing."
        raise type(error)(f"{prefix}{error}") from None
    _check_alignment(options)


def _patch_grid(options: RunOptions) -> tuple[int, int]:
    """Return the patches (H, W) of the data, whose sides the patch has to divide."""
    _, height, width = parse(options.data).actual_shape()
    patch = parse_size(options.size).patch
    patches = [side for side in range(1, height + 1) if height % side == width % side == 0]
    letter, closest = options.size.partition("/")[0], max(p for p in patches if p <= patch)
    require(
        patch in patches,
        f"size={options.size}: its patch of {patch} does not divide {height}x{width} "
        f"(data={options.data['name']}); expected a patch of {', '.join(map(str, patches))}, as in "
        f"size={letter}/{closest}",
        OptionError,
    )
    return height // patch, width // patch


def _check_training(options: RunOptions) -> None:
    train = options.train
    graphs_of_drawn_routes = train.graphs is True and options.routing.random_end
    require(
        not graphs_of_drawn_routes,
        "train.graphs=true records one step under a fixed route: expected routing.random_end=false",
        OptionError,
    )
    if train.residual == "bf16" and train.precision == "fp32":
        raise OptionError("train.residual=bf16: expected train.precision=bf16 or auto as well")
    has_decoder = options.backbone.get("decoder") is not None
    maskdit_of_ddpm = has_decoder and options.objective["name"] == "ddpm"
    require(
        not maskdit_of_ddpm,
        "backbone.decoder with objective=ddpm: expected objective=edm or flow, since MaskDiT "
        "reconstructs the denoised image, which is unstable at DDPM's noisiest steps",
        OptionError,
    )


def _check_alignment(options: RunOptions) -> None:
    """Refuse a projector or a teacher that does not fit the model or the encoder."""
    align, encoder = options.backbone.get("align"), options.train.encoder
    block_of_model = Annotated[int, Ge(0), Le(options.depth - 1)]
    if options.train.teacher_block is not None:
        validate_value(block_of_model, options.train.teacher_block, "train.teacher_block")
    if align is None:
        return
    require(
        encoder != "none",
        f"backbone.align={align}: expected train.encoder to be one of "
        f"{', '.join((*ENCODERS, SELF_ENCODER))}",
        OptionError,
    )
    block = align.get("block", AlignOptions.block)
    validate_value(block_of_model, block, "backbone.align.block")
    channels = align.get("channels", AlignOptions.channels)
    expected = options.encoder_width
    require(
        channels == expected,
        f"backbone.align.channels={channels}: expected {expected}, the features of "
        f"train.encoder={encoder}",
        OptionError,
    )
