"""Whether per-token arguments of a block (rotary tables, layouts) are gathered with the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from routing.attached.calls import TEXT
from routing.check.marks import BlockInput
from routing.check.observed import ObservedPass
from routing.check.properties import NO_ROUTE, argument_of, segments_of
from routing.check.report import FAIL, NOT_APPLICABLE, PASS, Judgement
from routing.check.subject import RoutedModel
from routing.layout import Layout


def positions_gathered(
    model: RoutedModel, passes: Sequence[ObservedPass], evaluation: ObservedPass | None
) -> Judgement:
    """Whether each token of a route meets its own rows of the blocks' positional tables."""
    if not any(each.segments for each in passes):
        return NOT_APPLICABLE, NO_ROUTE
    compared: set[str] = set()
    for observed in passes:
        for segment in segments_of([observed]):
            for rows in segment.rows:
                compared.update(_layouts(rows))
                complete = _complete_call(rows.block, observed, evaluation)
                problem = _layout_problem(rows)
                for table_name in model.signatures[rows.block].tables:
                    routed = argument_of(model, rows, table_name)
                    full = None if complete is None else argument_of(model, complete, table_name)
                    if routed is None or full is None or complete is None:
                        continue
                    compared.add(table_name)
                    text = argument_of(model, complete, TEXT)
                    joint = text.shape[1] if isinstance(text, Tensor) and text.dim() == 3 else 0
                    problem = problem or _table_problem(
                        table_name, routed, full, rows, complete, joint
                    )
                if problem:
                    return FAIL, f"block {rows.block}: {problem}"
    if not compared:
        return NOT_APPLICABLE, (
            "no per-token table among the blocks' arguments (tables= names others); one computed "
            "inside a block is not seen"
        )
    return PASS, f"{', '.join(sorted(compared))}: rows of the tokens that are there"


def _complete_call(
    block: int, observed: ObservedPass, evaluation: ObservedPass | None
) -> BlockInput | None:
    """Return a call with all tokens: this block's in evaluation, else another's in this pass.

    Evaluation is of no use where it has another number of tokens or samples than the pass.
    """
    same_block = []
    if evaluation is not None and evaluation.shape == observed.shape:
        same_block = [rows for rows in evaluation.marked.rows if rows.block == block]
    others = [rows for rows in observed.marked.rows if rows.args or rows.kwargs]
    for rows in (*same_block, *others):
        if rows.x.shape[1] >= observed.tokens and bool(rows.present(observed.tokens).all()):
            return rows
    return None


def _layouts(rows: BlockInput) -> set[str]:
    leaves = tree_leaves((rows.args, rows.kwargs))
    return {"layout" for leaf in leaves if isinstance(leaf, Layout)}


def _layout_problem(rows: BlockInput) -> str:
    """Compare layouts of this package among the arguments with the tokens that are there."""
    for leaf in tree_leaves((rows.args, rows.kwargs)):
        if not isinstance(leaf, Layout):
            continue
        for sample, ids in enumerate(rows.ids):
            tokens = ids[ids >= leaf.prefix].sort().values - leaf.prefix
            if leaf.ids is None:
                stated = torch.arange(leaf.tokens, device=tokens.device)
            else:
                stated = leaf.ids[sample % len(leaf.ids)].to(tokens.device)
            if not torch.equal(stated, tokens):
                return f"its layout places {leaf.tokens} tokens elsewhere than where they are"
    return ""


def _table_problem(
    name: str, routed: Any, full: Any, rows: BlockInput, complete: BlockInput, joint_text: int
) -> str:
    """Compare the tables of a routed call with those of a complete one; an empty text if right.

    Tables may also have `joint_text` rows, of text in an argument of its own.
    """
    pairs = list(zip(tree_leaves(routed), tree_leaves(full), strict=False))
    problems, gathered = [], 0
    for few, all_rows in pairs:
        if not isinstance(few, Tensor) or not isinstance(all_rows, Tensor):
            continue
        all_rows = _like_batch(few, all_rows, len(rows.ids))
        if few.dim() != all_rows.dim():
            return f"{name} has another number of dimensions inside the route"
        dimension = _token_dimension(few, all_rows, rows, complete)
        if dimension is not None:
            gathered += 1
            if not _rows_match(few, all_rows, dimension, rows, complete):
                problems.append(f"{name} holds rows of other tokens than those in the route")
        elif _spans_all(few, all_rows, complete, joint_text):
            problems.append(
                f"{name} has shape {tuple(few.shape)}, not gathered, for {rows.x.shape[1]} tokens"
            )
    # A table of the text alone may be as long as the image's; it stays as it is.
    wrong_rows = [text for text in problems if "other tokens" in text]
    return (wrong_rows or ([] if gathered else problems) or [""])[0]


def _like_batch(few: Tensor, all_rows: Tensor, batch: int) -> Tensor:
    """Return a table that the batch shares as one of each sample, if it is that in the route."""
    if few.dim() == all_rows.dim() + 1 and few.shape[0] == batch:
        return all_rows.expand(batch, *all_rows.shape)
    if few.dim() == all_rows.dim() and all_rows.shape[0] == 1 and few.shape[0] == batch:
        return all_rows.expand(batch, *all_rows.shape[1:])
    return all_rows


def _token_dimension(
    few: Tensor, all_rows: Tensor, rows: BlockInput, complete: BlockInput
) -> int | None:
    """Return the dimension that lost as many rows as there are tokens missing."""
    missing = complete.x.shape[1] - rows.x.shape[1]
    for dimension in range(few.dim()):
        if missing and all_rows.shape[dimension] - few.shape[dimension] == missing:
            return dimension
    return None


def _spans_all(few: Tensor, all_rows: Tensor, complete: BlockInput, joint_text: int) -> bool:
    """Whether a table that lost no rows has one for each token of the complete sequence."""
    length = complete.x.shape[1]
    return few.shape == all_rows.shape and bool({length, length + joint_text} & set(few.shape))


def _rows_match(
    few: Tensor, all_rows: Tensor, dimension: int, rows: BlockInput, complete: BlockInput
) -> bool:
    """Whether each token meets in the routed table the row that it has in the complete one."""
    front_few = few.shape[dimension] - rows.x.shape[1]
    front_all = all_rows.shape[dimension] - complete.x.shape[1]
    batched = dimension > 0 and few.shape[0] == len(rows.ids)
    for sample, ids in enumerate(rows.ids):
        columns = (ids >= 0).nonzero().flatten()
        source = torch.empty(int(complete.ids[sample].max()) + 1, dtype=torch.long)
        where = (complete.ids[sample] >= 0).nonzero().flatten()
        source[complete.ids[sample][where].cpu()] = where.cpu()
        here = few[sample] if batched else few
        there = all_rows[sample] if batched else all_rows
        along = dimension - 1 if batched else dimension
        source_rows = source[ids[columns].cpu()] + front_all
        rows_here = columns.cpu() + front_few
        has_row = (source_rows >= 0) & (rows_here >= 0)  # class tokens may have none
        expected = there.index_select(along, source_rows[has_row].to(few.device))
        actual = here.index_select(along, rows_here[has_row].to(few.device))
        if not torch.equal(actual, expected):
            return False
    return True
