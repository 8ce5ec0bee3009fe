"""Whether per-token arguments of a block (rotary tables, layouts) are gathered with the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from routing.check.marks import BlockInput
from routing.check.observed import ObservedPass
from routing.layout import Layout


def table_problems(
    block_input: BlockInput, observed: ObservedPass, evaluation: ObservedPass | None
) -> dict[str, str]:
    """Return what is wrong with each table of a call in a route, by name: empty texts if nothing.

    Args:
        block_input: The call.
        observed: Its pass.
        evaluation: A pass of evaluation.
    """
    problems: dict[str, str] = {}
    for layout in block_input.layouts():
        problems["layout"] = problems.get("layout") or _layout_problem(layout, block_input)
    complete = _complete_call(block_input.block, observed, evaluation)
    if complete is None or block_input.call is None:
        return problems
    for name in block_input.call.signature.tables:
        routed, full = block_input.argument(name), complete.argument(name)
        if routed is not None and full is not None:
            problems[name] = _table_problem(name, routed, full, block_input, complete)
    return problems


def _complete_call(
    block: int, observed: ObservedPass, evaluation: ObservedPass | None
) -> BlockInput | None:
    """Return a call with all tokens: this block's in evaluation, else another's in this pass.

    Evaluation is of no use where it has another number of tokens or samples than the pass.
    """
    same_block = []
    if evaluation is not None and evaluation.shape == observed.shape:
        same_block = [each for each in evaluation.marked.inputs if each.block == block]
    for each in (*same_block, *observed.marked.inputs):
        if each.call is not None and bool(each.present(observed.tokens).all()):
            return each
    return None


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
    name: str, routed: Any, full: Any, block_input: BlockInput, complete: BlockInput
) -> str:
    """Compare the tables of a routed call with those of a complete one; an empty text if right."""
    problems, gathered = [], 0
    for few, all_rows in zip(tree_leaves(routed), tree_leaves(full), strict=False):
        if not isinstance(few, Tensor) or not isinstance(all_rows, Tensor):
            continue
        all_rows = _like_batch(few, all_rows, len(block_input.ids))
        if few.dim() != all_rows.dim():
            return f"{name} has another number of dimensions inside the route"
        dimension = _token_dimension(few, all_rows, block_input, complete)
        if dimension is not None:
            gathered += 1
            if not _rows_match(few, all_rows, dimension, block_input, complete):
                return f"{name} holds rows of other tokens than those in the route"
        elif _spans_all(few, all_rows, complete):
            tokens = block_input.x.shape[1]
            problems.append(
                f"{name} has shape {tuple(few.shape)}, not gathered, for {tokens} tokens"
            )
    # A table of the text alone may be as long as the image's; it stays as it is.
    return problems[0] if problems and not gathered else ""


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
    """Whether each token meets in the routed table the row that it has in the complete one."""
    front_few = few.shape[dimension] - block_input.x.shape[1]
    front_all = all_rows.shape[dimension] - complete.x.shape[1]
    batched = dimension > 0 and few.shape[0] == len(block_input.ids)
    columns_of_all = complete.columns(int(complete.ids.max()) + 1)
    for sample, ids in enumerate(block_input.ids.cpu()):
        columns = (ids >= 0).nonzero().flatten()
        here = few[sample] if batched else few
        there = all_rows[sample] if batched else all_rows
        along = dimension - 1 if batched else dimension
        source_rows = columns_of_all[sample, ids[columns]] + front_all
        rows_here = columns + front_few
        has_row = (source_rows >= 0) & (rows_here >= 0)  # class tokens may have none
        expected = there.index_select(along, source_rows[has_row].to(few.device))
        actual = here.index_select(along, rows_here[has_row].to(few.device))
        if not torch.equal(actual, expected):
            return False
    return True
