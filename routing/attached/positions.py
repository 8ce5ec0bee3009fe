"""Which arguments of a block have a row for each token, and whether it places tokens by index.

In a route a block gets fewer tokens. A rotary table that it slices itself, `self.cos[:x.shape[1]]`,
a window or a learned position would then belong to other tokens, without an error. The outputs
cannot tell (a block whose gate is still zero passes everything), so the operations do. The block
runs without gradients on a number of tokens n that is no other size in it, and each tensor is
labelled:

    tokens      computed from the tokens or from an argument with a row for each of them
    a source    has a dimension of n but comes from neither: a position by index
    (none)      all others: weights, conditioning, text, constants

Where a position meets tokens, the block depends on the index; a mask that only compares the order
of tokens (causal, diagonal) is the exception, as kept tokens stay in order. Operations that mix
tokens along the sequence (shifts, scans, convolutions) are reported as `order`. A block that fails
on n tokens depends on their number: as n is prime, it cannot be cut into windows or a grid.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from routing.attached.calls import Call, Rows, leaves
from routing.attached.keep import AttachError

_TOKENS, _UNIFORM = "tokens", "uniform"
# Operations that fill a tensor with one value, whatever its size.
_FILLS = (
    "zeros",
    "ones",
    "full",
    "empty",
    "empty_strided",
    "scalar_tensor",
    "expand",
    "fill",
    "zero",
)
_FILLS_LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
# What makes positions of such a tensor.
_COUNTING = (
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "nonzero",
    "tril",
    "triu",
    "diag_embed",
    "index_put",
)
_CUMULATIVE = (
    "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_cummax_helper", "_cummin_helper"
)  # fmt: skip
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn", "mkldnn_rnn_layer")
_SPATIAL = ("pool", "upsample", "im2col")
_MOST_UNITS = 6  # arguments that may have a row for each token; each choice of them is a run
_REASONS = {
    "position": (
        "places tokens by their index ({what}), and the tokens of a route would get the positions "
        "of others; give it the table as an argument with a row for each token, or pass "
        'positions="own" to route it all the same'
    ),
    "order": (
        "mixes tokens along the sequence ({what}); pass ordered=True if it should see the tokens "
        "of a route as one sequence"
    ),
    "number": (
        "does not run on {count} of its {tokens} tokens ({what}), so it depends on their number; "
        'pass positions="own" if it runs on those that stay in the route'
    ),
    "unseen": (
        "cannot be examined for positions by index ({what}); check that it has none, then pass "
        'positions="own"'
    ),
}


@dataclass(frozen=True)
class Dependence:
    """How a block depends on the index of its tokens.

    Attributes:
        kind: `position` (by index), `order` (it mixes tokens along the sequence), `number` (it
            does not run on another number of tokens) or `unseen` (it runs, but not while it is
            looked at).
        what: The operation and the attribute of the block, or the error.
    """

    kind: str
    what: str


class IndexUse(Exception):
    """Ends a run where a dependence is found."""

    def __init__(self, dependence: Dependence) -> None:
        super().__init__(dependence.what)
        self.dependence = dependence


def token_counts(most: int, least: int, taken: set[int]) -> list[int]:
    """Return two numbers of tokens below `most` that divide no other size, primes if there are any.

    Args:
        most: Tokens of the dense sequence.
        least: Tokens that never skip; a number is larger.
        taken: Sizes of other dimensions.
    """
    taken = {size for size in taken if size > 1}
    numbers = [n for n in range(most - 1, max(least, 1), -1) if all(size % n for size in taken)]
    primes = [n for n in numbers if n > 3 and all(n % p for p in range(2, math.isqrt(n) + 1))]
    return (primes or numbers or [max(most - 1, 1)])[:2]


def sizes_of(module: nn.Module) -> set[int]:
    """Return the sizes of all dimensions of a block's parameters, buffers and other tensors."""
    return {size for tensor in named_tensors(module).values() for size in tensor.shape}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a block's parameters, buffers and tensors in plain attributes, by their path."""
    tensors: dict[str, Tensor] = {}
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for group in (child._parameters, child._buffers, vars(child)):
            for name, value in group.items():
                if isinstance(value, Tensor):
                    tensors[f"self.{prefix}{name}"] = value
    return tensors


def dependence(
    module: nn.Module,
    run: Callable[[int], tuple[Sequence[Tensor], tuple, dict[str, Any]]],
    counts: Sequence[int],
    front: int = 0,
    back: int = 0,
    ordered: bool = False,
    any_order: bool = False,
    joined: dict[int, int] | None = None,
) -> Dependence | None:
    """Return how a block depends on the index of its tokens; None if it does not.

    Args:
        module: The block.
        run: Returns, for a number of tokens, the tensors with a row for each, and the arguments of
            a call with that many.
        counts: Numbers of tokens to try; what shows at all of them is believed.
        front: Tokens at the beginning that never skip, where a block may cut its sequence.
        back: Tokens at the end that never skip.
        ordered: Accept what mixes tokens along the sequence.
        any_order: Report causal masks too, which only compare the order of tokens.
        joined: Receives, for each length of a sequence that the block joins its tokens to, where
            they begin in it.
    """
    result = None
    for count in counts:
        per_token, args, kwargs = run(count)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = {f"argument {k}": v for k, v in given.items() if isinstance(v, Tensor)}
        labels = _Labels(module, tensors, per_token, (count, front, back), ordered)
        result = _run_once(module, labels, per_token[0].device, args, kwargs)
        if result is None and any_order and labels.causal:
            result = Dependence("order", labels.causal)
        if result is None:
            if joined is not None:
                joined.update(labels.joined)
            return None
    return result


def _run_once(
    module: nn.Module, labels: _Labels, device: torch.device, args: tuple, kwargs: dict[str, Any]
) -> Dependence | None:
    with unchanged(module, device), torch.no_grad():
        try:
            with labels:
                module.forward(*args, **kwargs)
        except IndexUse as found:
            return found.dependence
        except Exception as error:  # of the user's block
            text = f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"
            try:
                module.forward(*args, **kwargs)
            except Exception:
                return Dependence("number", text)
            return Dependence("unseen", text)
    return None


@contextlib.contextmanager
def unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers, attributes and random numbers back, and let nothing be compiled meanwhile."""
    attributes = []
    for child in module.modules():
        attributes.append((child, dict(vars(child)), dict(child._buffers)))
    contents = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
    devices = [] if device.type == "cpu" else [device]
    stance = getattr(torch.compiler, "set_stance", None)
    eager = contextlib.nullcontext() if stance is None else stance("force_eager")
    with torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type), eager:
        try:
            yield
        finally:
            for child, values, buffers in attributes:
                vars(child).clear()
                vars(child).update(values)
                child._buffers.clear()
                child._buffers.update(buffers)
            for buffer, version, before in contents:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(before)


class _Labels(TorchDispatchMode):
    """Labels the tensors of one run, and raises `IndexUse` where a position meets tokens.

    Args:
        module: The block.
        arguments: Its other arguments, by name.
        per_token: Tensors with a row for each token.
        lengths: Number of tokens, and how many in front and at the end never skip.
        ordered: Accept what mixes tokens along the sequence.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Mapping[str, Tensor],
        per_token: Sequence[Tensor],
        lengths: tuple[int, int, int],
        ordered: bool,
    ) -> None:
        super().__init__()
        self.labels: Any = WeakTensorKeyDictionary()
        self.paths: Any = WeakTensorKeyDictionary()
        self.parameters = {id(parameter) for parameter in module.parameters()}
        for path, tensor in {**arguments, **named_tensors(module)}.items():
            self.paths[tensor] = path
        for tensor in per_token:
            self.labels[tensor] = _TOKENS
        self.learned: set[str] = set()  # sources that are parameters, whose values may be zero yet
        count, front, back = lengths
        # Where those that may skip are in a sequence of each length, which may be cut around them.
        self.free: dict[int, tuple[int, int]] = {count: (front, count - back)}
        self.joined: dict[int, int] = {}
        self.causal = ""  # what compares the order of tokens without mixing them along it
        self.count, self.ordered = count, ordered

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and label what it returns."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        kinds = [self.labels.get(tensor) for tensor in inputs]
        if name == "cat":
            self._join(args)
        if _TOKENS in kinds:
            for tensor, kind in zip(inputs, kinds, strict=True):
                if kind in (None, _TOKENS, _UNIFORM):
                    continue
                if not self._only_orders(tensor, kind):
                    raise IndexUse(Dependence("position", kind))
                if not torch.equal(tensor, tensor.mT):
                    self.causal = f"a mask by {kind}"
            flags = (*args, *kwargs.values()) if "attention" in name else ()
            if name in ("tril", "triu") or any(flag is True for flag in flags):
                self.causal = name
            label: str | None = _UNIFORM if name in _FILLS_LIKE else _TOKENS
            self._follow(name, args, inputs)
        else:
            label = self._label(func, name, inputs, kinds, outputs)
        for tensor in outputs:
            if label in (_TOKENS, _UNIFORM) or (label and self._counts_tokens(tensor)):
                self.labels[tensor] = label
            elif tensor in self.labels:
                del self.labels[tensor]
        return out

    def _label(
        self,
        func: Any,
        name: str,
        inputs: list[Tensor],
        kinds: list[str | None],
        outputs: list[Tensor],
    ) -> str | None:
        """Return the label of what an operation makes without tokens."""
        sources = [kind for kind in kinds if kind not in (None, _UNIFORM)]
        path = next((self.paths[tensor] for tensor in inputs if tensor in self.paths), None)
        if sources:
            return self._source(name, path, inputs) if path else sources[0]
        if _UNIFORM in kinds and name not in _COUNTING:
            return _UNIFORM
        if not any(map(self._counts_tokens, outputs)):
            return None
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or name.rstrip("_") in (*_FILLS, *_FILLS_LIKE):
            return _UNIFORM
        return self._source(name, path, inputs)

    def _source(self, name: str, path: str | None, inputs: list[Tensor]) -> str:
        """Return a description of where a position comes from."""
        source = f"{name} of {path}" if path else name
        if any(id(tensor) in self.parameters for tensor in inputs):
            self.learned.add(source)
        return source

    def _counts_tokens(self, tensor: Tensor) -> bool:
        """Whether a dimension is a number of tokens or a multiple of it."""
        return any(size and size % count == 0 for size in tensor.shape for count in self.free)

    def _only_orders(self, tensor: Tensor, source: str) -> bool:
        """Whether values `(..., T, T)` depend only on which of two tokens comes first."""
        if source in self.learned or tensor.dim() < 2 or tensor.shape[-1] not in self.free:
            return False
        rows, columns = tensor.shape[-2:]
        if rows != columns:
            return False
        values = tensor.reshape(-1, rows, columns)
        row, column = torch.tril_indices(rows, rows, -1, device=tensor.device)
        lower, upper = values[:, row, column], values[:, column, row]
        diagonal = values.diagonal(dim1=1, dim2=2)
        return all(bool((part == part[:, :1]).all()) for part in (lower, upper, diagonal))

    # --- operations along the sequence

    def _follow(self, name: str, args: tuple, inputs: list[Tensor]) -> None:
        """Note where a sequence may be cut after an operation on tokens; refuse what mixes them."""
        x = next((leaf for leaf in inputs if self.labels.get(leaf) == _TOKENS), inputs[0])
        along = [dim for dim, size in enumerate(x.shape) if size in self.free]
        if not along:
            return
        if name in ("slice", "split", "split_with_sizes", "unbind", "select"):
            self._cut(name, x, args)
        elif name in ("roll", "flip"):
            dims = _dims(args[-1] if len(args) > (2 if name == "roll" else 1) else (), x)
            self._mixes(bool(set(dims or along) & set(along)), name)
        elif name in _CUMULATIVE:
            self._mixes(_dims(args[1], x)[0] in along, name)
        elif name == "constant_pad_nd":
            padded = [x.dim() - 1 - k // 2 for k, pad in enumerate(args[1]) if pad]
            self._mixes(bool(set(padded) & set(along)), "padding")
        elif name == "convolution" or name.startswith("mkldnn_convolution"):
            kernel = args[1].shape[2:]
            mixed = any(dim in along and kernel[dim - 2] > 1 for dim in range(2, x.dim()))
            self._mixes(mixed, "convolution")
        elif name in _RECURRENT:
            self._mixes(True, name)
        elif name.startswith("_fft"):
            self._mixes(bool(set(_dims(args[1], x)) & set(along)), name, "position")
        elif name in ("as_strided", "unfold"):
            self._mixes(True, name, "position")
        elif any(part in name for part in _SPATIAL):
            self._mixes(along[-1] >= x.dim() - 2, name, "position")

    def _mixes(self, condition: bool, what: str, kind: str = "order") -> None:
        if condition and not (kind == "order" and self.ordered):
            raise IndexUse(Dependence(kind, f"{what} along the tokens"))

    def _join(self, args: tuple) -> None:
        """Note a sequence that was joined from tokens, or masks of them, and others."""
        tensors = args[0]
        if not any(tensor in self.labels for tensor in tensors):
            return
        dim = (args[1] if len(args) > 1 else 0) % max(tensors[0].dim(), 1)
        sizes = [tensor.shape[dim] if tensor.dim() > dim else 0 for tensor in tensors]
        for number, size in enumerate(sizes):
            if size in self.free and len(sizes) > 1:
                offset, (start, end) = sum(sizes[:number]), self.free[size]
                self.free.setdefault(sum(sizes), (offset + start, offset + end))
                if size == self.count and self.labels.get(tensors[number]) == _TOKENS:
                    self.joined[sum(sizes)] = offset

    def _cut(self, name: str, x: Tensor, args: tuple) -> None:
        """Refuse a cut between tokens that may skip; note the sequence that is left."""
        position = 1 if name in ("slice", "select", "unbind") else 2
        dim = _dims(args[position] if len(args) > position else 0, x)[0]
        size = x.shape[dim]
        if size not in self.free:
            return
        if name == "slice":
            bounds = range(size)[slice(*args[2:5])]
            self._mixes(bounds.step != 1, "slice with a step", "position")
            pieces = [(bounds.start, bounds.stop)]
        elif name == "select":
            pieces = [(args[2] % size, args[2] % size + 1)]
        elif name == "unbind":
            pieces = [(i, i + 1) for i in range(size)]
        else:
            lengths = args[1] if name == "split_with_sizes" else [args[1]] * -(-size // args[1])
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            pieces = [(a, min(a + n, size)) for a, n in zip(starts, lengths, strict=True)]
        first, last = self.free[size]
        for start, end in pieces:
            self._mixes(any(first < cut < last for cut in (start, end)), name)
            if start <= first and last <= end:
                self.free.setdefault(end - start, (first - start, last - start))


def _dims(dims: Any, x: Tensor) -> list[int]:
    """Return dimensions as non-negative numbers."""
    return [dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)]


# --- which arguments have a row for each token


@dataclass(frozen=True)
class Arguments:
    """Which arguments of a block have a row for each token, besides those known by their names.

    Attributes:
        rows: By name, the indices of the tensors in the argument that have.
        seen: Names of all arguments that might have had, from their sizes.
        text_last: The block joins text to its tokens, and it comes after them.
    """

    rows: Mapping[str, tuple[int, ...]]
    seen: frozenset[str]
    text_last: bool = False


@dataclass(frozen=True)
class _Unit:
    """Tensors of one shape in one argument, which have a row for each token together or not."""

    name: str
    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    dims: tuple[int, ...]


def candidates(call: Call, rows: Rows) -> list[_Unit]:
    """Return the tensors among arguments of unknown names with as many rows as there are tokens."""
    units: dict[tuple, _Unit] = {}
    for name, value in call.others():
        for index, leaf in enumerate(leaves(value)):
            dims = rows.dimensions(leaf)
            if not dims and leaf.shape[:2] == call.tokens.shape[:2]:
                dims = [1]  # fewer in a route, where a block before made it
            if dims:
                key = name, leaf.shape
                known = units[key].leaves if key in units else ()
                units[key] = _Unit(name, (*known, index), tuple(leaf.shape), tuple(dims))
    return list(units.values())


def examine(
    block: nn.Module, call: Call, rows: Rows, bounds: tuple[int, int], ordered: bool, where: str
) -> Arguments:
    """Return which arguments of a block have a row for each token, from runs of it.

    Each run has another number of tokens. An argument that the block cannot do without then, or
    cuts by the number of its tokens, has a row for each; one that may keep its length has none.

    Args:
        block: The block, without wrappers.
        call: Its call, with all tokens or those of a route.
        rows: Where its arguments count the complete sequence.
        bounds: How many tokens at the beginning and at the end of it never skip.
        ordered: Accept what mixes tokens along the sequence.
        where: What to call the block in an error.

    Raises:
        AttachError: If the block depends on the index or the number of its tokens, or if several
            choices of arguments are possible.
    """
    units = candidates(call, rows)
    clear = [unit for unit in units if len(unit.dims) == 1][:_MOST_UNITS]
    counts = token_counts(rows.length, sum(bounds), sizes_of(block) | _sizes_beside(call, rows))
    joined: dict[int, int] = {}

    def result(chosen: Sequence[_Unit]) -> Dependence | None:
        make = partial(resized, call, partial(_row_dimension, call, rows, chosen), rows.length)
        return dependence(block, make, counts, *bounds, ordered=ordered, joined=joined)

    for size in range(len(clear) + 1):
        passing = [chosen for chosen in combinations(clear, size) if result(chosen) is None]
        if len(passing) == 1:
            per_token: dict[str, tuple[int, ...]] = {}
            for unit in passing[0]:
                per_token[unit.name] = (*per_token.get(unit.name, ()), *unit.leaves)
            text_last = bool(joined) and not any(joined.values())
            return Arguments(per_token, frozenset(unit.name for unit in units), text_last)
        for unit in passing[0] if passing else ():
            raise AttachError(_unclear(unit, rows, where))
    found = result(clear)
    assert found is not None
    if found.kind == "number":
        for unit in units:
            if unit not in clear:
                raise AttachError(_unclear(unit, rows, where))
    what = found.what
    if found.kind == "number":
        tables = [name for name, t in named_tensors(block).items() if rows.length in t.shape]
        what += f"; {', '.join(tables[:3])} with {rows.length} rows" if tables else ""
    reason = _REASONS[found.kind].format(what=what, count=counts[-1], tokens=rows.length)
    raise AttachError(f"{where} {reason}")


def by_sizes(call: Call, rows: Rows, where: str) -> Arguments:
    """Return which arguments have a row for each token, from their sizes alone.

    Raises:
        AttachError: If a size that is the number of tokens may be another one too.
    """
    per_token: dict[str, tuple[int, ...]] = {}
    units, others = candidates(call, rows), {*call.tokens.shape[::2], *rows.any_text}
    for unit in units:
        if len(unit.dims) != 1 or unit.shape[unit.dims[0]] in others:
            raise AttachError(_unclear(unit, rows, where))
        per_token[unit.name] = (*per_token.get(unit.name, ()), *unit.leaves)
    return Arguments(per_token, frozenset(per_token))


def _unclear(unit: _Unit, rows: Rows, where: str) -> str:
    if len(unit.shape) > 2 and unit.shape[-1] == unit.shape[-2] == rows.length:
        return (
            f"{where}: its argument {unit.name} of shape {unit.shape} relates all {rows.length} "
            "tokens to each other, and only some are in the route: not supported"
        )
    return (
        f"{where}: whether its argument {unit.name} of shape {unit.shape} has a row for each of "
        f'{rows.length} tokens is unclear; if it has, pass extra=("{unit.name}",)'
    )


def _sizes_beside(call: Call, rows: Rows) -> set[int]:
    """Return the sizes of all dimensions of the arguments that do not count tokens."""
    sizes = {size for name in call.names for leaf in leaves(call.get(name)) for size in leaf.shape}
    return sizes - {*rows.lengths, call.tokens.shape[1]} | {rows.length}


def _row_dimension(
    call: Call, rows: Rows, chosen: Sequence[_Unit], name: str, index: int, leaf: Tensor
) -> int | None:
    """Return which dimension of a tensor of an argument counts tokens in a run; None for none."""
    if name in call.signature.tables:
        return rows.dimension(leaf)
    for unit in chosen:
        if unit.name == name and index in unit.leaves:
            return unit.dims[0]
    return 1 if name in call.signature.carry else None


def resized(
    call: Call, dimension: Callable[[str, int, Tensor], int | None], length: int, count: int
) -> tuple[list[Tensor], tuple, dict[str, Any]]:
    """Return a call with another number of tokens.

    Args:
        call: The call.
        dimension: Returns which dimension of a tensor, given the name of its argument and its index
            in it, counts tokens; None for none.
        length: How many tokens these dimensions count, where not those that came in.
        count: The number of tokens wanted.

    Returns:
        The tensors with a row for each token, then the arguments.
    """
    new, now = call.copy(), call.tokens.shape[1]
    per_token: list[Tensor] = []

    def resize(tensor: Tensor, dim: int, length: int) -> Tensor:
        size = tensor.shape[dim] - length + count
        index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
        per_token.append(tensor.detach().index_select(dim, index))
        return per_token[-1]

    new.tokens = resize(call.tokens, 1, now)
    for name in call.names:
        if name == call.signature.tokens:
            continue
        items, spec = tree_flatten(call.get(name))
        tensors = [i for i, item in enumerate(items) if isinstance(item, Tensor)]
        for index, position in enumerate(tensors):
            leaf = items[position]
            dim = dimension(name, index, leaf)
            if dim is not None:
                items[position] = resize(leaf, dim, now if leaf.shape[dim] == now else length)
        if tensors:
            new.put(name, tree_unflatten(items, spec))
    return per_token, new.args, new.kwargs
