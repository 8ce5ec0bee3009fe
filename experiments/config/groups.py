"""One place where each group's options are typed by the part that owns them (no torch here)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from routing.errors import UserError, suggest

if TYPE_CHECKING:
    from experiments.config.schema import Config


def check_groups(config: Config) -> None:
    """Check every group's options with its owner, and the combinations between groups.

    Raises:
        UserError: One sentence from the owner of the option.
    """
    from backbones.registry import names
    from backbones.sizes import parse_size
    from experiments.data import data_options as data
    from experiments.diffusion.diffusion_options import options_of
    from experiments.metrics.eval_options import EvalOptions
    from experiments.training.routes import check_routing

    known = names()
    if config.backbone["name"] not in known:
        raise UserError(
            f"unknown backbone {config.backbone['name']!r}{suggest(config.backbone['name'], known)}"
        )
    shape = {key: config.backbone.get(key) for key in ("depth", "width", "heads")}
    for key, value in shape.items():
        if value is not None and type(value) is not int:
            raise UserError(f"backbone.{key}={value!r}: expected a whole number or null")
    parse_size(config.size, **shape)
    for key in ("decoder", "align"):
        value = config.backbone.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"backbone.{key}={value!r}: expected null or a mapping such as {{}}")
    with _naming("data"):
        data.parse(config.data)
    check_routing(config)
    for kind in ("objective", "sampler", "guidance"):
        with _naming(kind):
            options_of(kind, getattr(config, kind))
    with _naming("eval"):
        EvalOptions(**{k: v for k, v in config.eval.items() if k != "name"})


@contextlib.contextmanager
def _naming(group: str) -> Iterator[None]:
    """Turn what a value of the wrong type makes a range check trip over into one sentence."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError) as error:
        raise UserError(
            f"{group}: a key or a value of the wrong type ({error}); "
            "python experiments/run.py --help lists every key with its default"
        ) from None
