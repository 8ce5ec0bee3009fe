"""From marked passes to what routing did: which blocks each token skipped, and how it came back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from routing.check.marks import BlockInput, MarkedPass, bit_channel
from routing.check.subject import CheckError


@dataclass
class ObservedSegment:
    """Consecutive blocks that saw the same part of the tokens.

    Attributes:
        start, end: First and last of these blocks.
        present: Which tokens they saw, bool `(B, T)`.
        rows: What each of them was called with.
    """

    start: int
    end: int
    present: Tensor
    rows: list[BlockInput]


@dataclass
class Arrival:
    """How tokens came out of routes.

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
        returns: Where tokens came back, and which ones, bool `(B, T)`.
    """

    marked: MarkedPass
    segments: list[ObservedSegment] = field(default_factory=list)
    arrival: Arrival = field(default_factory=Arrival)
    returns: list[tuple[BlockInput, Tensor]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens T of the complete sequence."""
        return self.marked.tokens

    @property
    def batch(self) -> int:
        """Number of samples B."""
        return self.marked.batch

    @property
    def shape(self) -> torch.Size:
        """Shape `(B, T, D)` of the complete sequence."""
        return self.marked.entry.shape


def observe(marked: MarkedPass, depth: int) -> ObservedPass:
    """Return what routing did in a pass of a model with that many blocks.

    Raises:
        CheckError: If the end of a route cannot be seen, or the model changes tokens between two
            blocks where no route ends.
    """
    tracker = _Tracker(marked, depth)
    for rows in marked.rows:
        tracker.follow(rows)
    return tracker.finish()


class _Tracker:
    """Follows every token from block to block.

    Attributes:
        features: Last known features of each token, `(B, T, D)`.
        skipping: Which tokens have skipped a block and are not back yet, bool `(B, T)`.
        gone: Which tokens were lost after a route.
    """

    def __init__(self, marked: MarkedPass, depth: int) -> None:
        self.depth = depth
        self.result = ObservedPass(marked)
        self.features = marked.entry.detach().clone()
        shape = self.features.shape[:2]
        self.skipping = torch.zeros(shape, dtype=torch.bool, device=self.features.device)
        self.gone = self.skipping.clone()
        self.before: BlockInput | None = None

    def follow(self, rows: BlockInput) -> None:
        """Take in what the next block was called with."""
        place = _Placement(rows, self.result.tokens, self.gone)
        exact = place.present & (place.features == self.features).all(-1) & place.in_place
        back = self.skipping & (place.present | place.is_full)
        if bool(back.any()):
            self._count_back(back, exact, place, rows)
        self._compare_stayed(back, exact, place, rows)
        self.gone |= place.is_full & ~place.present
        self.skipping &= ~back
        if rows.block < self.depth:
            sparse = not place.is_full and not bool((place.present | self.gone).all())
            self._extend_segments(rows, place.present.cpu(), sparse)
            if sparse:
                self.skipping |= ~place.present & ~self.gone
            self._store_outputs(rows, place)
        self.before = rows

    def finish(self) -> ObservedPass:
        """Return the result, once all blocks were followed."""
        missing = int(self.skipping.sum())
        if missing and (self.before is None or self.before.block < self.depth or not self.seen_end):
            raise CheckError(
                f"a route ends with the last block {self.depth - 1}, and what follows is not seen; "
                "pass after= with a module that is called with all tokens, such as a final norm"
            )
        self.result.arrival.bypassed += missing
        self.result.arrival.lost += missing
        return self.result

    @property
    def seen_end(self) -> bool:
        """Whether the last rows are the argument of `after`, not the output of the last block."""
        return self.before is not None and bool(self.before.args or self.before.kwargs)

    def _count_back(self, back: Tensor, exact: Tensor, place: _Placement, rows: BlockInput) -> None:
        """Count how tokens come back that had skipped blocks."""
        arrival = self.result.arrival
        arrival.bypassed += int(back.sum())
        arrival.exact += int((back & exact).sum())
        arrival.misplaced += int((back & place.present & ~place.in_place).sum())
        arrival.lost += int((back & ~place.present).sum())
        changed = back & ~exact
        if bool(changed.any()):
            difference = (place.at_home(rows) - self.features).abs().amax(-1)[changed]
            arrival.largest_change = max(arrival.largest_change, float(difference.max()))
        self.result.returns.append((rows, back))

    def _compare_stayed(
        self, back: Tensor, exact: Tensor, place: _Placement, rows: BlockInput
    ) -> None:
        """Count tokens that were processed by the block before and do not arrive as they left."""
        was_there = ~self.skipping & ~self.gone & (place.present | place.is_full)
        changed = was_there & ~exact
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
            where = f"between block {self.before.block} and block {rows.block}"
            advice = " (a skip connection, a norm), and cannot be followed there"
        unchanged = place.present & (place.features == self.features).all(-1)
        if bool(unchanged[changed].all()):
            raise CheckError(
                f"the model reorders its tokens {where}, for example by a flip that reverses the "
                "next block's scan, and routing needs every token at the same place throughout; "
                "let each block reorder its input and put its output back in order"
            )
        raise CheckError(f"the model changes its tokens {where}{advice}")

    def _extend_segments(self, rows: BlockInput, present: Tensor, sparse: bool) -> None:
        """Note the block as part of a segment, if it saw only a part of the tokens."""
        if not sparse:
            return
        segments = self.result.segments
        last = segments[-1] if segments else None
        follows = last is not None and last.rows[-1] is self.before
        if last is not None and follows and torch.equal(last.present, present):
            last.end = rows.block
            last.rows.append(rows)
        else:
            segments.append(ObservedSegment(rows.block, rows.block, present, [rows]))

    def _store_outputs(self, rows: BlockInput, place: _Placement) -> None:
        """Note the features of tokens after a block: its input, with its bit set."""
        features = place.features.clone()
        channel, value = bit_channel(rows.block)
        features[..., channel] += value
        self.features = torch.where(place.present.unsqueeze(-1), features, self.features)


class _Placement:
    """Where each token is in one call.

    Attributes:
        present: Which tokens are there, bool `(B, T)`.
        features: Their features `(B, T, D)`, anything where they are not.
        is_full: Whether this is the complete sequence, perhaps with text around it.
        in_place: Whether a token is at its place, and once; always for part of the sequence.
    """

    def __init__(self, rows: BlockInput, tokens: int, gone: Tensor) -> None:
        batch, length = rows.ids.shape
        column = torch.arange(length, device=rows.ids.device).expand(batch, length)
        filled = torch.full((batch, tokens + 1), -1, device=rows.ids.device)
        self.columns = filled.scatter(1, rows.ids + 1, column)[:, 1:]
        counts = filled.zero_().scatter_add(1, rows.ids + 1, torch.ones_like(rows.ids))[:, 1:]
        self.present = self.columns >= 0
        index = self.columns.clamp(min=0).unsqueeze(-1).expand(-1, -1, rows.x.shape[-1])
        self.features = rows.x.detach().gather(1, index)
        differences = (column - rows.ids)[rows.ids >= 0]
        self.offset = 0 if length == tokens else _most_common(differences, length - tokens)
        aligned = bool((differences == self.offset).all())
        enough = self.offset >= 0 and length >= self.offset + tokens
        complete = bool((self.present | gone).all())
        self.is_full = complete or length == tokens or (aligned and enough)
        home = torch.arange(tokens, device=rows.ids.device) + self.offset
        self.in_place = counts <= 1
        if self.is_full:
            self.in_place = self.in_place & (self.columns == home)
        self.home = home.clamp(0, length - 1)

    def at_home(self, rows: BlockInput) -> Tensor:
        """Return what is at each token's place, `(B, T, D)`; the token itself in a part."""
        return rows.x.detach()[:, self.home] if self.is_full else self.features


def _most_common(values: Tensor, otherwise: int) -> int:
    return int(values.mode().values) if len(values) else otherwise
