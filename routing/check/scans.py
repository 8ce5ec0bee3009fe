"""Whether blocks that scan do so along the same path in a route as with all tokens.

The output of a scan at a token depends on the tokens before it on the path and on no later ones, so
gradients show the path of any block. The block is run once more on random features (marks could
saturate it), and some tokens of each sample are compared in pairs. If one of every two depends
on the other and not the reverse, the block scans along one path. Attention, convolutions and blocks
that scan in both directions show no such path and are not judged.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from routing.attached.calls import Call, inner, replace_rows
from routing.check.marks import marked_tokens
from routing.check.subject import RoutedModel

_PROBES = 12  # tokens that are compared with each other in a block
# A pair depends one way if one gradient is this many times the reverse one: in a scan, the reverse
# is 0 up to rounding; in attention, the two differ less.
_ONE_WAY = 100


def compare_scans(model: RoutedModel) -> tuple[list[int], str]:
    """Run one pass of training and one of evaluation, and compare the paths of the blocks.

    Returns:
        The blocks that scan along one path in both passes, and what is wrong with the first whose
        paths disagree, else an empty text.
    """
    if model.evaluate is None:
        return [], ""
    routed = _ScanOrders()
    with torch.enable_grad(), marked_tokens(model, routed.look_at) as trained:
        model.train()
    if not routed.order:
        return [], ""
    dense = _ScanOrders(routed.order)
    with marked_tokens(model, dense.look_at) as evaluated:
        model.evaluate()
    if evaluated.entry.shape != trained.entry.shape:
        return [], ""
    compared = list(dense.order)
    for block in compared:
        for in_route, in_dense in zip(routed.order[block], dense.order[block], strict=True):
            moved = (in_route != in_dense).nonzero().flatten()
            if len(moved):
                step = int(moved[0])
                return compared, (
                    f"block {block} scans token {int(in_route[step])} before token "
                    f"{int(in_dense[step])}, and after it with all tokens; take the path from the "
                    "positions of the tokens, not from their number"
                )
    return compared, ""


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
