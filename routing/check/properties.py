"""The properties of a correct implementation of token routing, each judged with evidence.

TREAD, arXiv 2501.04765; the route's ends and the rate as in SG, arXiv 2601.01608, eq. 5: blocks
i..j are skipped, both included, by the share of tokens that is the rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from routing.attached.calls import TEXT, Call
from routing.check.marks import BlockInput
from routing.check.observed import Arrival, ObservedPass, ObservedSegment
from routing.check.report import FAIL, NOT_APPLICABLE, PASS, Judgement
from routing.check.subject import RoutedModel
from routing.layout import Layout

NO_ROUTE = "no block saw fewer tokens in training"
_IS_NEITHER = "is neither the skipped nor the kept share; TREAD counts those that skip"


def segments_of(passes: Sequence[ObservedPass]) -> Iterator[ObservedSegment]:
    """Return the segments of all passes."""
    for observed in passes:
        yield from observed.segments


def routed_blocks(model: RoutedModel, passes: Sequence[ObservedPass]) -> Judgement:
    """Which blocks saw which tokens, and whether these are the blocks of the intended route."""
    route = model.intended_route()
    intended = "" if route is None else ", ".join(segment.span for segment in route.segments)
    observed = passes[0]
    if not observed.segments:
        return FAIL, f"{NO_ROUTE}{f'; intended: {intended}' if intended else ''}"
    evidence = _who_saw_what(observed, model.depth)
    spans = {_spans(each) for each in passes}
    if len(spans) > 1 and route is None:
        return PASS, f"{evidence}; other blocks in other passes"
    wrong = [span for span in sorted(spans) if intended and span != intended]
    if wrong:
        meaning = f"the route {intended} skips blocks {intended}, both ends included"
        return FAIL, f"{evidence}; {meaning}"
    return PASS, evidence


def _spans(observed: ObservedPass) -> str:
    return ", ".join(f"{segment.start}-{segment.end}" for segment in observed.segments)


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


def rate(model: RoutedModel, passes: Sequence[ObservedPass]) -> Judgement:
    """Whether the share of tokens that skip is the stated one, in every sample of every pass."""
    if not any(each.segments for each in passes):
        return NOT_APPLICABLE, NO_ROUTE
    judgements = [_rate_of_pass(model, each) for each in passes if each.segments]
    for result, evidence in judgements:
        if result == FAIL:
            return result, evidence
    return judgements[0]


def _rate_of_pass(model: RoutedModel, observed: ObservedPass) -> Judgement:
    """Judge the share of tokens that skip in one pass; passes may have other lengths."""
    route = model.intended_route()
    protected = model.protected(observed.batch, observed.tokens)
    routable = observed.tokens - int(protected[0].sum())
    descriptions, results = [], set()
    for number, segment in enumerate(observed.segments):
        counts = (~segment.present).sum(1)
        skipped = int(counts[0])
        text = f"{skipped} of {routable} tokens skip ({skipped / max(routable, 1):.3g})"
        if len(set(counts.tolist())) > 1:
            result, text = FAIL, f"samples differ: {counts.tolist()} of {routable} tokens skip"
        elif route is not None and number < len(route.segments):
            result, meaning = _meaning_of_rate(skipped, routable, route.segments[number].rate)
            text += f": {meaning}"
            if meaning.endswith(_IS_NEITHER) and not protected.any():
                text += "; text or class tokens? state protect="
        else:
            result = PASS
        results.add(result)
        descriptions.append(text)
    result = next(each for each in (FAIL, PASS, NOT_APPLICABLE) if each in results)
    return result, "; ".join(descriptions)


def _meaning_of_rate(skipped: int, routable: int, stated: float) -> Judgement:
    """Judge whether a stated rate counts the tokens that skip.

    Either share may be off by less than one token, as implementations round differently.
    """
    counts_skipped = abs(skipped - stated * routable) < 1
    counts_kept = abs(skipped - (1 - stated) * routable) < 1
    if counts_skipped and counts_kept:
        return NOT_APPLICABLE, (
            f"{stated:g} of {routable} is as many skipped as kept, to one token; check at a rate "
            "such as 0.75 to tell which of them it counts"
        )
    if counts_skipped:
        return PASS, f"{stated:g} counts the tokens that skip, as in TREAD"
    if counts_kept:
        return FAIL, f"{stated:g} counts the tokens that are KEPT; TREAD counts those that skip"
    return FAIL, f"{stated:g} {_IS_NEITHER}"


def arrives_bit_for_bit(passes: Sequence[ObservedPass]) -> Judgement:
    """Whether tokens that skipped come back unchanged, at their places."""
    if not any(each.segments for each in passes):
        return NOT_APPLICABLE, NO_ROUTE
    total = Arrival()
    for arrival in (each.arrival for each in passes):
        total.bypassed += arrival.bypassed
        total.exact += arrival.exact
        total.lost += arrival.lost
        total.misplaced += arrival.misplaced
        total.stayed_changed += arrival.stayed_changed
        total.largest_change = max(total.largest_change, arrival.largest_change)
    evidence = f"{total.exact} of {total.bypassed} skipped tokens came back exactly"
    if total.exact == total.bypassed and not total.stayed_changed:
        return PASS, f"{evidence}, each at its place ({len(passes)} passes)"
    if total.misplaced:
        evidence += f", {total.misplaced} at another place"
    if total.lost:
        evidence += f", {total.lost} lost or unrecognisable"
    if total.exact < total.bypassed:
        evidence += f"; largest change of a feature {total.largest_change:.3g}"
    if total.stayed_changed:
        evidence += f"; {total.stayed_changed} tokens that had stayed were changed or moved too"
    return FAIL, evidence


def order_preserved(
    model: RoutedModel,
    passes: Sequence[ObservedPass],
    tables_gathered: bool,
    scans: tuple[Sequence[int], str],
) -> Judgement:
    """Whether blocks see the tokens that stay in ascending order, and scan them along their path.

    Args:
        model: The model.
        passes: Its passes in training.
        tables_gathered: Positional tables are gathered with their tokens, so that attention does
            not depend on the order.
        scans: The blocks whose scans were compared, and what is wrong with one of them.
    """
    if not any(each.segments for each in passes):
        return NOT_APPLICABLE, NO_ROUTE
    problem = _order_problem(passes)
    if not problem:
        scanning, scan_problem = scans
        evidence = "blocks of the route saw their tokens in ascending order"
        if scan_problem:
            return FAIL, f"{evidence}, but {scan_problem}"
        if scanning:
            evidence += f"; {len(scanning)} of them scan along the same path as with all tokens"
        return PASS, evidence
    if not model.ordered:
        return NOT_APPLICABLE, f"{problem}, which makes no difference to them (ordered=False)"
    if tables_gathered:
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
    for segment in segments_of(passes):
        for rows in segment.rows:
            for leaf in tree_leaves((rows.args, rows.kwargs)):
                if isinstance(leaf, Layout) and leaf.shuffle is not None:
                    return f"block {rows.block} scans its tokens in a shuffled order"
            for ids in rows.ids:
                order = ids[ids >= 0]
                if bool((order.diff() <= 0).any()):
                    first = ", ".join(map(str, order[:6].tolist()))
                    return f"block {rows.block} saw tokens in the order {first}, ..."
    return ""


def protected_tokens(model: RoutedModel, passes: Sequence[ObservedPass]) -> Judgement:
    """Whether tokens that must not skip were seen by all blocks."""
    positions: set[int] = set()
    skipped: set[int] = set()
    text_lengths: set[int] = set()
    for observed in passes:
        protected = model.protected(observed.batch, observed.tokens)
        positions.update(_indices(protected.any(0)))
        lengths: set[int] = set()  # of the text in this pass; another pass may have longer prompts
        for rows in observed.marked.rows:
            if rows.block == model.depth:
                continue  # what follows the last block
            text = argument_of(model, rows, TEXT)
            if isinstance(text, Tensor) and text.dim() == 3:
                lengths.add(text.shape[1])
            missing = protected & ~rows.present(observed.tokens)
            skipped.update(_indices(missing.any(0)))
        if len(lengths) > 1:
            counts = " and ".join(map(str, sorted(lengths)))
            return FAIL, f"blocks got {counts} rows of {TEXT}: text is routed too"
        text_lengths |= lengths
    if skipped:
        return FAIL, f"positions {_shortened(sorted(skipped))} skipped blocks"
    reached = []
    if positions:
        reached.append(f"positions {_shortened(sorted(positions))}")
    if text_lengths:
        counts = " or ".join(map(str, sorted(text_lengths)))
        reached.append(f"all {counts} rows of {TEXT}")
    if not reached:
        return NOT_APPLICABLE, f"none stated (protect=), no argument {TEXT}"
    return PASS, f"{' and '.join(reached)} reached every block"


def argument_of(model: RoutedModel, rows: BlockInput, name: str) -> Any:
    """Return an argument of a block's call by its name, however it was passed; None if absent."""
    return Call(model.signatures[rows.block], rows.args, rows.kwargs).get(name)


def _indices(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def _shortened(positions: Sequence[int]) -> str:
    shown = ", ".join(map(str, positions[:6]))
    return f"{shown}, ... ({len(positions)} in all)" if len(positions) > 6 else shown


def gradient_reaches_bypass(observed: ObservedPass) -> Judgement:
    """Whether a skipped token has the same gradient before and after the route."""
    if not observed.segments:
        return NOT_APPLICABLE, NO_ROUTE
    totals, exact, reached = 0, 0, 0
    for arrived, back in observed.returns:
        token = arrived.ids.clamp(min=0)
        rows = back.gather(1, token) & (arrived.ids >= 0)
        count = int(rows.sum())
        totals += count
        if not count or not arrived.x.requires_grad:
            continue
        (gradient,) = torch.autograd.grad(
            arrived.x[rows].sum(), observed.marked.entry, retain_graph=True, allow_unused=True
        )
        if gradient is None:
            continue
        reached += int((gradient[back] != 0).any(-1).sum())
        exact += int((gradient[back] == 1).all(-1).sum())
    if not totals:
        return NOT_APPLICABLE, "no skipped token can be recognised after the route"
    evidence = f"{exact} of {totals} skipped tokens pass the gradient on unchanged"
    if exact < totals:
        evidence += f", {totals - reached} pass none on"
    return PASS if exact == totals else FAIL, evidence


def samples_differ(model: RoutedModel, passes: Sequence[ObservedPass]) -> Judgement:
    """Whether the samples of a batch keep different tokens."""
    subsets = [each.segments[0].present for each in passes if each.segments]
    if not subsets:
        return NOT_APPLICABLE, NO_ROUTE
    if len(subsets[0]) < 2:
        return NOT_APPLICABLE, "a batch of one sample"
    equal = [bool((present == present[:1]).all()) for present in subsets]
    evidence = f"the samples of a batch kept the same tokens in {sum(equal)} of {len(equal)} passes"
    if model.shared:
        result = NOT_APPLICABLE if all(equal) else FAIL
        return result, f"{evidence}; shared=True: they are meant to"
    if all(equal):
        meant = "if that is meant, as with one rotary table for the batch, state shared=True"
        return FAIL, f"{evidence}; {meant}"
    return PASS, evidence


def steps_differ(passes: Sequence[ObservedPass]) -> Judgement:
    """Whether passes with the same number of tokens draw different subsets."""
    subsets = [each.segments[0].present for each in passes if each.segments]
    if not subsets:
        return NOT_APPLICABLE, NO_ROUTE
    distinct: list[Tensor] = []
    for present in subsets:
        if not any(torch.equal(present, other) for other in distinct):
            distinct.append(present)
    evidence = f"{len(distinct)} different subsets in {len(subsets)} passes"
    shapes = {present.shape for present in subsets}
    if len(distinct) > len(shapes):
        return PASS, evidence
    if len(shapes) == len(subsets) > 1:
        return NOT_APPLICABLE, "no two passes have the same number of tokens"
    return FAIL, evidence


def restart_repeats(
    passes: Sequence[ObservedPass],
    again: Sequence[ObservedPass],
    other_seed: Sequence[ObservedPass] | None,
) -> Judgement:
    """Whether the subsets repeat after a restart with the same seed, and not with another one."""
    if not any(each.segments for each in passes):
        return NOT_APPLICABLE, NO_ROUTE
    repeated = _equal_passes(passes, again)
    evidence = f"{repeated} of {len(passes)} passes repeat their subsets after a restart"
    if repeated < len(passes):
        return FAIL, (
            f"{evidence} with the same seed, while other code draws from torch's global "
            "generator: they depend on something that the seed does not determine"
        )
    if other_seed is None:
        return PASS, evidence
    same = _equal_passes(passes, other_seed)
    evidence += f", {same} with another seed"
    return FAIL if same == len(passes) else PASS, evidence


def _equal_passes(passes: Sequence[ObservedPass], others: Sequence[ObservedPass]) -> int:
    equal = 0
    for one, other in zip(passes, others, strict=True):
        pairs = list(zip(one.segments, other.segments, strict=False))
        same_length = len(one.segments) == len(other.segments)
        equal += same_length and all(torch.equal(a.present, b.present) for a, b in pairs)
    return equal


def evaluation_dense(model: RoutedModel, evaluation: ObservedPass | None) -> Judgement:
    """Whether all blocks see all tokens in evaluation."""
    if evaluation is None:
        return NOT_APPLICABLE, "no evaluate= given"
    if evaluation.segments:
        return FAIL, f"in evaluation, {_who_saw_what(evaluation, model.depth)}"
    blocks = len({rows.block for rows in evaluation.marked.rows if rows.block < model.depth})
    return PASS, f"all {blocks} blocks saw all {evaluation.tokens} tokens"


def evaluation_equal(outputs: tuple[Any, Any, Any] | None) -> Judgement:
    """Whether evaluation is bitwise that of the model without routing.

    Args:
        outputs: Of `evaluate`, twice, and of `dense`; None if they were not given.
    """
    if outputs is None:
        return NOT_APPLICABLE, "no dense= given"
    once, twice, dense = (
        [x for x in tree_leaves(output) if isinstance(x, Tensor)] for output in outputs
    )
    if _largest_difference(once, twice) != 0:
        return FAIL, (
            "two evaluations of one input differ: is routing (see dense evaluation) or dropout "
            "still active?"
        )
    difference = _largest_difference(once, dense)
    evidence = f"largest difference from the model without routing: {difference:g}"
    return PASS if difference == 0 else FAIL, evidence


def _largest_difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference of two outputs; NaN where they hold NaN or differ in shape."""
    if not some or [x.shape for x in some] != [x.shape for x in others]:
        return float("nan")
    differences = [
        (a.detach().double() - b.detach().double()).abs().max()
        for a, b in zip(some, others, strict=True)
    ]
    return float(torch.stack(differences).max())
