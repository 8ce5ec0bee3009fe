"""Whether blocks treat the tokens of a route as those tokens: their arguments, scans and positions.

Per-token arguments of a call (rotary tables, layouts) are compared with those of a call with all
tokens. Blocks of the route are run again for two questions. Does a block place its tokens by their
index (`routing.attached.positions`)? And does a scan follow the same path as with all tokens? Its
output at a token depends on the tokens before it on the path and on no later ones, so gradients
show the path of any block; attention, convolutions and scans in both directions show none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from routing.attached.calls import TEXT, Call, inner, leaves, replace_rows
from routing.attached.positions import Dependence, dependence, resized, sizes_of, token_counts
from routing.check.observe import BlockInput, Marker, ObservedPass
from routing.check.report import RoutedModel
from routing.layout import Layout

_PROBES = 12  # tokens that are compared with each other in a block
# A pair depends one way if one gradient is this many times the reverse one: in a scan, the reverse
# is 0 up to rounding; in attention, the two differ less.
_ONE_WAY = 100


def table_problems(
    block_input: BlockInput, observed: ObservedPass, evaluation: ObservedPass | None
) -> Iterator[tuple[str, str]]:
    """Return each per-token argument of a call, and what is wrong with it (empty if nothing)."""
    for layout in block_input.layouts():
        yield "layout", _layout_problem(layout, block_input)
    if block_input.call is None:
        return
    for name in block_input.call.names:
        value, signature = block_input.argument(name), block_input.call.signature
        if value is None or name in (signature.tokens, TEXT, *signature.carry):
            continue
        known = name in signature.tables
        for complete in _complete_calls(block_input, name, known, observed, evaluation):
            problem = _table_problem(name, known, value, block_input, complete)
            if problem is not None:
                yield name, problem
                break


def _complete_calls(
    block_input: BlockInput, name: str, known: bool, observed: ObservedPass,
    evaluation: ObservedPass | None,
) -> Iterator[BlockInput]:  # fmt: skip
    """Return calls with all tokens in which an argument had the rows that it should have here.

    A known table is the same in evaluation, unless that has other tokens or samples. Another
    argument is compared with that of an earlier block, if evaluation gives both the same.
    """
    same_shape, by_block = False, {}
    if evaluation is not None:
        same_shape = evaluation.shape == observed.shape
        for each in evaluation.marked.inputs:
            if each.call is not None and bool(each.present(evaluation.tokens).all()):
                by_block[each.block] = each
    here = by_block.get(block_input.block)
    if known and same_shape and here is not None:
        yield here
    for each in observed.marked.inputs:
        if each.call is None or not bool(each.present(observed.tokens).all()):
            continue
        there = by_block.get(each.block)
        if here is None or there is None:
            same = known
        else:
            same = _equal(here.argument(name), there.argument(name))
        if same:
            yield each


def _equal(value: Any, other: Any) -> bool:
    tensors, others = leaves(value), leaves(other)
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def _layout_problem(layout: Layout, block_input: BlockInput) -> str:
    """Compare a layout of this package with the tokens that are there; empty if right."""
    for sample, ids in enumerate(block_input.ids):
        tokens = ids[ids >= layout.prefix].sort().values - layout.prefix
        if layout.ids is None:
            stated = torch.arange(layout.tokens, device=tokens.device)
        else:
            stated = layout.ids[sample % len(layout.ids)].to(tokens.device)
        if not torch.equal(stated, tokens):
            return f"its layout places {layout.tokens} tokens elsewhere than where they are"
    return ""


def _table_problem(
    name: str, known: bool, value: Any, block_input: BlockInput, complete: BlockInput
) -> str | None:
    """Compare an argument with that of a complete call; empty if right, None if it has no rows."""
    problem, compared = None, False
    length, tokens = complete.x.shape[1], block_input.x.shape[1]
    for few, all_rows in zip(leaves(value), leaves(complete.argument(name)), strict=False):
        all_rows = _like_batch(few, all_rows, len(block_input.ids))
        if few.dim() != all_rows.dim():
            return f"{name} has another number of dimensions than with all tokens"
        dimension = _token_dimension(few, all_rows, block_input, complete)
        if dimension is not None:
            compared = True
            if not _rows_match(few, all_rows, dimension, block_input, complete):
                return f"{name} holds rows of other tokens than those that are there"
        elif length == tokens and (known or length in few.shape):
            compared = compared or _spans_all(few, all_rows, complete)
            if not torch.equal(few, all_rows):
                return f"{name} holds other rows than in block {complete.block}"
        elif known and _spans_all(few, all_rows, complete):
            problem = f"{name} has shape {tuple(few.shape)}, not gathered, for {tokens} tokens"
    # A table of the text alone may be as long as the image's; it stays as it is.
    return "" if compared else problem


def _like_batch(few: Tensor, all_rows: Tensor, batch: int) -> Tensor:
    """Return a table that the batch shares as one of each sample, if it is that in the route."""
    if few.dim() == all_rows.dim() + 1 and few.shape[0] == batch:
        return all_rows.expand(batch, *all_rows.shape)
    if few.dim() == all_rows.dim() and all_rows.shape[0] == 1 and few.shape[0] == batch:
        return all_rows.expand(batch, *all_rows.shape[1:])
    return all_rows


def _token_dimension(
    few: Tensor, all_rows: Tensor, block_input: BlockInput, complete: BlockInput
) -> int | None:
    """Return the dimension that lost as many rows as there are tokens missing."""
    missing = complete.x.shape[1] - block_input.x.shape[1]
    for dimension in range(few.dim()):
        if missing and all_rows.shape[dimension] - few.shape[dimension] == missing:
            return dimension
    return None


def _spans_all(few: Tensor, all_rows: Tensor, complete: BlockInput) -> bool:
    """Whether a table that lost no rows has one for each token of the complete sequence.

    It may also have rows of text, where that comes in an argument of its own.
    """
    length = complete.x.shape[1]
    text = 0 if complete.call is None else complete.call.joint_text
    return few.shape == all_rows.shape and bool({length, length + text} & set(few.shape))


def _rows_match(
    few: Tensor, all_rows: Tensor, dimension: int, block_input: BlockInput, complete: BlockInput
) -> bool:
    """Whether each token meets in the routed table the row that it has in the complete one.

    Further rows, of text, may be in front of those of the tokens or behind them.
    """
    more_few = few.shape[dimension] - block_input.x.shape[1]
    more_all = all_rows.shape[dimension] - complete.x.shape[1]
    fronts = [(more_few, more_all), (0, 0)] if more_few == more_all > 0 else [(more_few, more_all)]
    return any(
        _rows_match_behind(front, few, all_rows, dimension, block_input, complete)
        for front in fronts
    )


def _rows_match_behind(
    front: tuple[int, int],
    few: Tensor,
    all_rows: Tensor,
    dimension: int,
    block_input: BlockInput,
    complete: BlockInput,
) -> bool:
    """The same for tables with that many rows before those of the tokens."""
    batched = dimension > 0 and few.shape[0] == len(block_input.ids)
    columns_of_all = complete.columns(int(complete.ids.max()) + 1)
    for sample, ids in enumerate(block_input.ids.cpu()):
        columns = (ids >= 0).nonzero().flatten()
        here = few[sample] if batched else few
        there = all_rows[sample] if batched else all_rows
        along = dimension - 1 if batched else dimension
        rows_here, source_rows = columns + front[0], columns_of_all[sample, ids[columns]] + front[1]
        has_row = (source_rows >= 0) & (rows_here >= 0)  # class tokens may have none
        expected = there.index_select(along, source_rows[has_row].to(few.device))
        actual = here.index_select(along, rows_here[has_row].to(few.device))
        if not torch.equal(actual, expected):
            return False
    return True


class Examiner:
    """Looks at what blocks do with the tokens of a route, in passes that run anyway.

    Args:
        model: The model.
        passes: Passes of training of the same model, built before.
        evaluation: A pass of its evaluation.

    Attributes:
        index_use: As `ModelRuns` has it.
    """

    def __init__(
        self, model: RoutedModel, passes: Sequence[ObservedPass], evaluation: ObservedPass | None
    ) -> None:
        self.model = model
        self.index_use: dict[int, Dependence | None] = {}
        self._per_token = _gathered(passes, evaluation)
        self._routed = {each.block for observed in passes for each in observed.routed_inputs()}
        self._orders, self._shape = _ScanOrders(), torch.Size()

    def look_at(self, block: int, module: nn.Module, call: Call, ids: Tensor, total: int) -> None:
        """Examine a block when it is first called in a route."""
        in_route = block in self._routed and int((ids >= 0).sum(1).max()) < total
        if not in_route or block in self.index_use:
            return
        self._shape = torch.Size((len(ids), total))
        if self.model.ordered and self.model.evaluate is not None:
            self._orders.look_at(block, module, call, ids, total)
        if not any(isinstance(leaf, Layout) for leaf in tree_leaves((call.args, call.kwargs))):
            protected = self.model.protected(len(ids), total)
            per_token = self._per_token.get(block, {})
            self.index_use[block] = _index_use(self.model, module, call, per_token, protected)

    def compare_scans(self, marker: Marker) -> tuple[list[int], str]:
        """Run a pass of evaluation, and compare the paths of scans with those in a route.

        Returns:
            The blocks that scan along one path in both, and what is wrong with the first whose
            paths disagree, else an empty text.
        """
        routed = self._orders
        if not routed.order or self.model.evaluate is None:
            return [], ""
        dense = _ScanOrders(routed.order)
        with marker.marking(dense.look_at) as evaluated:
            self.model.evaluate()
        if evaluated.entry.shape[:2] != self._shape:
            return [], ""
        compared = list(dense.order)
        for block in compared:
            for in_route, in_dense in zip(routed.order[block], dense.order[block], strict=True):
                moved = (in_route != in_dense).nonzero().flatten()
                if len(moved):
                    step = int(moved[0])
                    return compared, (
                        f"block {block} scans token {int(in_route[step])} before token "
                        f"{int(in_dense[step])}, and after it with all tokens; take the path from "
                        "the positions of the tokens, not from their number"
                    )
        return compared, ""


def _gathered(
    passes: Sequence[ObservedPass], evaluation: ObservedPass | None
) -> dict[int, dict[tuple[str, int], int]]:
    """Return which dimension of the arguments of each routed block lost rows in the route."""
    found: dict[int, dict[tuple[str, int], int]] = {}
    for observed in passes[:1] if passes else ():
        inputs = [*(evaluation.marked.inputs if evaluation else ()), *observed.marked.inputs]
        complete = [e for e in inputs if e.call is not None and e.x.shape[1] >= observed.tokens]
        for block_input in observed.routed_inputs():
            same = [each for each in complete if each.block == block_input.block]
            for each in [*same, *complete][:1]:
                found[block_input.block] = _lost_rows(block_input, each)
    return found


def _lost_rows(block_input: BlockInput, complete: BlockInput) -> dict[tuple[str, int], int]:
    """Return, by name and index of the tensor, the dimension of an argument that lost rows."""
    lost: dict[tuple[str, int], int] = {}
    assert block_input.call is not None
    for name in block_input.call.names:
        pairs = zip(
            leaves(block_input.argument(name)), leaves(complete.argument(name)), strict=False
        )
        for index, (few, all_rows) in enumerate(pairs):
            all_rows = _like_batch(few, all_rows, len(block_input.ids))
            if few.dim() == all_rows.dim():
                dimension = _token_dimension(few, all_rows, block_input, complete)
                if dimension is not None:
                    lost[name, index] = dimension
    return lost


def _index_use(
    model: RoutedModel,
    module: nn.Module,
    call: Call,
    per_token: dict[tuple[str, int], int],
    protected: Tensor,
) -> Dependence | None:
    """Return how a block depends on the index of its tokens, from runs on other numbers of them."""
    block, now, total = inner(module), call.tokens.shape[1], protected.shape[1]
    free = (~protected).any(0).nonzero().flatten()
    bounds = (int(free.min()), total - 1 - int(free.max())) if len(free) else (0, 0)
    sizes = {size for name in call.names for leaf in leaves(call.get(name)) for size in leaf.shape}
    counts = token_counts(total, sum(bounds), sizes_of(block) | (sizes - {now}) | {total})
    fresh = call.copy()
    fresh.tokens = torch.randn_like(call.tokens)

    def dimension(name: str, index: int, leaf: Tensor) -> int | None:
        carried = name in call.signature.carry and leaf.shape[:2] == call.tokens.shape[:2]
        return 1 if carried else per_token.get((name, index))

    make = partial(resized, fresh, dimension, now)
    ordered = model.ordered
    return dependence(block, make, counts, *bounds, ordered=ordered, any_order=not ordered)


class _ScanOrders:
    """The order in which each block scans some tokens of each sample.

    Args:
        tokens: By block, the tokens to look at, `(B, P)`; None: some of those that stay in a route.

    Attributes:
        order: These tokens in the order of the scan, for blocks that scan along one path.
    """

    def __init__(self, tokens: dict[int, Tensor] | None = None) -> None:
        self.tokens = tokens
        self.order: dict[int, Tensor] = {}

    def look_at(self, block: int, module: nn.Module, call: Call, ids: Tensor, total: int) -> None:
        """Find the order in one call of a block; `ids` as in `BlockInput`, of `total` tokens."""
        ids = ids.cpu()
        if self.tokens is None:
            counts = (ids >= 0).sum(1)
            count = int(counts.min())
            if count < 2 or count == total or count != int(counts.max()):
                return  # not in a route
            present = ids.sort(1).values[:, -count:]
            tokens = present[:, :: math.ceil(count / _PROBES)]
        elif block in self.tokens:
            tokens = self.tokens[block].sort(1).values
        else:
            return
        is_token = tokens.unsqueeze(2) == ids.unsqueeze(1)
        if not bool(is_token.any(2).all()):
            return
        steps = scan_steps(module, call, is_token.int().argmax(2))
        if steps is not None:
            self.order[block] = tokens.gather(1, steps.argsort(1))


def scan_steps(module: nn.Module, call: Call, columns: Tensor) -> Tensor | None:
    """Return at which step a block scans each of these columns, `(B, P)`; None if no path shows."""
    if torch.is_inference_mode_enabled():
        return None  # without gradients
    x = torch.randn_like(call.tokens).requires_grad_()
    again = call.copy()
    again.tokens = x
    outputs: list[Tensor] = []

    def note(values: list[Any]) -> list[Any]:
        outputs.append(values[0])
        return values

    # Under activation checkpointing, hooks would note what this saves as the model's own.
    saved_as_they_are = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    with torch.enable_grad(), saved_as_they_are:
        try:
            output = inner(module).forward(*again.args, **again.kwargs)
            replace_rows(output, again, note)
        except Exception:  # a block that cannot be run twice is not compared
            return None
        if not outputs[0].requires_grad:
            return None
        if not _one_way(outputs[0], x, columns[:, [0, -1]]).any():
            return None  # as in attention: the other gradients are not needed
        later = _one_way(outputs[0], x, columns)
    steps = later.sum(2)
    is_path = torch.equal(later, steps.unsqueeze(2) > steps.unsqueeze(1))
    all_differ = bool((steps.sort(1).values.diff(dim=1) > 0).all())
    return steps if is_path and all_differ else None


def _one_way(output: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """Return whether the first of each pair of columns depends on the second and not the reverse.

    Args:
        output: What a block returns for x, `(B, L, D)`.
        x: The tokens that it got, `(B, L, D)`.
        columns: Columns of each sample, `(B, P)`.

    Returns:
        Bool `(B, P, P)`, False wherever a gradient is not a number.
    """
    strength = torch.zeros(*columns.shape, columns.shape[1])
    sample = torch.arange(len(columns)).unsqueeze(1)
    weights = torch.randn_like(output[0, 0])
    for number in range(columns.shape[1]):
        value = (output[sample[:, 0], columns[:, number]] * weights).sum()
        (gradient,) = torch.autograd.grad(value, x, retain_graph=True, materialize_grads=True)
        strength[:, number] = gradient.abs().amax(-1).float().cpu()[sample, columns]
    return strength > _ONE_WAY * strength.transpose(1, 2)


def _same(value: Any) -> Any:
    return value
