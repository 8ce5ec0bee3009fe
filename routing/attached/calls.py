"""Where the call of a foreign block holds its tokens and what comes with them, and its output."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from routing.attached.keep import AttachError, KeptTokens
from routing.errors import require
from routing.options import RoutingError

# Arguments that hold one row for each token, in the block lists of diffusers and timm. Other names
# are recognised by a run of the block (`routing.attached.positions`).
TABLES = (
    "image_rotary_emb", "rotary_emb", "rope", "freqs_cis", "rotary_pos_emb", "rope_cos", "rope_sin",
    "position_embeddings", "extra_pos_emb", "noise_mask",
)  # fmt: skip
MASKS = ("attn_mask", "attention_mask")
# Other names for masks; some models use them for arguments without a dimension of tokens.
_MASKS = (
    "mask", "key_padding_mask", "src_mask", "src_key_padding_mask", "tgt_mask", "memory_mask",
    "tgt_key_padding_mask", "attention_bias", "shared_rel_pos", "shared_rel_pos_bias",
)  # fmt: skip
_CAUSAL = {"src_mask": "is_causal", "tgt_mask": "tgt_is_causal"}
_TOKENS = ("hidden_states", "x")
TEXT = "encoder_hidden_states"
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_NO_TOKENS = "a block got no tokens of shape (batch, tokens, width)"
_SHARED = (
    "these blocks share one rotary table in the batch, so samples cannot keep different tokens; "
    "try selection=Selection(shared=True)"
)


def inner(block: nn.Module) -> nn.Module:
    """Return the module behind the wrappers of `torch.compile`, FSDP and checkpointing."""
    for name in _WRAPPERS:
        wrapped = getattr(block, name, None)
        if isinstance(wrapped, nn.Module):
            return inner(wrapped)
    return block


class Signature:
    """Where a block's call holds its tokens, its per-token arguments and masks.

    Args:
        block: The block.
        extra: Names of arguments with a row for each token, besides `TABLES`.
        carry: Names of arguments that the block also returns, with a row for each token.
    """

    def __init__(
        self, block: nn.Module, extra: Sequence[str] = (), carry: Sequence[str] = ()
    ) -> None:
        module = inner(block)
        parameters = inspect.signature(module.forward).parameters
        self.positions = {name: position for position, name in enumerate(parameters)}
        self.any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())  # **kwargs
        self.tokens = next(name for name in (*_TOKENS, *parameters) if name in parameters)
        if parameters[self.tokens].kind is inspect.Parameter.VAR_KEYWORD:
            self.tokens = _TOKENS[0]
        self.tables = tuple(dict.fromkeys((*TABLES, *extra)))
        self.carry = tuple(carry)
        self.name = type(module).__name__
        self.library = type(module).__module__.partition(".")[0]
        self.returned = _returned(module)
        self.heads: set[int] = set()
        for child in module.modules():
            for attribute in ("num_heads", "heads"):
                count = getattr(child, attribute, None)
                if isinstance(count, int):
                    self.heads.add(count)


class Call:
    """The arguments of one call of a block, read and replaced by their names in its signature."""

    def __init__(self, signature: Signature, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self.signature, self.args, self.kwargs = signature, args, dict(kwargs)
        names = list(signature.positions)[: len(args)]
        # More than the signature has come from *args.
        self._position = {name: i for i, name in enumerate(names)}
        self._position.update({f"*{i}": i for i in range(len(names), len(args))})

    def copy(self) -> "Call":
        """Return a call with the same arguments, which can be replaced there alone."""
        return Call(self.signature, self.args, self.kwargs)

    @property
    def names(self) -> list[str]:
        """Names of the arguments that were given."""
        return [*self._position, *self.kwargs]

    def get(self, name: str) -> Any:
        """Return an argument, or None if it was not given."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self._position.get(name)
        return None if position is None else self.args[position]

    def put(self, name: str, value: Any) -> None:
        """Replace an argument that was given."""
        if name in self.kwargs:
            self.kwargs[name] = value
        else:
            position = self._position[name]
            self.args = (*self.args[:position], value, *self.args[position + 1 :])

    @property
    def tokens(self) -> Tensor:
        """The image tokens, `(B, T, D)`; an `AttachError` if the block got none."""
        x = self.get(self.signature.tokens)
        require(isinstance(x, Tensor) and x.dim() == 3, _NO_TOKENS, AttachError)
        return x

    @tokens.setter
    def tokens(self, value: Tensor) -> None:
        self.put(self.signature.tokens, value)

    def refuse_masks(self, tokens: int) -> None:
        """Refuse (`AttachError`) a mask over all tokens, of which there are that many."""
        for name in (*MASKS, *_MASKS):
            mask = self.get(name)
            if name in MASKS:
                spans_tokens = mask is not None
            elif self.get(_CAUSAL.get(name, "")):
                continue  # the mask only repeats `is_causal`
            else:
                spans_tokens = isinstance(mask, Tensor) and tokens in mask.shape
            require(
                not spans_tokens,
                f"{name} spans all {tokens} tokens, and only some are in the route: not supported; "
                "instead of a padding mask use prompts of equal length in a batch",
                AttachError,
            )

    def others(self) -> Iterator[tuple[str, Any]]:
        """Return the arguments whose names say nothing: no tokens, tables, masks or text."""
        known = (self.signature.tokens, *self.signature.carry, *self.signature.tables, TEXT)
        for name in self.names:
            if name not in (*known, *MASKS, *_MASKS) and self.get(name) is not None:
                yield name, self.get(name)

    def text_rows(self, per_token: Collection[str] = ()) -> set[int]:
        """Return how many rows the arguments `(B, L, D)` have that may be text.

        Args:
            per_token: Names of arguments with a row for each token, which are not.
        """
        rows, signature = set(), self.signature
        for name in {*self.names} - {signature.tokens, *signature.carry, *per_token}:
            value = self.get(name)
            if isinstance(value, Tensor) and value.dim() == 3 and len(value) == len(self.tokens):
                rows.add(value.shape[1])
        return rows

    @property
    def joint_text(self) -> int:
        """Rows of text that come in the argument `encoder_hidden_states`."""
        text = self.get(TEXT)
        return text.shape[1] if isinstance(text, Tensor) and text.dim() == 3 else 0


class Rows:
    """Where the per-token arguments of a block count its tokens.

    Args:
        call: A call of the block.
        length: Tokens T of the complete sequence.
        routable: Tokens of it that may skip.
        front: Class and register tokens in front, which a table may lack.
        text_last: Text that a block joins to its tokens comes after them.
    """

    def __init__(
        self, call: Call, length: int, routable: int, front: int, text_last: bool = False
    ) -> None:
        self.batch, self.heads = len(call.tokens), call.signature.heads
        self.length, self.front, self.text_last = length, front, text_last
        self.joint = call.joint_text
        self.counts = {length, routable, length - front}
        self.lengths = {n + text for n in self.counts for text in (0, self.joint)}
        self.any_text = call.text_rows() - self.counts

    def dimension(self, table: Tensor) -> int | None:
        """Return which dimension of an argument that is known to be a table counts tokens.

        It is 1 or 2 in `(B, T, ...)` and `(B, 1, T, ...)`, 0 in `(T, ...)`. It is None in a table
        of the text alone, such as QwenImage's second one.

        Raises:
            AttachError: If no dimension has one of these lengths, or several do.
        """
        is_flags = table.dim() == 2 and not (table.is_floating_point() or table.is_complex())
        if is_flags and table.shape[0] == self.batch and table.shape[1] in self.lengths:
            return 1  # `(B, T)`, which has no features
        candidates = (0, *range(1, min(3, table.dim() - 1)))  # the last dimension is features
        matching = [d for d in candidates if table.shape[d] in self.lengths]
        if not matching and self.joint and any(table.shape[d] == self.joint for d in candidates):
            return None
        if table.dim() > 2 and table.shape[0] == self.batch:
            matching = [d for d in matching if d > 0][:1] or matching
        if len(matching) != 1:
            raise AttachError(
                f"a per-token table of shape {tuple(table.shape)} has "
                f"{'several dimensions' if matching else 'no dimension'} of "
                f"{' or '.join(map(str, sorted(self.lengths)))} tokens"
            )
        return matching[0]

    def dimensions(self, value: Tensor) -> list[int]:
        """Return the dimensions of an argument of any name that have as many rows as tokens."""
        counts = self.lengths | {n + text for n in self.counts for text in self.any_text}
        return [d for d, size in enumerate(value.shape) if size in counts]

    def is_shared(self, table: Tensor, dimension: int) -> bool:
        """Whether a table has one row for the token of all samples, as `(T, ...)`."""
        by_head = dimension == 1 and table.dim() == 3 and table.shape[0] in self.heads
        return dimension == 0 or table.shape[0] != self.batch or by_head

    def take(self, table: Tensor, dimension: int, kept: KeptTokens) -> Tensor:
        """Gather a table's rows of the tokens that stay; rows of text stay as they are.

        Raises:
            AttachError: If samples that keep different tokens share it.
        """
        require(not self.is_shared(table, dimension) or kept.move.shared, _SHARED, AttachError)
        full = table.unsqueeze(0) if dimension == 0 else table.movedim(dimension, 1)
        covered, move = self._covered(full.shape[1], kept)
        text = full.shape[1] - covered
        if self.text_last:
            parts = (move.take(full[:, :covered]), full[:, covered:])
        else:
            parts = (full[:, :text], move.take(full[:, text:]))
        gathered = torch.cat(parts, 1)
        return gathered[0] if dimension == 0 else gathered.movedim(1, dimension)

    def _covered(self, rows: int, kept: KeptTokens) -> tuple[int, Any]:
        """Return how many rows of a table are of tokens, and the gather of those that stay.

        It has rows for the whole sequence, protected tokens included, for all but the class and
        register tokens in front, or only for the tokens that may skip.
        """
        texts = {0, self.joint, *self.any_text}
        if rows - self.length in texts:
            return self.length, kept.move
        if rows - (self.length - self.front) in texts:
            return self.length - self.front, kept.move_after_front
        return self.length - kept.layout.prefix, kept.routable_move


def replace_rows(
    output: Any,
    call: Call,
    change: Callable[[list[Any]], list[Any]],
    text_rows: Collection[int] | None = None,
) -> Any:
    """Return a block's output, its image tokens and what it hands on changed.

    The image tokens have the shape of the call's; where text has it too, the names in the block's
    `return` decide. With `carry`, other tensors with a row for each token are handed on.

    Args:
        output: A tensor `(B, T, D)` or what holds it.
        call: The call.
        change: Gets the image tokens, then a tensor for each name of `carry` (None if the block
            returned none), and returns what replaces them.
        text_rows: How many rows text has; unless it has as many as there are tokens, further
            tensors with a row for each token are refused. None accepts them.

    Raises:
        AttachError: If no tensor has the shape of the call's tokens, or which is which is unclear.
    """
    items, spec = tree_flatten(output)
    returned = call.signature.returned
    if not isinstance(output, tuple | list) or len(items) != len(output):
        returned = []
    rows = [i for i, value in enumerate(items) if _has_rows(value, call.tokens)]
    image = _image(items, rows, returned, call)
    carried = _carried([i for i in rows if i != image], returned, call.signature)
    if text_rows is not None and call.tokens.shape[1] not in text_rows:
        _refuse_handed_on([i for i in rows if i not in (image, *carried)], returned, call)
    changed = change([items[image], *(None if i is None else items[i] for i in carried)])
    for i, value in zip((image, *carried), changed, strict=True):
        if i is not None:
            items[i] = value
    return tree_unflatten(items, spec)


def _has_rows(value: Any, x: Tensor) -> bool:
    """Whether a tensor has a row for each token of x, and is no map of attention."""
    if not isinstance(value, Tensor) or value.shape[:2] != x.shape[:2]:
        return False
    return value.dim() < 4 or value.shape[2:] != (x.shape[1], x.shape[1])


def _image(items: list, rows: list[int], returned: list[list[str]], call: Call) -> int:
    """Return which of a block's outputs the image tokens are."""
    signature, shape = call.signature, call.tokens.shape
    candidates = [i for i in rows if items[i].shape == shape]
    position = _position(signature.tokens, returned)
    if position in candidates:
        return position
    require(
        candidates,
        f"{signature.name} returns nothing of the shape of its {shape[1]} tokens (batch, tokens, "
        "width)",
        AttachError,
    )
    require(
        len(candidates) == 1 or (signature.carry and len(rows) == 1 + len(signature.carry)),
        f"{signature.name} returns {len(candidates)} sequences of {shape[1]} tokens, and which one "
        "is the image's is unknown; use another rate, so that their lengths differ, or name those "
        "that the next block gets in carry=",
        AttachError,
    )
    return candidates[0]


def _carried(rows: list[int], returned: list[list[str]], signature: Signature) -> list[int | None]:
    """Return which of a block's outputs each name of `carry` is; None for one that is absent."""
    positions = [_position(name, returned) for name in signature.carry]
    if None not in positions:
        return [i if i in rows else None for i in positions]
    require(
        len(rows) in (0, len(positions)),
        f"{signature.name} returns {len(rows)} sequences beside its tokens, and carry= names "
        f"{', '.join(signature.carry)}; name all that the next block gets, in their order",
        AttachError,
    )
    return list(rows) if rows else [None] * len(positions)


def _position(name: str, returned: list[list[str]]) -> int | None:
    """Return the position of a name in the tuples that a block returns, None if unclear."""
    positions = {names.index(name) if names.count(name) == 1 else None for names in returned}
    return positions.pop() if len(positions) == 1 else None


def _refuse_handed_on(rows: list[int], returned: list[list[str]], call: Call) -> None:
    """Refuse outputs with a row for each token that are neither tokens nor named in `carry`."""
    if not rows:
        return
    known = [names[i] for names in returned for i in rows if names[i] in call.signature.positions]
    name = known[0] if known else None
    advice = f'carry=("{name}",)' if name else 'carry=("NAME",) with its argument of the next block'
    raise AttachError(
        f"{call.signature.name} returns {name or 'a second tensor'} with a row for each of its "
        f"{call.tokens.shape[1]} tokens beside them, and the tokens that skipped would have none "
        f"in the next block; pass {advice}"
    )


def _returned(block: nn.Module) -> list[list[str]]:
    """Return the names in each tuple that a block's source returns; empty for what has none."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(block).forward)))
        parsed = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return []
    returned = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            names = [item.id if isinstance(item, ast.Name) else "" for item in node.value.elts]
            returned.append(names)
    return returned


def leaves(value: Any) -> list[Tensor]:
    """Return the tensors in an argument."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def check_names(names: Any, key: str, error: type[RoutingError]) -> None:
    """Refuse a value of the argument `key` that is not a sequence of names."""
    require(
        isinstance(names, Collection) and not isinstance(names, str),
        f"{key}={names!r}: expected names in a sequence: ('{names}',)",
        error,
    )
