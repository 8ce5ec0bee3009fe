"""One place where each group's options are typed by the part that owns them (no torch here)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routing.errors import UserError, suggest

if TYPE_CHECKING:
    from experiments.config import Config


def check_groups(config: Config) -> None:
    """Check every group's options with its owner, and the combinations between groups.

    Raises:
        UserError: One sentence from the owner of the option.
    """
    from backbones.registry import names
    from backbones.sizes import parse_size
    from experiments.data import options as data
    from experiments.diffusion.options import options_of
    from experiments.metrics.options import EvalOptions
    from experiments.routes import check_routing

    known = names()
    if config.backbone["name"] not in known:
        raise UserError(
            f"unknown backbone {config.backbone['name']!r}{suggest(config.backbone['name'], known)}"
        )
    shape = {key: config.backbone.get(key) for key in ("depth", "width", "heads")}
    parse_size(config.size, **shape)
    data.parse(config.data)
    check_routing(config)
    for kind in ("objective", "sampler", "guidance"):
        options_of(kind, getattr(config, kind))
    EvalOptions(**{k: v for k, v in config.eval.items() if k != "name"})
