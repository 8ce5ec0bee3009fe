"""The properties of a correct implementation of token routing, each judged with evidence.

TREAD, arXiv 2501.04765; the route's ends and the rate as in SG, arXiv 2601.01608, eq. 5: blocks
i..j are skipped, both included, by the share of tokens that is the rate. Each function judges the
property that its row of the table in docs/check.md describes; `PROPERTIES` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from routing.attached.calls import TEXT
from routing.check.blocks import table_problems
from routing.check.observe import BlockInput, ModelRuns, ObservedPass
from routing.check.report import FAIL, NOT_APPLICABLE, PASS, Judgement, RoutedModel
from routing.route import Route

NO_ROUTE = "no block saw fewer tokens in training"
Property = Callable[[ModelRuns], Judgement]


def of_a_route(judge: Property) -> Property:
    """Make a property not applicable to a model without a route in training."""

    @wraps(judge)
    def judge_route(runs: ModelRuns) -> Judgement:
        return judge(runs) if runs.routed_passes else (NOT_APPLICABLE, NO_ROUTE)

    return judge_route


def routed_blocks(runs: ModelRuns) -> Judgement:
    """Whether the blocks of the intended route saw fewer tokens, and no others did."""
    model, passes = runs.model, runs.passes
    intended = [model.intended_route(number) for number in range(len(passes))]
    if not runs.routed_passes:
        if intended and not any(route is None or route.segments for route in intended):
            return PASS, f"{NO_ROUTE}, as intended (route none)"
        spans = " or ".join(sorted({_spans(route) for route in intended} - {""}))
        return FAIL, f"{NO_ROUTE}; intended: {spans}" if spans else NO_ROUTE
    deviating = [
        number
        for number, route in enumerate(intended)
        if route is not None and passes[number].spans != _spans(route)
    ]
    if deviating:
        return FAIL, _deviation(runs, deviating, intended[deviating[0]])
    evidence = _who_saw_what(runs.routed_passes[0], model.depth)
    if len({_spans(route) for route in intended}) > 1:
        return PASS, f"{evidence}; {len(passes)} passes follow the route {model.schedule}"
    dense = len(passes) - len(runs.routed_passes)
    if dense:
        evidence += f"; {dense} of {len(passes)} passes had no route"
    if len({observed.spans for observed in runs.routed_passes}) > 1:
        evidence += "; other blocks in other passes"
    return PASS, evidence


def _spans(route: Route | None) -> str:
    """Return the blocks of a route as `ObservedPass.spans` does."""
    return "" if route is None else ", ".join(segment.span for segment in route.segments)


def _deviation(runs: ModelRuns, deviating: Sequence[int], route: Route | None) -> str:
    """Describe passes in which other blocks saw fewer tokens than those of the route."""
    assert route is not None
    observed = runs.passes[deviating[0]]
    evidence = _who_saw_what(observed, runs.model.depth)
    if len(deviating) < len(runs.passes):
        first = f"pass {deviating[0]}: " if len(runs.model.schedule.stages) > 1 else ""  # type: ignore[union-attr]
        evidence = f"{first}{evidence} in {len(deviating)} of {len(runs.passes)} passes"
    if not route.segments:
        return f"{evidence}; the route none skips no blocks"
    seen = [(segment.start, segment.end) for segment in observed.segments]
    if seen == [(segment.start, segment.end - 1) for segment in route.segments]:
        evidence += "; the end of the route is counted exclusively"
    return f"{evidence}; the route {_spans(route)} skips blocks {_spans(route)}, both ends included"


def _who_saw_what(observed: ObservedPass, depth: int) -> str:
    """Describe which blocks saw how many tokens."""
    descriptions, first = [], 0
    for segment in observed.segments:
        if segment.start > first:
            descriptions.append(
                f"{_span(first, segment.start - 1)} saw all {observed.tokens} tokens"
            )
        count = int(segment.present[0].sum())
        descriptions.append(f"{_span(segment.start, segment.end)} saw {count} of {observed.tokens}")
        first = segment.end + 1
    if first < depth:
        descriptions.append(f"{_span(first, depth - 1)} saw all")
    return ", ".join(descriptions)


def _span(first: int, last: int) -> str:
    return f"block {first}" if first == last else f"blocks {first}-{last}"


@of_a_route
def rate(runs: ModelRuns) -> Judgement:
    """Whether the fraction of tokens that skip is the stated rate, in every sample and pass."""
    judgements = []
    for number, observed in enumerate(runs.passes):
        route = runs.model.intended_route(number)
        if observed.segments and route != Route():
            judgements.append(_rate_of_pass(runs.model, observed, route))
    failed = [judgement for judgement in judgements if judgement[0] == FAIL]
    return (failed or judgements or [(NOT_APPLICABLE, "the route none has no rate")])[0]


def _rate_of_pass(model: RoutedModel, observed: ObservedPass, route: Route | None) -> Judgement:
    """Judge the rate of each segment in one pass; passes may have other lengths."""
    stated = [] if route is None else [segment.rate for segment in route.segments]
    protected = model.protected(*observed.shape[:2])
    routable = observed.tokens - int(protected[0].sum())
    results, descriptions = [], []
    for number, segment in enumerate(observed.segments):
        skipped = (~segment.present).sum(1).tolist()
        intended = stated[number] if number < len(stated) else None
        result, evidence = _judge_rate(skipped, routable, intended, bool(protected.any()))
        results.append(result)
        descriptions.append(evidence)
    result = next(each for each in (FAIL, PASS, NOT_APPLICABLE) if each in results)
    return result, "; ".join(descriptions)


def _judge_rate(
    skipped: Sequence[int], routable: int, stated: float | None, protects: bool
) -> Judgement:
    """Judge whether a stated rate counts the tokens that skip.

    Either share may be off by less than one token, as implementations round differently.

    Args:
        skipped: How many tokens of each sample skip.
        routable: How many tokens may skip.
        stated: The rate; None accepts any.
        protects: Whether tokens are stated that must not skip.
    """
    count = skipped[0]
    if len(set(skipped)) > 1:
        return FAIL, f"samples differ: {list(skipped)} of {routable} tokens skip"
    share = f"{count} of {routable} tokens skip ({count / max(routable, 1):.3g})"
    if stated is None:
        return PASS, share
    counts_skipped = abs(count - stated * routable) < 1
    counts_kept = abs(count - (1 - stated) * routable) < 1
    if counts_skipped and counts_kept:
        return NOT_APPLICABLE, (
            f"{share}: {stated:g} of {routable} is as many skipped as kept, to one token; check at "
            "a rate such as 0.75 to tell which of them it counts"
        )
    if counts_skipped:
        return PASS, f"{share}: {stated:g} counts the tokens that skip, as in TREAD"
    if counts_kept:
        return FAIL, (
            f"{share}: {stated:g} counts the tokens that are KEPT; TREAD counts those that skip"
        )
    hint = "" if protects else "; text or class tokens? state protect="
    return FAIL, (
        f"{share}: {stated:g} is neither the skipped nor the kept share; TREAD counts those that "
        f"skip{hint}"
    )


@of_a_route
def bit_for_bit(runs: ModelRuns) -> Judgement:
    """Whether skipped tokens come back unchanged to their places, and kept ones to theirs."""
    total = runs.arrival()
    evidence = f"{total.exact} of {total.bypassed} skipped tokens came back exactly"
    if total.exact == total.bypassed and not total.stayed_changed:
        return PASS, f"{evidence}, each at its place ({len(runs.passes)} passes)"
    if total.misplaced:
        evidence += f", {total.misplaced} at another place"
    if total.lost:
        evidence += f", {total.lost} lost or unrecognisable"
    if total.exact < total.bypassed:
        evidence += f"; largest change of a feature {total.largest_change:.3g}"
    if total.stayed_changed:
        evidence += f"; {total.stayed_changed} tokens that had stayed were changed or moved too"
    return FAIL, evidence


@of_a_route
def order(runs: ModelRuns) -> Judgement:
    """Whether blocks see the kept tokens in ascending order, and scan them along their path."""
    problem = _order_problem(runs.passes)
    if not problem:
        scanning, scan_problem = runs.scans
        evidence = "blocks of the route saw their tokens in ascending order"
        if scan_problem:
            return FAIL, f"{evidence}, but {scan_problem}"
        if scanning:
            evidence += f"; {len(scanning)} of them scan along the same path as with all tokens"
        return PASS, evidence
    if problem.endswith("twice"):
        return FAIL, problem
    if not runs.model.ordered:
        for block, use in runs.index_use.items():
            if use is not None and use.kind == "order":
                return FAIL, f"{problem}, and block {block} depends on it ({use.what})"
        return NOT_APPLICABLE, f"{problem}, which makes no difference to them (ordered=False)"
    return FAIL, (
        f"{problem}: wrong for scans, convolutions and positions by index; if the blocks are plain "
        "attention, state ordered=False"
    )


def _order_problem(passes: Sequence[ObservedPass]) -> str:
    """Describe the first block that saw or scans its tokens in another order; else empty."""
    for observed in passes:
        for block_input in observed.routed_inputs():
            if any(layout.shuffle is not None for layout in block_input.layouts()):
                return f"block {block_input.block} scans its tokens in a shuffled order"
            for ids in block_input.ids:
                kept = ids[ids >= 0]
                if len(kept) and len(kept.unique()) < len(kept):
                    return f"block {block_input.block} saw a token twice"
                if bool((kept.diff() <= 0).any()):
                    first = ", ".join(map(str, kept[:6].tolist()))
                    return f"block {block_input.block} saw tokens in the order {first}, ..."
    return ""


@of_a_route
def positions(runs: ModelRuns) -> Judgement:
    """Whether each token has its own position in every block, in the route and after it."""
    compared: set[str] = set()
    for observed in runs.passes:
        for block_input in observed.marked.inputs:
            for name, problem in table_problems(block_input, observed, runs.evaluation):
                compared.add(name)
                if problem:
                    return FAIL, f"block {block_input.block}: {problem}"
    for block, use in sorted(runs.index_use.items()):
        if use is not None and use.kind == "position":
            return FAIL, f"block {block} places its tokens by their index ({use.what})"
    evidence = []
    if compared:
        evidence.append(f"{', '.join(sorted(compared))}: rows of the tokens that are there")
    uses = sorted(runs.index_use.items())
    examined = [block for block, use in uses if use is None or use.kind == "order"]
    if examined:
        evidence.append(f"{_blocks(examined)} place none by index")
    for block, use in runs.index_use.items():
        if use is not None and use.kind in ("number", "unseen"):
            evidence.append(f"block {block} cannot be examined ({use.what})")
            break
    judged = PASS if compared or examined else NOT_APPLICABLE
    return judged, "; ".join(evidence) or "no per-token argument of the blocks (tables= names them)"


def _blocks(indices: Sequence[int]) -> str:
    """Describe blocks, consecutive ones as a range."""
    is_range = list(indices) == list(range(indices[0], indices[-1] + 1))
    if is_range and len(indices) > 1:
        return f"blocks {indices[0]}-{indices[-1]}"
    return f"block{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def protected_tokens(runs: ModelRuns) -> Judgement:
    """Whether protected positions, and text in an argument of its own, reached every block."""
    positions_of_any: set[int] = set()
    skipped: set[int] = set()
    text_lengths: dict[str, set[int]] = {}
    for observed in runs.passes:
        protected = runs.model.protected(*observed.shape[:2])
        positions_of_any.update(_indices(protected.any(0)))
        for segment in observed.segments:
            skipped.update(_indices((protected & ~segment.present).any(0)))
        lengths: dict[str, set[int]] = {}  # of text in this pass; another may have longer prompts
        for block_input in observed.marked.inputs:
            if block_input.block == runs.model.depth:
                continue  # what follows the last block
            for name, rows in _text_rows(block_input, observed.tokens):
                lengths.setdefault(name, set()).add(rows)
        for name, rows_of_name in lengths.items():
            if len(rows_of_name) > 1:
                counts = " and ".join(map(str, sorted(rows_of_name)))
                return FAIL, f"blocks got {counts} rows of {name}: text is routed too"
            text_lengths.setdefault(name, set()).update(rows_of_name)
    if skipped:
        return FAIL, f"positions {_shortened(sorted(skipped))} skipped blocks"
    reached = []
    if positions_of_any:
        reached.append(f"positions {_shortened(sorted(positions_of_any))}")
    for name, rows_of_name in text_lengths.items():
        counts = " or ".join(map(str, sorted(rows_of_name)))
        reached.append(f"all {counts} rows of {name}")
    if not reached:
        return NOT_APPLICABLE, "none stated (protect=), no text among the arguments"
    return PASS, f"{' and '.join(reached)} reached every block"


def _text_rows(block_input: BlockInput, tokens: int) -> Iterator[tuple[str, int]]:
    """Return arguments `(B, L, D)` that may be text, and how many rows they have."""
    call = block_input.call
    assert call is not None
    here = {tokens, block_input.x.shape[1]}
    for name in call.names:
        value = call.get(name)
        known = name in (call.signature.tokens, *call.signature.carry, *call.signature.tables)
        if known or not isinstance(value, Tensor) or value.dim() != 3:
            continue
        may_be_text = value.shape[1] not in {1, *here} and len(value) == len(block_input.ids)
        if name == TEXT or may_be_text:
            yield name, value.shape[1]


def _indices(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def _shortened(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:6]))
    return f"{shown}, ... ({len(indices)} in all)" if len(indices) > 6 else shown


@of_a_route
def gradient(runs: ModelRuns) -> Judgement:
    """Whether a skipped token has the same gradient before and after the route."""
    gradients = runs.routed_passes[0].gradients
    if not gradients:
        return NOT_APPLICABLE, "no skipped token can be recognised after the route"
    unchanged = sum(bool((each == 1).all()) for each in gradients)
    evidence = f"{unchanged} of {len(gradients)} skipped tokens pass the gradient on unchanged"
    if unchanged == len(gradients):
        return PASS, evidence
    lost = sum(not each.any() for each in gradients)
    return FAIL, f"{evidence}, {lost} pass none on"


def dense_evaluation(runs: ModelRuns) -> Judgement:
    """Whether all blocks see all tokens in evaluation."""
    evaluation, depth = runs.evaluation, runs.model.depth
    if evaluation is None:
        return NOT_APPLICABLE, "no evaluate= given"
    if evaluation.segments:
        return FAIL, f"in evaluation, {_who_saw_what(evaluation, depth)}"
    blocks = {each.block for each in evaluation.marked.inputs if each.block < depth}
    return PASS, f"all {len(blocks)} blocks saw all {evaluation.tokens} tokens"


def equal_evaluation(runs: ModelRuns) -> Judgement:
    """Whether the output in evaluation is bitwise that of the model without routing."""
    if runs.outputs is None:
        return NOT_APPLICABLE, "no dense= given"
    once, twice, dense = runs.outputs
    if _largest_difference(once, twice) != 0:
        return FAIL, (
            "two evaluations of one input differ: is routing (see dense evaluation) or dropout "
            "still active?"
        )
    difference = _largest_difference(once, dense)
    evidence = f"largest difference from the model without routing: {difference:g}"
    return PASS if difference == 0 else FAIL, evidence


def _largest_difference(output: Any, other_output: Any) -> float:
    """Return the largest difference of two outputs; NaN where they hold NaN or differ in shape."""
    some = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    others = [leaf for leaf in tree_leaves(other_output) if isinstance(leaf, Tensor)]
    if not some or [x.shape for x in some] != [x.shape for x in others]:
        return float("nan")
    differences = [
        (a.detach().double() - b.detach().double()).abs().max()
        for a, b in zip(some, others, strict=True)
    ]
    return float(torch.stack(differences).max())


@of_a_route
def samples_differ(runs: ModelRuns) -> Judgement:
    """Whether the samples of a batch keep different tokens."""
    subsets = runs.subsets
    if len(subsets[0]) < 2:
        return NOT_APPLICABLE, "a batch of one sample"
    equal = [bool((present == present[:1]).all()) for present in subsets]
    evidence = f"the samples of a batch kept the same tokens in {sum(equal)} of {len(equal)} passes"
    if runs.model.shared:
        result = NOT_APPLICABLE if all(equal) else FAIL
        return result, f"{evidence}; shared=True: they are meant to"
    if all(equal):
        meant = "if that is meant, as with one rotary table for the batch, state shared=True"
        return FAIL, f"{evidence}; {meant}"
    return PASS, evidence


@of_a_route
def steps_differ(runs: ModelRuns) -> Judgement:
    """Whether passes over the same number of tokens and samples draw different subsets."""
    distinct: list[Tensor] = []
    for present in runs.subsets:
        if not any(torch.equal(present, other) for other in distinct):
            distinct.append(present)
    evidence = f"{len(distinct)} different subsets in {len(runs.subsets)} passes"
    shapes = {present.shape for present in runs.subsets}
    if len(distinct) > len(shapes):
        return PASS, evidence
    if len(shapes) == len(runs.subsets) > 1:
        return NOT_APPLICABLE, "no two passes have the same number of tokens"
    return FAIL, evidence


@of_a_route
def restart(runs: ModelRuns) -> Judgement:
    """Whether the same seed repeats the subsets after a restart, and another one does not."""
    total, repeated = len(runs.passes), _equal_passes(runs.passes, runs.restarted)
    evidence = f"{repeated} of {total} passes repeat their subsets after a restart"
    if repeated < total:
        return FAIL, (
            f"{evidence} with the same seed, while other code draws from torch's global "
            "generator: they depend on something that the seed does not determine"
        )
    if runs.other_seed is None:
        return PASS, evidence
    same = _equal_passes(runs.passes, runs.other_seed)
    return FAIL if same == total else PASS, f"{evidence}, {same} with another seed"


def _equal_passes(passes: Sequence[ObservedPass], others: Sequence[ObservedPass]) -> int:
    """Return how many passes keep the same tokens as others in all their segments."""
    equal = 0
    for observed, other in zip(passes, others, strict=True):
        subsets = [segment.present for segment in observed.segments]
        other_subsets = [segment.present for segment in other.segments]
        same_number = len(subsets) == len(other_subsets)
        equal += same_number and all(map(torch.equal, subsets, other_subsets))
    return equal


@of_a_route
def handed_on(runs: ModelRuns) -> Judgement:
    """Whether what blocks hand on is gathered and restored with the tokens."""
    if not runs.model.carry:
        return NOT_APPLICABLE, "no argument stated that blocks hand on (carry=)"
    for observed in runs.passes:
        for block_input in observed.marked.inputs:
            if block_input.handed_on:
                return FAIL, f"block {block_input.block}: {block_input.handed_on}"
    return PASS, f"{', '.join(runs.model.carry)}: that of the tokens that are there, in every block"


@of_a_route
def ranks_differ(runs: ModelRuns) -> Judgement:
    """Whether the processes of a distributed run keep different tokens."""
    if runs.ranks is None:
        return NOT_APPLICABLE, "one process (torchrun --nproc-per-node 2 -m routing.check ...)"
    first, *others = runs.ranks
    equal = [
        rank
        for rank, subsets in enumerate(others, 1)
        if len(subsets) == len(first) and all(map(torch.equal, first, subsets))
    ]
    evidence = f"{len(equal)} of {len(others)} other processes kept the tokens of process 0"
    if runs.model.shared:
        return NOT_APPLICABLE, f"{evidence}; shared=True"
    return (FAIL if equal else PASS), f"{evidence} in all passes"


#: The properties by the name that a report gives them, in the order of its table.
PROPERTIES: dict[str, Property] = {
    "routed blocks": routed_blocks,
    "rate": rate,
    "bit for bit": bit_for_bit,
    "order": order,
    "positions": positions,
    "handed on": handed_on,
    "protected tokens": protected_tokens,
    "gradient": gradient,
    "dense evaluation": dense_evaluation,
    "equal evaluation": equal_evaluation,
    "samples differ": samples_differ,
    "steps differ": steps_differ,
    "restart": restart,
    "ranks differ": ranks_differ,
}
