"""Checks of a whole configuration: the options of each group, and what can be combined."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from backbones.sizes import parse_size
from backbones.validation import OptionError, validate_value
from experiments.config import groups
from experiments.config.run_options import RunOptions
from experiments.options.training import ENCODERS, SELF_ENCODER
from routing.errors import require
from routing.options import RoutingError
from routing.schedule import ScheduleError


def check_combinations(options: RunOptions) -> None:
    """Refuse options that contradict each other.

    Raises:
        UserError: One sentence with the key, its value and what was expected.
    """
    grid = _patch_grid(options)
    groups.check_backbone(options.backbone, options.size, grid)
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
    _, height, width = options.data.actual_shape()
    patch = parse_size(options.size).patch
    patches = [side for side in range(1, height + 1) if height % side == width % side == 0]
    letter, closest = options.size.partition("/")[0], max(p for p in patches if p <= patch)
    require(
        patch in patches,
        f"size={options.size}: its patch of {patch} does not divide {height}x{width} "
        f"(data={options.data.name}); expected a patch of {', '.join(map(str, patches))}, as in "
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
    has_decoder = options.backbone.decoder is not None
    maskdit_of_ddpm = has_decoder and options.objective.name == "ddpm"
    require(
        not maskdit_of_ddpm,
        "backbone.decoder with objective=ddpm: expected objective=edm or flow, since MaskDiT "
        "reconstructs the denoised image, which is unstable at DDPM's noisiest steps",
        OptionError,
    )


def _check_alignment(options: RunOptions) -> None:
    """Refuse a projector or a teacher that does not fit the model or the encoder."""
    align, encoder = options.backbone.align, options.train.encoder
    block_of_model = Annotated[int, Ge(0), Le(options.depth - 1)]
    if options.train.teacher_block is not None:
        validate_value(block_of_model, options.train.teacher_block, "train.teacher_block")
    if align is None:
        return
    require(
        encoder != "none",
        "backbone.align with train.encoder=none: expected train.encoder to be one of "
        f"{', '.join((*ENCODERS, SELF_ENCODER))}",
        OptionError,
    )
    validate_value(block_of_model, align.block, "backbone.align.block")
    expected = options.encoder_width
    require(
        align.channels == expected,
        f"backbone.align: expected channels={expected}, the features of train.encoder={encoder}, "
        f"as in backbone.align={{block:{align.block},channels:{expected}}}",
        OptionError,
    )
