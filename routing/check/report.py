"""What `routing.check` is told of a model, and the table of findings that it ends with."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from routing.attached.calls import Signature, check_names
from routing.attached.keep import is_usable_slice, protected_mask
from routing.errors import require
from routing.options import RoutingError
from routing.route import Route, RouteSchedule

PASS, FAIL, NOT_APPLICABLE = "pass", "FAIL", "n/a"
Judgement = tuple[str, str]  # one of these, and the evidence
PASSES = 4  # two samples that keep 2 of 4 tokens agree by chance in all of them with p < 1e-3
_MOST_PASSES = 64
_WIDTH = 100


class CheckError(RoutingError):
    """A model that the conformance kit cannot follow, or whose description is incomplete."""


@dataclass
class RoutedModel:
    """A model with routing, as `routing.check` runs it.

    Only the blocks are observed, by hooks. Routing may happen in the model's `forward`, in a
    container of blocks or in its own hooks.

    Args:
        blocks: The blocks in the order in which they run, each of them once.
        train: Runs one forward pass of training with at least two samples, without `backward`.
            Each call is another step.
        evaluate: Runs one forward pass of evaluation and returns its output.
        dense: Returns the output of the same model without routing, for the input of `evaluate`.
        route: What the route is meant to be, for example `2-8@0.5`: first and last block skipped
            (both included) and the share of tokens that skip. None accepts what is seen.
        steps: Passes of training in the run, if the route changes during training; at most 64.
        protect: Tokens that must never skip: positions in the sequence, 0 first, or as `attach`
            takes them, a slice, several in a list, or a bool mask `(T,)` or `(B, T)`.
        shared: The batch is meant to share one subset.
        ordered: The order of tokens means something to the blocks (scans, convolutions, positions
            by index). False for plain attention.
        tables: Names of block arguments with one row for each token, besides rotary tables.
        carry: Names of block arguments that a block returns and the next one gets, with one row
            for each token, such as mamba_ssm's `residual`.
        before: A module that is called with the complete sequence before the first route begins;
            the first block if not given. Needed where a route begins at block 0.
        after: A module that is called with the complete sequence after the last block, such as a
            final norm. Needed where a route ends with the last block.
    """

    blocks: Sequence[nn.Module]
    train: Callable[[], Any]
    evaluate: Callable[[], Any] | None = None
    dense: Callable[[], Any] | None = None
    route: str | Route | RouteSchedule | None = None
    steps: int | None = None
    protect: Sequence[int] | slice | Sequence[slice] | Tensor = ()
    shared: bool = False
    ordered: bool = True
    tables: Sequence[str] = ()
    carry: Sequence[str] = ()
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
        check_names(self.carry, "carry", CheckError)
        stages = () if self.schedule is None else self.schedule.stages
        require(
            len(stages) < 2 or (isinstance(self.steps, int) and 0 < self.steps <= _MOST_PASSES),
            f"steps={self.steps}: expected the number of training passes in a short run, 1 to "
            f"{_MOST_PASSES}, as the route {self.schedule} changes during training",
            CheckError,
        )

    @property
    def schedule(self) -> RouteSchedule | None:
        """The intended route at each progress, with absolute block indices."""
        if self.route is None:
            return None
        route = self.route
        if isinstance(route, Route):
            route = RouteSchedule(((0.0, route),))
        return RouteSchedule.parse(route).resolve(self.depth)

    @property
    def passes(self) -> int:
        """How many passes of training to run."""
        return self.steps if self.steps and self.schedule else PASSES

    def intended_route(self, number: int) -> Route | None:
        """Return the route that is meant in a pass of training, counted from 0."""
        if self.schedule is None:
            return None
        return self.schedule.at(number / self.steps if self.steps else 0.0)

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
        return [Signature(block, self.tables, self.carry) for block in self.blocks]

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)


@dataclass(frozen=True)
class Finding:
    """The result for one property.

    Attributes:
        name: The property.
        result: `pass`, `FAIL` or `n/a` (not applicable).
        evidence: What was seen, with numbers.
    """

    name: str
    result: str
    evidence: str


@dataclass(frozen=True)
class Report:
    """All findings about one model; `print(report)` prints a table.

    Attributes:
        findings: One for each property, in the order of the table.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the properties that failed."""
        return tuple(finding.name for finding in self.findings if finding.result == FAIL)

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of a property; a `KeyError` if there is none of that name."""
        return {finding.name: finding for finding in self.findings}[name]

    def __str__(self) -> str:
        name_width = max(len(finding.name) for finding in self.findings) + 2
        result_width = len("result") + 2
        indent = " " * (name_width + result_width)
        lines = ["property".ljust(name_width) + "result".ljust(result_width) + "evidence"]
        for finding in self.findings:
            start = finding.name.ljust(name_width) + finding.result.ljust(result_width)
            text = textwrap.fill(
                start + finding.evidence, _WIDTH, subsequent_indent=indent, break_long_words=False
            )
            lines.append(text)
        results = [finding.result for finding in self.findings]
        counts = (
            f"{results.count(PASS)} passed, {results.count(FAIL)} failed, "
            f"{results.count(NOT_APPLICABLE)} not applicable"
        )
        return "\n".join((*lines, counts))
