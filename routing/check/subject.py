"""The description of a model with routing that the conformance kit needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from routing.attached.calls import Signature
from routing.attached.hooks import check_names
from routing.attached.keep import is_usable_slice, protected_mask
from routing.errors import require
from routing.options import RoutingError
from routing.route import Route


class CheckError(RoutingError):
    """A model that the conformance kit cannot follow, or whose description is incomplete."""


@dataclass
class RoutedModel:
    """A model with routing, as `routing.check` runs it.

    Only the blocks are observed, by hooks that are removed afterwards. Routing may happen in the
    model's `forward`, in a container of blocks or in its own hooks.

    Args:
        blocks: The blocks in the order in which they run, each of them once.
        train: Runs one forward pass of training with at least two samples, without `backward`.
            Each call is another step.
        evaluate: Runs one forward pass of evaluation and returns its output.
        dense: Returns the output of the same model without routing, for the input of `evaluate`.
        route: What the route is meant to be, for example `2-8@0.5`: first and last block skipped
            (both included) and the share of tokens that skip. None accepts what is seen.
        protect: Tokens that must never skip: positions in the sequence, 0 first, or as `attach`
            takes them, a slice, several in a list, or a bool mask `(T,)` or `(B, T)`.
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
    protect: Sequence[int] | slice | Sequence[slice] | Tensor = ()
    shared: bool = False
    ordered: bool = True
    tables: Sequence[str] = ()
    before: nn.Module | None = None
    after: nn.Module | None = None

    def __post_init__(self) -> None:
        self.blocks = list(self.blocks) if isinstance(self.blocks, Iterable) else []
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
        for key in ("train", "evaluate", "dense"):
            function = getattr(self, key)
            require(
                callable(function) or (function is None and key != "train"),
                f"{key} is a {type(function).__name__}; expected a function without arguments, as "
                f"in {key}=lambda: model(images)",
                CheckError,
            )
        for key in ("before", "after"):
            module = getattr(self, key)
            require(
                module is None or isinstance(module, nn.Module),
                f"{key} is a {type(module).__name__}; expected a module, such as model.norm",
                CheckError,
            )
        check_names(self.tables, "tables", CheckError)

    def protected(self, batch: int, tokens: int) -> Tensor:
        """Return which tokens must never skip, bool `(1, T)` or `(B, T)`.

        Raises:
            CheckError: If `protect` is of another form, or beyond a sequence of that many tokens.
        """
        protect: Any = self.protect
        if isinstance(protect, Tensor) and protect.dtype == torch.bool:
            return protected_mask(protect.cpu(), batch, tokens, CheckError)
        if isinstance(protect, Tensor):
            protect = protect.tolist()
        parts = [protect] if isinstance(protect, slice) else protect
        items: list[Any] = list(parts) if isinstance(parts, Iterable) else [None]
        for item in items:
            is_position = isinstance(item, Integral) and -tokens <= int(item) < tokens
            require(
                is_usable_slice(item) or (is_position and not isinstance(item, bool)),
                f"protect={protect!r}: expected positions below {tokens} in a list, a slice such "
                "as slice(64, None), several in a list, or a bool mask (T,) or (B, T)",
                CheckError,
            )
        return protected_mask(items, batch, tokens, CheckError)

    @cached_property
    def signatures(self) -> list[Signature]:
        """Where each block's call holds its tokens and tables."""
        return [Signature(block, self.tables) for block in self.blocks]

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def intended_route(self) -> Route | None:
        """Return the route that is meant, with absolute block indices."""
        return None if self.route is None else Route.parse(self.route).resolve(self.depth)
