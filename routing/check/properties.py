"""The properties of a correct implementation of token routing, each judged with evidence.

TREAD, arXiv 2501.04765; the route's ends and the rate as in SG, arXiv 2601.01608, eq. 5: blocks
i..j are skipped, both included, by the share of tokens that is the rate. Each function judges the
property that its row of the table in docs/check.md describes; `PROPERTIES` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from routing.attached.calls import TEXT
from routing.check.observed import ModelRuns, ObservedPass
from routing.check.report import FAIL, NOT_APPLICABLE, PASS, Judgement
from routing.check.subject import RoutedModel
from routing.check.tables import table_problems
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
    route = runs.model.intended_route()
    is_none = route == Route()
    intended = "" if route is None else ", ".join(segment.span for segment in route.segments)
    if not runs.routed_passes:
        if is_none:
            return PASS, f"{NO_ROUTE}, as intended (route none)"
        return FAIL, f"{NO_ROUTE}{f'; intended: {intended}' if intended else ''}"
    evidence = _who_saw_what(runs.routed_passes[0], runs.model.depth)
    if is_none:
        return FAIL, f"{evidence}; the route none skips no blocks"
    deviating = [observed for observed in runs.passes if observed.spans != intended]
    if intended and deviating:
        evidence = _who_saw_what(deviating[0], runs.model.depth)
        if len(deviating) < len(runs.passes):
            evidence += f" in {len(deviating)} of {len(runs.passes)} passes"
        meaning = f"the route {intended} skips blocks {intended}, both ends included"
        return FAIL, f"{evidence}; {meaning}"
    dense = len(runs.passes) - len(runs.routed_passes)
    if dense:
        evidence += f"; {dense} of {len(runs.passes)} passes had no route"
    if len({observed.spans for observed in runs.routed_passes}) > 1:
        evidence += "; other blocks in other passes"
    return PASS, evidence


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
    if runs.model.intended_route() == Route():
        return NOT_APPLICABLE, "the route none has no rate"
    judgements = [_rate_of_pass(runs.model, observed) for observed in runs.routed_passes]
    failed = [judgement for judgement in judgements if judgement[0] == FAIL]
    return (failed or judgements)[0]


def _rate_of_pass(model: RoutedModel, observed: ObservedPass) -> Judgement:
    """Judge the rate of each segment in one pass; passes may have other lengths."""
    route = model.intended_route()
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
    if not runs.model.ordered:
        return NOT_APPLICABLE, f"{problem}, which makes no difference to them (ordered=False)"
    if positions(runs)[0] == PASS:  # attention does not depend on the order then
        advice = (
            "wrong for scans and convolutions; the positions pass, so if the blocks are attention, "
            "state ordered=False"
        )
    else:
        advice = (
            "wrong for scans, convolutions and positions by index; if the blocks are plain "
            "attention, state ordered=False"
        )
    return FAIL, f"{problem}: {advice}"


def _order_problem(passes: Sequence[ObservedPass]) -> str:
    """Describe the first block that saw or scans its tokens in another order; else empty."""
    for observed in passes:
        for block_input in observed.routed_inputs():
            if any(layout.shuffle is not None for layout in block_input.layouts()):
                return f"block {block_input.block} scans its tokens in a shuffled order"
            for ids in block_input.ids:
                kept = ids[ids >= 0]
                if bool((kept.diff() <= 0).any()):
                    first = ", ".join(map(str, kept[:6].tolist()))
                    return f"block {block_input.block} saw tokens in the order {first}, ..."
    return ""


@of_a_route
def positions(runs: ModelRuns) -> Judgement:
    """Whether rotary tables and other per-token arguments hold the rows of the kept tokens."""
    compared: set[str] = set()
    for observed in runs.passes:
        for block_input in observed.routed_inputs():
            problems = table_problems(block_input, observed, runs.evaluation)
            compared.update(problems)
            for problem in filter(None, problems.values()):
                return FAIL, f"block {block_input.block}: {problem}"
    if not compared:
        return NOT_APPLICABLE, (
            "no per-token table among the blocks' arguments (tables= names others); one computed "
            "inside a block is not seen"
        )
    return PASS, f"{', '.join(sorted(compared))}: rows of the tokens that are there"


def protected_tokens(runs: ModelRuns) -> Judgement:
    """Whether protected positions, and text in an argument of its own, reached every block."""
    positions_of_any: set[int] = set()
    skipped: set[int] = set()
    text_lengths: set[int] = set()
    for observed in runs.passes:
        protected = runs.model.protected(*observed.shape[:2])
        positions_of_any.update(_indices(protected.any(0)))
        lengths: set[int] = set()  # of the text in this pass; another pass may have longer prompts
        for block_input in observed.marked.inputs:
            if block_input.block == runs.model.depth:
                continue  # what follows the last block
            text = block_input.argument(TEXT)
            if isinstance(text, Tensor) and text.dim() == 3:
                lengths.add(text.shape[1])
            missing = protected & ~block_input.present(observed.tokens)
            skipped.update(_indices(missing.any(0)))
        if len(lengths) > 1:
            counts = " and ".join(map(str, sorted(lengths)))
            return FAIL, f"blocks got {counts} rows of {TEXT}: text is routed too"
        text_lengths |= lengths
    if skipped:
        return FAIL, f"positions {_shortened(sorted(skipped))} skipped blocks"
    reached = []
    if positions_of_any:
        reached.append(f"positions {_shortened(sorted(positions_of_any))}")
    if text_lengths:
        counts = " or ".join(map(str, sorted(text_lengths)))
        reached.append(f"all {counts} rows of {TEXT}")
    if not reached:
        return NOT_APPLICABLE, f"none stated (protect=), no argument {TEXT}"
    return PASS, f"{' and '.join(reached)} reached every block"


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


#: The properties by the name that a report gives them, in the order of its table.
PROPERTIES: dict[str, Property] = {
    "routed blocks": routed_blocks,
    "rate": rate,
    "bit for bit": bit_for_bit,
    "order": order,
    "positions": positions,
    "protected tokens": protected_tokens,
    "gradient": gradient,
    "dense evaluation": dense_evaluation,
    "equal evaluation": equal_evaluation,
    "samples differ": samples_differ,
    "steps differ": steps_differ,
    "restart": restart,
}
