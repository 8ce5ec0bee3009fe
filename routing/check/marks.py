"""Marked tokens: in a marked pass, each token tells which one it is and which blocks saw it.

A mark is a row of features. Channel 0 holds a constant that identifies marked rows, channel 1 the
token's position, channel 2 the sample, the next ones a bit for each block that saw it, and the rest
noise, so that a rounding or a product is seen too. The marks are put in before the first block.
Blocks run as they are, then their output for a marked row is replaced by its input with the block's
bit set. So what arrives at a block says exactly what happened between blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from routing.attached.calls import Call, Signature, replace_rows
from routing.attached.passes import recomputing
from routing.check.subject import CheckError, RoutedModel
from routing.errors import require
from routing.layout import Layout

_CONSTANT = 777.25
_TOKEN, _SAMPLE, _BITS = 1, 2, 3
_BITS_PER_CHANNEL = 20  # exact in float32


@dataclass
class BlockInput:
    """The tokens that one block was called with.

    Attributes:
        block: Index of the block; the depth for the sequence after the last one.
        x: The tokens `(B, L, D)`, with their graph.
        ids: Position of each token in the complete sequence, `(B, L)`; -1 where it is no marked
            token (text, or a token whose features were changed).
        call: All arguments of the call; None for what comes out of the last block.
    """

    block: int
    x: Tensor
    ids: Tensor
    call: Call | None

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
        marks: The marked tokens that went in, `(B, T, D)`, a leaf of the graph.
        inputs: What each block was called with, in the order of the calls; then the sequence
            after the last block, where it could be seen.
    """

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


def bit_channel(block: int) -> tuple[int, float]:
    """Return the channel of a block's bit, and its value."""
    return _BITS + block // _BITS_PER_CHANNEL, float(2 ** (block % _BITS_PER_CHANNEL))


def make_marks(x: Tensor, depth: int) -> Tensor:
    """Return marked tokens of the shape of x, `(B, T, D)`."""
    batch, tokens, width = x.shape
    needed = bit_channel(depth - 1)[0] + 2
    require(
        width >= needed,
        f"tokens have {width} features, and marks of {depth} blocks need {needed}",
        CheckError,
    )
    require(
        x.dtype in (torch.float32, torch.float64),
        f"tokens are {x.dtype}, and marks need float32; run the check in float32",
        CheckError,
    )
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    marks = noise.to(x.device, x.dtype)
    marks[..., 0] = _CONSTANT
    marks[..., _TOKEN] = torch.arange(tokens, device=x.device, dtype=x.dtype)
    marks[..., _SAMPLE] = torch.arange(batch, device=x.device, dtype=x.dtype).unsqueeze(1)
    marks[..., _BITS : needed - 1] = 0
    return marks


def read_ids(x: Tensor, tokens: int) -> Tensor:
    """Return which token each row of x `(B, L, D)` is, `(B, L)`; -1 for rows without a mark."""
    token = x[..., _TOKEN].detach()
    sample = torch.arange(len(x), device=x.device).unsqueeze(1)
    is_marked = (x[..., 0] == _CONSTANT) & (x[..., _SAMPLE] == sample)
    is_marked &= (token >= 0) & (token < tokens) & (token == token.floor())
    return torch.where(is_marked, token, -torch.ones_like(token)).long()


# Sees each call of a block: its index, module, call, ids as in `BlockInput`, and tokens T.
LookAt = Callable[[int, nn.Module, Call, Tensor, int], None]


@contextmanager
def marked_tokens(model: RoutedModel, look_at: LookAt | None = None) -> Iterator[MarkedPass]:
    """Mark the tokens of the pass that runs meanwhile, and note what the blocks are called with."""
    observer = _Observer(model, look_at)
    entry = model.blocks[0] if model.before is None else model.before
    enter = partial(observer.enter, Signature(entry))
    handles = [entry.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)]
    for index, (block, signature) in enumerate(zip(model.blocks, model.signatures, strict=True)):
        # Innermost, so that hooks which route have moved the tokens already.
        observe = partial(observer.observe, index, signature)
        mark_output = partial(observer.mark_output, index, signature)
        handles.append(block.register_forward_pre_hook(observe, with_kwargs=True))
        handles.append(block.register_forward_hook(mark_output, with_kwargs=True, prepend=True))
    if model.after is not None:
        observe = partial(observer.observe, model.depth, Signature(model.after))
        handles.append(
            model.after.register_forward_pre_hook(observe, with_kwargs=True, prepend=True)
        )
    else:
        handles.append(model.blocks[-1].register_forward_hook(observer.leave))
    try:
        yield observer.result
    finally:
        for handle in handles:
            handle.remove()


class _Observer:
    """The hooks of one marked pass."""

    def __init__(self, model: RoutedModel, look_at: LookAt | None) -> None:
        self.depth, self.look_at = model.depth, look_at
        self.result = MarkedPass()

    def enter(
        self, signature: Signature, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Replace the complete sequence by marked tokens."""
        call = Call(signature, args, kwargs)
        if not recomputing():
            require(
                self.result.marks is None,
                "the blocks ran twice in one pass; let train() run one forward pass",
                CheckError,
            )
            self.result.marks = make_marks(call.tokens, self.depth).requires_grad_()
        # A leaf may not be changed in place, and some models do that to their input.
        call.tokens = self.result.entry.clone()
        return call.args, call.kwargs

    def observe(
        self, block: int, signature: Signature, module: nn.Module, args: tuple,
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        """Note which tokens a block is called with."""
        if recomputing():  # activation checkpointing runs the block again
            return
        x = self._marked_tensor((args, kwargs))
        if x is None:
            name = "what follows the blocks" if block == self.depth else f"block {block}"
            raise CheckError(
                f"no marked token comes into {name}: the model changes its tokens between blocks "
                "(a skip connection, a norm), and cannot be followed"
            )
        ids = read_ids(x, self.result.tokens)
        self.result.inputs.append(BlockInput(block, x, ids, Call(signature, args, kwargs)))

    def mark_output(
        self, block: int, signature: Signature, module: nn.Module, args: tuple,
        kwargs: dict[str, Any], output: Any,
    ) -> Any:  # fmt: skip
        """Replace what a block returned for marked tokens by its input with its bit set."""
        call = Call(signature, args, kwargs)
        x = call.tokens
        ids = read_ids(x, self.result.tokens)
        if self.look_at is not None and not recomputing():
            self.look_at(block, module, call, ids, self.result.tokens)
        is_marked = (ids >= 0).unsqueeze(-1)
        bit = torch.zeros(x.shape[-1], device=x.device, dtype=x.dtype)
        channel, value = bit_channel(block)
        bit[channel] = value
        # Detached: the gradient of an activation that overflowed must not come back as 0 * inf.
        return replace_rows(
            output,
            call,
            lambda values: [torch.where(is_marked, x + bit, values[0].detach().to(x.dtype))],
        )

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Note the sequence that comes out of the last block and of the hooks on it."""
        if recomputing():  # activation checkpointing runs the block again
            return
        x = self._marked_tensor(output)
        if x is not None:
            ids = read_ids(x, self.result.tokens)
            self.result.inputs.append(BlockInput(self.depth, x, ids, None))

    def _marked_tensor(self, tree: Any) -> Tensor | None:
        """Return the tensor with marked rows among arguments or outputs."""
        batch, tokens, width = self.result.entry.shape
        for leaf in tree_leaves(tree):
            is_sequence = isinstance(leaf, Tensor) and leaf.dim() == 3
            if is_sequence and (len(leaf), leaf.shape[-1]) == (batch, width):
                is_marked = read_ids(leaf, tokens) >= 0
                if bool(is_marked.any()):
                    return leaf
        return None
