"""What the conformance kit is told about a model with routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from routing.errors import require
from routing.options import RoutingError
from routing.route import Route


class CheckError(RoutingError):
    """A model that the conformance kit cannot follow, or too little said about it."""


@dataclass
class RoutedModel:
    """A model with routing, as `routing.check` runs it.

    Only the blocks are observed (by hooks, which are taken off again); whether routing happens in
    the model's `forward`, in a container of blocks or in hooks of its own does not matter.

    Args:
        blocks: The blocks in the order in which they run, each of them once.
        train: Runs one forward pass of training with at least two samples, without `backward`.
            Each call is another step.
        evaluate: Runs one forward pass of evaluation and returns its output.
        dense: Returns the output of the same model without routing, for the input of `evaluate`.
        route: What the route is meant to be, for example `2-8@0.5`: first and last block skipped
            (both included) and the share of tokens that skip. None accepts what is seen.
        protect: Positions in the sequence, 0 first, that must never skip.
        shared: The batch is meant to share one subset.
        ordered: The order of tokens means something to the blocks (scans, convolutions, positions
            by index). False for plain attention.
        tables: Names of block arguments with one row for each token, besides rotary tables.
        before: A module that is called with the complete sequence before the first route begins;
            the first block if not given. Needed where a route begins at block 0.
        after: A module that is called with the complete sequence after the last block, such as a
            final norm. Needed where a route ends with the last block.
    """

    blocks: Sequence[nn.Module]
    train: Callable[[], Any]
    evaluate: Callable[[], Any] | None = None
    dense: Callable[[], Any] | None = None
    route: str | Route | None = None
    protect: Sequence[int] = ()
    shared: bool = False
    ordered: bool = True
    tables: Sequence[str] = ()
    before: nn.Module | None = None
    after: nn.Module | None = None

    def __post_init__(self) -> None:
        self.blocks = list(self.blocks)
        require(
            len(self.blocks) > 0 and all(isinstance(block, nn.Module) for block in self.blocks),
            "blocks: expected a list of modules, such as model.blocks",
            CheckError,
        )
        require(
            len(set(map(id, self.blocks))) == len(self.blocks),
            "blocks: a block is in the list twice, and its calls cannot be told apart",
            CheckError,
        )

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def intended_route(self) -> Route | None:
        """Return the route that is meant, with absolute block indices."""
        return None if self.route is None else Route.parse(self.route).resolve(self.depth)
