"""What routing does in a pass: every token is marked, and tells which blocks saw it.

A mark is a row of features: a constant that identifies marked rows, the token's position, its
sample, a bit for each block that saw it, and noise, so that a rounding or a product is seen too.
The marks are put in before the first block. Blocks run as they are, then their output for a marked
row is replaced by its input with the block's bit set. So what arrives at a block says exactly what
happened between blocks: which tokens it saw, and how those that skipped came back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from routing.attached.calls import Call, Signature, replace_rows
from routing.attached.passes import recomputing
from routing.attached.positions import Dependence
from routing.check.report import CheckError, RoutedModel
from routing.errors import require
from routing.layout import Layout


class Marks:
    """The features of marked tokens of one shape and type; all are whole numbers but the noise.

    Args:
        shape: Of the sequence, `(B, T, D)`.
        dtype: Of its features. A channel holds 20 bits in float32, 7 in half precision.
        depth: Number of blocks.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, depth: int) -> None:
        self.batch, self.tokens, self.width = shape
        require(
            dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16),
            f"tokens are {dtype}, and marks need floating point numbers of 16 bits or more",
            CheckError,
        )
        half = dtype in (torch.bfloat16, torch.float16)
        self.bits, self.constant = (7, -216.0) if half else (20, 777.25)
        self.token = 1  # first channel of the position, of the sample, and of the blocks' bits
        self.sample = self.token + self._digits(self.tokens)
        self.block = self.sample + self._digits(self.batch)
        self.noise = self.block + -(-depth // self.bits)
        require(
            self.width > self.noise,
            f"tokens have {self.width} features, and marks of {depth} blocks need {self.noise + 1}",
            CheckError,
        )

    def make(self, x: Tensor) -> Tensor:
        """Return marked tokens of the shape, type and device of x."""
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        marks = noise.to(x.device, x.dtype)
        marks[..., 0] = self.constant
        marks[..., self.block : self.noise] = 0
        numbers = torch.arange(max(self.tokens, self.batch), device=x.device)
        for start, end, count in self._numbers():
            rows = numbers[:count] if start == self.token else numbers[:count, None]
            for channel in range(start, end):
                digit = rows >> self.bits * (channel - start) & (1 << self.bits) - 1
                marks[..., channel] = digit.to(x.dtype)
        return marks

    def ids(self, x: Tensor) -> Tensor:
        """Return which token each row of x `(B, L, D)` is, `(B, L)`; -1 for one without a mark."""
        x = x.detach()
        values = []
        for start, end, _ in self._numbers():
            value = torch.zeros_like(x[..., 0], dtype=torch.float32)
            for channel in range(start, end):
                value += x[..., channel].float() * 2.0 ** (self.bits * (channel - start))
            values.append(value)
        token, sample = values
        own = torch.arange(len(x), device=x.device).unsqueeze(1)
        is_marked = (x[..., 0] == self.constant) & (sample == own)
        is_marked &= (token >= 0) & (token < self.tokens) & (token == token.floor())
        return torch.where(is_marked, token, -torch.ones_like(token)).long()

    def bit(self, block: int, like: Tensor) -> Tensor:
        """Return what is added to the mark of a token that a block saw, `(D,)`."""
        bit = torch.zeros(self.width, device=like.device, dtype=like.dtype)
        bit[self.block + block // self.bits] = 2.0 ** (block % self.bits)
        return bit

    def _digits(self, count: int) -> int:
        """Return how many channels a number below `count` takes."""
        return max(1, -(-(count - 1).bit_length() // self.bits))

    def _numbers(self) -> tuple[tuple[int, int, int], ...]:
        """Return the channels of position and sample, first and past the last, and their counts."""
        return (self.token, self.sample, self.tokens), (self.sample, self.block, self.batch)


@dataclass
class BlockInput:
    """The tokens that one block was called with.

    Attributes:
        block: Index of the block; the depth for the sequence after the last one.
        x: The tokens `(B, L, D)`, with their graph.
        ids: Position of each token in the complete sequence, `(B, L)`; -1 where it is no marked
            token (text, or a token whose features were changed).
        call: All arguments of the call; None for what comes out of the last block.
        handed_on: What is wrong with a value that the block before handed on; empty if nothing.
    """

    block: int
    x: Tensor
    ids: Tensor
    call: Call | None
    handed_on: str = ""

    def argument(self, name: str) -> Any:
        """Return an argument by its name, however it was passed; None if absent."""
        return None if self.call is None else self.call.get(name)

    def layouts(self) -> list[Layout]:
        """Return the layouts of this package among the arguments."""
        arguments = () if self.call is None else (self.call.args, self.call.kwargs)
        return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Layout)]

    def columns(self, tokens: int) -> Tensor:
        """Return where each token is in the sequence, `(B, tokens)` on the CPU; -1 for nowhere."""
        ids = self.ids.cpu()
        nowhere = torch.full((len(ids), tokens + 1), -1)
        return nowhere.scatter(1, ids + 1, torch.arange(ids.shape[1]).expand_as(ids))[:, 1:]

    def present(self, tokens: int) -> Tensor:
        """Return which tokens are there, bool `(B, tokens)` on the CPU."""
        return self.columns(tokens) >= 0


@dataclass
class MarkedPass:
    """What one pass showed.

    Attributes:
        coding: How tokens are marked.
        marks: The marked tokens that went in, `(B, T, D)`, a leaf of the graph.
        inputs: What each block was called with, in the order of the calls; then the sequence
            after the last block, where it could be seen.
    """

    coding: Marks | None = None
    marks: Tensor | None = None
    inputs: list[BlockInput] = field(default_factory=list)

    @property
    def entry(self) -> Tensor:
        """The marked tokens; a `CheckError` if the blocks did not run."""
        if self.marks is None:
            raise CheckError("train() or evaluate() did not run the blocks that were given")
        return self.marks

    @property
    def tokens(self) -> int:
        """Number of tokens T of the complete sequence."""
        return self.entry.shape[1]

    def ids(self, x: Tensor) -> Tensor:
        """Return which token each row of x is; see `Marks.ids`."""
        assert self.coding is not None
        return self.coding.ids(x)


# Sees each call of a block: its index, module, call, ids as in `BlockInput`, and tokens T.
LookAt = Callable[[int, nn.Module, Call, Tensor, int], None]


class Marker:
    """Marks the tokens of a model's passes, through hooks on its blocks.

    The hooks stay as long as the model is checked, idle between passes: a compiled model runs those
    that it was compiled with.

    Args:
        model: The model.
    """

    def __init__(self, model: RoutedModel) -> None:
        self.depth = model.depth
        self.result: MarkedPass | None = None
        self.look_at: LookAt | None = None
        self._places: list[tuple[Any, RemovableHandle, bool]] = []
        entry = model.blocks[0] if model.before is None else model.before
        self._before(entry, partial(self._enter, Signature(entry)), first=True)
        for index, (block, signature) in enumerate(
            zip(model.blocks, model.signatures, strict=True)
        ):
            # Innermost, so that hooks which route have moved the tokens already.
            self._before(block, partial(self._observe, index, signature))
            self._after(block, partial(self._mark_output, index, signature), first=True)
        if model.after is not None:
            last = partial(self._observe, model.depth, Signature(model.after))
            self._before(model.after, last, first=True)
        else:
            self._after(model.blocks[-1], self._leave)

    def remove(self) -> None:
        """Remove the hooks."""
        for _, handle, _ in self._places:
            handle.remove()

    @contextmanager
    def marking(self, look_at: LookAt | None = None) -> Iterator[MarkedPass]:
        """Mark the tokens of the pass that runs meanwhile, and note what the blocks get."""
        for hooks, handle, first in self._places:
            hooks.move_to_end(handle.id, last=not first)  # hooks may have been added meanwhile
        self.result, self.look_at = MarkedPass(), look_at
        try:
            yield self.result
        finally:
            self.result = None

    def _before(self, module: nn.Module, hook: Callable, first: bool = False) -> None:
        hook = torch.compiler.disable(hook)
        handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)
        self._places.append((module._forward_pre_hooks, handle, first))

    def _after(self, module: nn.Module, hook: Callable, first: bool = False) -> None:
        hook = torch.compiler.disable(hook)
        handle = module.register_forward_hook(hook, with_kwargs=True, prepend=first)
        self._places.append((module._forward_hooks, handle, first))

    def _enter(
        self, signature: Signature, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Replace the complete sequence by marked tokens."""
        if self.result is None:
            return None
        call, result = Call(signature, args, kwargs), self.result
        if not recomputing():
            require(
                result.marks is None,
                "the blocks ran twice in one pass; let train() run one forward pass",
                CheckError,
            )
            x = call.tokens
            result.coding = Marks(x.shape, x.dtype, self.depth)
            result.marks = result.coding.make(x).requires_grad_()
        # A leaf may not be changed in place, and some models do that to their input.
        call.tokens = result.entry.clone()
        return call.args, call.kwargs

    def _observe(
        self, block: int, signature: Signature, module: nn.Module, args: tuple,
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        """Note which tokens a block is called with."""
        if self.result is None or recomputing():  # activation checkpointing runs the block again
            return
        x = self._marked_tensor(self.result, (args, kwargs))
        if x is None:
            name, advice = f"block {block}", ""
            if block == self.depth:
                name = "what follows the blocks (after=)"
                advice = "; leave after= out if no route ends with the last block"
            raise CheckError(
                f"no marked token comes into {name}: the model changes its tokens between blocks "
                f"(a skip connection, a norm), and cannot be followed{advice}"
            )
        ids, call = self.result.ids(x), Call(signature, args, kwargs)
        problem = self._handed_on_problem(self.result, call, x, ids)
        self.result.inputs.append(BlockInput(block, x, ids, call, problem))

    def _handed_on_problem(self, result: MarkedPass, call: Call, x: Tensor, ids: Tensor) -> str:
        """Compare what blocks hand on with the tokens beside it, which have the same marks."""
        assert result.coding is not None
        coding = result.coding
        seen = (x[..., coding.block : coding.noise] != 0).any(-1) & (ids >= 0)
        for name in call.signature.carry:
            value = call.get(name)
            if not isinstance(value, Tensor) or not bool(seen.any()):
                continue
            if value.shape != x.shape:
                return f"{name} of shape {tuple(value.shape)} comes with {x.shape[1]} tokens"
            wrong = seen & (value.detach() != x.detach()).any(-1)
            if bool(wrong.any()):
                return f"{name} is that of other tokens for {int(wrong.sum())} of {int(seen.sum())}"
        return ""

    def _mark_output(
        self, block: int, signature: Signature, module: nn.Module, args: tuple,
        kwargs: dict[str, Any], output: Any,
    ) -> Any:  # fmt: skip
        """Replace what a block returned for marked tokens by its input with its bit set."""
        if self.result is None:
            return None
        call, result = Call(signature, args, kwargs), self.result
        x = call.tokens
        ids = result.ids(x)
        if self.look_at is not None and not recomputing():
            self.look_at(block, module, call, ids, result.tokens)
        assert result.coding is not None
        is_marked, marked = (ids >= 0).unsqueeze(-1), x + result.coding.bit(block, x)

        def mark(values: list[Any]) -> list[Any]:
            # Detached: the gradient of an activation that overflowed must not come back as 0 * inf.
            image = torch.where(is_marked, marked, values[0].detach().to(x.dtype))
            others = [v if v is None or v.shape != x.shape else image.to(v.dtype) for v in values]
            return [image, *others[1:]]

        return replace_rows(output, call, mark)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Note the sequence that comes out of the last block and of the hooks on it."""
        if self.result is None or recomputing():
            return
        x = self._marked_tensor(self.result, output)
        if x is not None:
            self.result.inputs.append(BlockInput(self.depth, x, self.result.ids(x), None))

    def _marked_tensor(self, result: MarkedPass, tree: Any) -> Tensor | None:
        """Return the tensor with marked rows among arguments or outputs."""
        batch, _, width = result.entry.shape
        for leaf in tree_leaves(tree):
            is_sequence = isinstance(leaf, Tensor) and leaf.dim() == 3
            if not is_sequence or (len(leaf), leaf.shape[-1]) != (batch, width):
                continue
            if bool((result.ids(leaf) >= 0).any()):
                return leaf
        return None


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
        index_use: For each block that was examined in a route, how it depends on the index of its
            tokens.
        ranks: Which tokens stayed in the passes of each process; None if there is only one.
    """

    model: RoutedModel
    passes: Sequence[ObservedPass]
    restarted: Sequence[ObservedPass]
    other_seed: Sequence[ObservedPass] | None
    evaluation: ObservedPass | None
    outputs: tuple[Any, Any, Any] | None
    scans: tuple[Sequence[int], str]
    index_use: Mapping[int, Dependence | None]
    ranks: Sequence[Sequence[Tensor]] | None

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
        coding = self.result.marked.coding
        assert coding is not None
        features = placement.features + coding.bit(placement.block_input.block, placement.features)
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
        self.in_place = torch.ones_like(self.present)
        if self.is_full:
            self.in_place = (counts <= 1) & (self.columns == home)
        self.home = home.clamp(0, length - 1)

    def at_home(self) -> Tensor:
        """Return what is at each token's place, `(B, T, D)`; the token itself in a part."""
        return self.block_input.x.detach()[:, self.home] if self.is_full else self.features


def _most_common(values: Tensor, otherwise: int) -> int:
    return int(values.mode().values) if len(values) else otherwise
