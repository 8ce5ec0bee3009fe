"""Checks of the arguments of `routing.attach`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from numbers import Integral
from typing import Any

from torch import nn

from routing.attached.calls import AttachError, Signature
from routing.attached.supported import refuse_positional, refuse_prefix
from routing.errors import one_of, require, suggest
from routing.options import RoutingError
from routing.route import Route
from routing.routed_pass import Selection

WHEN = ("training", "always", "never")
WITHOUT_GRID = ("random", "stride")  # selections that need no grid


def block_list(blocks: Any) -> list[nn.Module]:
    """Return the blocks as a list, each of them once."""
    members = list(blocks) if isinstance(blocks, Iterable) else []
    require(
        members and all(isinstance(block, nn.Module) for block in members),
        "blocks: expected a model or its list of blocks, as in model.blocks",
        AttachError,
    )
    for i, first in enumerate(map(members.index, members)):
        require(
            first == i,
            f"block {i} is block {first} once more, and their calls cannot be told apart; pass a "
            "list in which every block is another module",
            AttachError,
        )
    return members


def check_routed_blocks(members: Sequence[nn.Module], route: Route) -> None:
    """Refuse blocks of a route that mix tokens by position or have a route already."""
    for i in route.sparse_blocks:
        refuse_positional(members[i])
        require(
            not _has_route(members[i]),
            f"block {i} has a route already (a copy has that of its original); call remove() on "
            "what the first attach returned, or copy before attaching",
            AttachError,
        )


def refuse_long_skips(signatures: Sequence[Signature]) -> None:
    """Refuse blocks that also take the output of an earlier block, in an argument `skip`.

    A route would hand them the tokens of another subset, or of another number.
    """
    for i, signature in enumerate(signatures):
        require(
            "skip" not in signature.positions,
            f"block {i} ({signature.name}) takes a long skip connection (its argument skip), whose "
            "tokens would be others than those of the route; attach to blocks without one",
            AttachError,
        )


def parse_grid(grid: Any) -> tuple[int, int] | None:
    """Return a grid of tokens as plain integers; None is unknown."""
    if grid is None:
        return None
    pair = isinstance(grid, Sequence) and [isinstance(side, Integral) for side in grid]
    require(
        pair == [True, True] and min(grid) > 0,
        f"grid={grid!r}: expected (rows, columns), such as grid=(16, 16)",
        AttachError,
    )
    return int(grid[0]), int(grid[1])


def parse_prefix(prefix: Any, signatures: Sequence[Signature], is_model: bool) -> int:
    """Return the number of prefix tokens; a list of timm blocks does not determine it."""
    refuse_prefix(signatures, prefix)
    timm = any(signature.library == "timm" for signature in signatures)
    require(
        prefix is not None or is_model or not timm,  # their sequences begin with a class token
        "the number of class and register tokens before the image's is unknown; pass the model "
        "instead of its blocks, or prefix=1 (prefix=0 if there are none)",
        AttachError,
    )
    if prefix is None:
        return 0
    require(
        _is_integer(prefix) and prefix >= 0,
        f"prefix={prefix}: expected the number of tokens before the image's, an integer >= 0",
        AttachError,
    )
    return int(prefix)


def parse_seed(seed: Any) -> int:
    """Return the seed as a plain integer."""
    require(_is_integer(seed), f"seed={seed!r}: expected an integer", AttachError)
    return int(seed)


def parse_step(step: Any) -> int:
    """Return the number of a routed pass as a plain integer."""
    require(
        _is_integer(step) and step >= 0,
        f"step={step!r}: expected the number of the next routed pass, an integer >= 0",
        AttachError,
    )
    return int(step)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_selection(selection: Selection, grid: tuple[int, int] | None) -> None:
    """Refuse a selection that needs a grid where none is known, or scans."""
    require(
        grid is not None or selection.mode in WITHOUT_GRID or selection.mode == "unsorted",
        f"selection {selection.mode} needs the grid of tokens; pass grid=(rows, columns)",
        AttachError,
    )
    require(
        selection.mode != "unsorted",
        "selection unsorted shuffles scans, and these blocks have none",
        AttachError,
    )


def grid_of_call(
    grid: tuple[int, int] | None, is_stated: bool, selection: Selection, tokens: int, protected: int
) -> tuple[int, int]:
    """Return the grid of the tokens of a call that may skip: one row if it is unknown.

    Args:
        grid: The grid that was stated, or that of the model.
        is_stated: Whether it was stated.
        selection: How the tokens that stay are chosen.
        tokens: Tokens that may skip.
        protected: All others of the sequence.
    """
    if grid is not None and grid[0] * grid[1] == tokens:
        return grid
    require(
        not (is_stated and protected),
        f"{tokens} tokens are neither prefix nor protected, but grid={grid} has another number: "
        "expected prefix= and protect= to cover all but the image, or this input's grid",
        AttachError,
    )
    require(
        selection.mode in WITHOUT_GRID,
        f"{tokens} tokens come in where grid={grid} has another number; pass this input's grid of "
        "tokens, grid=(rows, columns)",
        AttachError,
    )
    return 1, tokens


def check_when(when: str) -> None:
    """Refuse another word than `training`, `always` and `never`."""
    one_of("when", when, WHEN, AttachError)


def check_names(names: Any, key: str, error: type[RoutingError]) -> None:
    """Refuse a value of the argument `key` that is not a sequence of names."""
    require(
        isinstance(names, Collection) and not isinstance(names, str),
        f"{key}={names!r}: expected names in a sequence: ('{names}',)",
        error,
    )


def check_extra_names(extra: Sequence[str], signatures: Sequence[Signature]) -> None:
    """Refuse names that are no argument of any block in the route."""
    for name in extra:
        accepted = [block.any_name or name in block.positions for block in signatures]
        if signatures and not any(accepted):
            arguments = signatures[0].positions
            raise AttachError(
                f"extra: the blocks have no argument {name}; they have {', '.join(arguments)}"
                f"{suggest(name, arguments)}"
            )


def _has_route(block: nn.Module) -> bool:
    """Whether a hook on the block, which its copies have too, is of a route not removed."""
    for hook in block._forward_pre_hooks.values():
        owner = getattr(hook, "route_of", None)
        if owner is not None and owner._handles:
            return True
    return False
