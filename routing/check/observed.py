"""From marked passes to what routing did: which blocks each token skipped, and how it came back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from routing.check.marks import BlockInput, MarkedPass, bit_channel
from routing.check.subject import CheckError, RoutedModel


@dataclass
class ObservedSegment:
    """Consecutive blocks that saw the same part of the tokens.

    Attributes:
        start, end: First and last of these blocks.
        present: Which tokens they saw, bool `(B, T)`.
        inputs: What each of them was called with.
    """

    start: int
    end: int
    present: Tensor
    inputs: list[BlockInput]


@dataclass
class Arrival:
    """How tokens came out of the routes of one or several passes.

    Attributes:
        bypassed: How many tokens had skipped, of all samples and segments.
        exact: How many of them came back to their place with the features they had.
        lost: How many did not come back, or cannot be recognised.
        misplaced: How many came to another place, or twice.
        largest_change: Largest absolute change of a feature at the place of one of them.
        stayed_changed: Tokens that had stayed, and were changed or moved on the way back.
    """

    bypassed: int = 0
    exact: int = 0
    lost: int = 0
    misplaced: int = 0
    largest_change: float = 0.0
    stayed_changed: int = 0


@dataclass
class ObservedPass:
    """What routing did in one pass.

    Attributes:
        marked: The pass.
        segments: Its segments, in the order of the blocks.
        arrival: How the tokens came out of them.
        gradients: Of each skipped token that can be recognised after its route, the gradient of
            its features there with respect to its mark, `(D,)`.
    """

    marked: MarkedPass
    segments: list[ObservedSegment] = field(default_factory=list)
    arrival: Arrival = field(default_factory=Arrival)
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens T of the complete sequence."""
        return self.marked.tokens

    @property
    def shape(self) -> torch.Size:
        """Shape `(B, T, D)` of the complete sequence."""
        return self.marked.entry.shape

    @property
    def spans(self) -> str:
        """First and last block of each segment, such as `1-3, 5-6`; empty without a route."""
        return ", ".join(f"{segment.start}-{segment.end}" for segment in self.segments)

    def routed_inputs(self) -> Iterator[BlockInput]:
        """Return what the blocks of all segments were called with."""
        for segment in self.segments:
            yield from segment.inputs


@dataclass
class ModelRuns:
    """Everything that the runs of a model showed; each property is judged by it.

    Attributes:
        model: The description of the model.
        passes: Passes of training.
        restarted: As many of the model built again with the same seed.
        other_seed: The same with another seed; None if the model takes no seed.
        evaluation: A pass of evaluation; None without `evaluate`.
        outputs: Of `evaluate`, twice, and of `dense`; None if they were not given.
        scans: The blocks whose scans were compared, and what is wrong with one of them.
    """

    model: RoutedModel
    passes: Sequence[ObservedPass]
    restarted: Sequence[ObservedPass]
    other_seed: Sequence[ObservedPass] | None
    evaluation: ObservedPass | None
    outputs: tuple[Any, Any, Any] | None
    scans: tuple[Sequence[int], str]

    @property
    def routed_passes(self) -> list[ObservedPass]:
        """The passes of training in which a block saw fewer tokens."""
        return [observed for observed in self.passes if observed.segments]

    @property
    def subsets(self) -> list[Tensor]:
        """Which tokens stayed in the first segment of each of these passes, bool `(B, T)`."""
        return [observed.segments[0].present for observed in self.routed_passes]

    def arrival(self) -> Arrival:
        """Return how tokens came out of routes in all passes of training."""
        total = Arrival()
        for arrival in (observed.arrival for observed in self.passes):
            total.bypassed += arrival.bypassed
            total.exact += arrival.exact
            total.lost += arrival.lost
            total.misplaced += arrival.misplaced
            total.largest_change = max(total.largest_change, arrival.largest_change)
            total.stayed_changed += arrival.stayed_changed
        return total


def observe(marked: MarkedPass, depth: int) -> ObservedPass:
    """Return what routing did in a pass of a model with that many blocks.

    Call it while the tokens are still marked: a block that is checkpointed runs once more.

    Raises:
        CheckError: If the end of a route cannot be seen, or the model changes tokens between two
            blocks where no route ends.
    """
    tracker = _Tracker(marked, depth)
    for block_input in marked.inputs:
        tracker.follow(block_input)
    return tracker.finish()


class _Tracker:
    """Follows every token from block to block.

    Attributes:
        features: Last known features of each token, `(B, T, D)`.
        skipping: Which tokens have skipped a block and are not back yet, bool `(B, T)`.
        gone: Which tokens were lost after a route.
        before: What the block before was called with.
    """

    def __init__(self, marked: MarkedPass, depth: int) -> None:
        self.depth = depth
        self.result = ObservedPass(marked)
        self.features = marked.entry.detach().clone()
        shape = self.features.shape[:2]
        self.skipping = torch.zeros(shape, dtype=torch.bool, device=self.features.device)
        self.gone = self.skipping.clone()
        self.before: BlockInput | None = None

    def follow(self, block_input: BlockInput) -> None:
        """Take in what the next block was called with."""
        placement = _Placement(block_input, self.result.tokens, self.gone)
        present, is_full = placement.present, placement.is_full
        unchanged = present & (placement.features == self.features).all(-1)
        back = self.skipping & (present | is_full)
        if bool(back.any()):
            self._count_back(back, unchanged, placement)
        self._compare_stayed(back, unchanged, placement)
        self.gone |= is_full & ~present
        self.skipping &= ~back
        if block_input.block < self.depth:
            if not is_full and not bool((present | self.gone).all()):
                self._extend_segments(block_input, present.cpu())
                self.skipping |= ~present & ~self.gone
            self._store_outputs(placement)
        self.before = block_input

    def finish(self) -> ObservedPass:
        """Return the result, once all blocks were followed."""
        last, missing = self.before, int(self.skipping.sum())
        # Without `after=`, the output of the last block may be read before tokens return to it.
        is_end = last is not None and last.block == self.depth and last.call is not None
        if missing and not is_end:
            raise CheckError(
                f"a route ends with the last block {self.depth - 1}, and what follows is not seen; "
                "pass after= with a module that is called with all tokens, such as a final norm"
            )
        self.result.arrival.bypassed += missing
        self.result.arrival.lost += missing
        return self.result

    def _count_back(self, back: Tensor, unchanged: Tensor, placement: _Placement) -> None:
        """Count how tokens come back that had skipped blocks, and take their gradients."""
        arrival = self.result.arrival
        exact = unchanged & placement.in_place
        arrival.bypassed += int(back.sum())
        arrival.exact += int((back & exact).sum())
        arrival.misplaced += int((back & placement.present & ~placement.in_place).sum())
        arrival.lost += int((back & ~placement.present).sum())
        changed = back & ~exact
        if bool(changed.any()):
            difference = (placement.at_home() - self.features).abs().amax(-1)[changed]
            arrival.largest_change = max(arrival.largest_change, float(difference.max()))
        self.result.gradients.extend(self._gradients(back & placement.present, placement))

    def _gradients(self, recognised: Tensor, placement: _Placement) -> Tensor:
        """Return the gradient of each of these tokens with respect to its mark, `(n, D)`."""
        sample, token = recognised.nonzero(as_tuple=True)
        arrived = placement.block_input.x[sample, placement.columns[sample, token]]
        if not arrived.requires_grad:
            return torch.zeros_like(arrived)
        (gradient,) = torch.autograd.grad(
            arrived.sum(), self.result.marked.entry, retain_graph=True, materialize_grads=True
        )
        return gradient[sample, token]

    def _compare_stayed(self, back: Tensor, unchanged: Tensor, placement: _Placement) -> None:
        """Count tokens that were processed by the block before and do not arrive as they left."""
        was_there = ~self.skipping & ~self.gone & (placement.present | placement.is_full)
        changed = was_there & ~(unchanged & placement.in_place)
        if not bool(changed.any()):
            return
        arrival = self.result.arrival
        if bool(back.any()):
            arrival.stayed_changed += int(changed.sum())
            return
        if arrival.exact < arrival.bypassed or arrival.stayed_changed:
            return  # a place that is wrong after one route is wrong in all later blocks
        if self.before is None:
            where = "between before= and its first block"
            advice = "; pass a module that is called with what the first block gets"
        else:
            where = f"between block {self.before.block} and block {placement.block_input.block}"
            advice = " (a skip connection, a norm), and cannot be followed there"
        if bool(unchanged[changed].all()):
            raise CheckError(
                f"the model reorders its tokens {where}, for example by a flip that reverses the "
                "next block's scan, and routing needs every token at the same place throughout; "
                "let each block reorder its input and put its output back in order"
            )
        raise CheckError(f"the model changes its tokens {where}{advice}")

    def _extend_segments(self, block_input: BlockInput, present: Tensor) -> None:
        """Note a block that saw only these tokens, bool `(B, T)`, as part of a segment."""
        segments, block = self.result.segments, block_input.block
        last = segments[-1] if segments and segments[-1].inputs[-1] is self.before else None
        if last is not None and torch.equal(last.present, present):
            last.end = block
            last.inputs.append(block_input)
        else:
            segments.append(ObservedSegment(block, block, present, [block_input]))

    def _store_outputs(self, placement: _Placement) -> None:
        """Note the features of tokens after a block: its input, with its bit set."""
        features = placement.features.clone()
        channel, value = bit_channel(placement.block_input.block)
        features[..., channel] += value
        self.features = torch.where(placement.present.unsqueeze(-1), features, self.features)


class _Placement:
    """Where each token is in one call.

    Attributes:
        block_input: The call.
        columns: Where each token is in the sequence, `(B, T)`; -1 where it is not.
        present: Which tokens are there, bool `(B, T)`.
        features: Their features `(B, T, D)`, anything where they are not.
        is_full: Whether this is the complete sequence, perhaps with text around it.
        in_place: Whether a token is at its place, and once; always for part of the sequence.
    """

    def __init__(self, block_input: BlockInput, tokens: int, gone: Tensor) -> None:
        self.block_input = block_input
        ids = block_input.ids
        batch, length = ids.shape
        self.columns = block_input.columns(tokens).to(ids.device)
        none = torch.zeros(batch, tokens + 1, dtype=ids.dtype, device=ids.device)
        counts = none.scatter_add(1, ids + 1, torch.ones_like(ids))[:, 1:]
        self.present = self.columns >= 0
        index = self.columns.clamp(min=0).unsqueeze(-1).expand(-1, -1, block_input.x.shape[-1])
        self.features = block_input.x.detach().gather(1, index)
        differences = (torch.arange(length, device=ids.device) - ids)[ids >= 0]
        offset = 0 if length == tokens else _most_common(differences, length - tokens)
        aligned = bool((differences == offset).all())
        enough = offset >= 0 and length >= offset + tokens
        complete = bool((self.present | gone).all())
        self.is_full = complete or length == tokens or (aligned and enough)
        home = torch.arange(tokens, device=ids.device) + offset
        self.in_place = counts <= 1
        if self.is_full:
            self.in_place = self.in_place & (self.columns == home)
        self.home = home.clamp(0, length - 1)

    def at_home(self) -> Tensor:
        """Return what is at each token's place, `(B, T, D)`; the token itself in a part."""
        return self.block_input.x.detach()[:, self.home] if self.is_full else self.features


def _most_common(values: Tensor, otherwise: int) -> int:
    return int(values.mode().values) if len(values) else otherwise
