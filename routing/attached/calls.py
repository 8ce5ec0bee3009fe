"""Where the call and the output of a foreign block hold its tokens, tables and masks."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from routing.attached.kept import KeptTokens
from routing.errors import require
from routing.layout import Layout
from routing.options import RoutingError

# Arguments that hold one row for each token, in the block lists of diffusers and timm.
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
_NO_TOKENS = "a block got no tokens of shape (batch, tokens, width)"
_SHARED = (
    "these blocks share one rotary table in the batch, so samples cannot keep different tokens; "
    "try selection=Selection(shared=True)"
)


class AttachError(RoutingError):
    """Unsupported blocks, or a call in which the image tokens cannot be identified."""


def inner(block: nn.Module) -> nn.Module:
    """Return the module behind `torch.compile`'s wrapper, if it has one."""
    return getattr(block, "_orig_mod", block)


class Signature:
    """Where a block's call holds its tokens, tables (`extra` ones too) and masks."""

    def __init__(self, block: nn.Module, extra: Sequence[str] = ()) -> None:
        parameters = inspect.signature(inner(block).forward).parameters
        self.positions = {name: position for position, name in enumerate(parameters)}
        self.any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())  # **kwargs
        self.tokens = next(name for name in (*_TOKENS, *parameters) if name in parameters)
        self.tables = tuple(dict.fromkeys((*TABLES, *extra)))
        self.name = type(inner(block)).__name__
        self.library = type(inner(block)).__module__.partition(".")[0]
        self.returned = _returned(inner(block), self.tokens)
        self.heads: set[int] = set()
        for module in inner(block).modules():
            for attribute in ("num_heads", "heads"):
                count = getattr(module, attribute, None)
                if isinstance(count, int):
                    self.heads.add(count)


class Call:
    """The arguments of one call of a block, read and replaced by their names in its signature."""

    def __init__(self, signature: Signature, args: tuple, kwargs: dict[str, Any]) -> None:
        self.signature, self.args, self.kwargs = signature, args, kwargs

    def get(self, name: str) -> Any:
        """Return an argument, or None if it was not given."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self.signature.positions.get(name, len(self.args))
        return self.args[position] if position < len(self.args) else None

    def put(self, name: str, value: Any) -> None:
        """Replace an argument that was given."""
        if name in self.kwargs:
            self.kwargs = {**self.kwargs, name: value}
        else:
            position = self.signature.positions[name]
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

    def tables(self) -> dict[str, Any]:
        """Return the per-token tables that were given, tensors or tuples of them, by name."""
        tables = {}
        for name in self.signature.tables:
            table = self.get(name)
            if table is not None:
                tables[name] = table
        return tables

    def token_dimension(self, table: Tensor, layout: Layout, front: int) -> tuple[int | None, bool]:
        """Return which dimension of a table counts tokens, and whether the batch may share it.

        It is 1 or 2 in `(B, T, ...)` and `(B, 1, T, ...)`; the batch shares `(T, ...)` and
        `(heads, T, ...)`, also where B is as many. It is None in a table of the text alone, such
        as QwenImage's second one.

        Args:
            table: A per-token table.
            layout: Of the block's sequence: its grid tokens are the last of T, after the prefix,
                text or both.
            front: How many tokens of the prefix are class or register tokens in front, which a
                table may lack.

        Raises:
            AttachError: If no dimension has one of these lengths, or several do.
        """
        batch, joint = self.tokens.shape[0], self.joint_text
        tokens, prefix = layout.grid[0] * layout.grid[1], layout.prefix
        after_front = prefix - front
        lengths = {tokens + more + text for more in (0, prefix, after_front) for text in (0, joint)}
        is_flags = table.dim() == 2 and not (table.is_floating_point() or table.is_complex())
        if is_flags and table.shape[0] == batch and table.shape[1] in lengths:
            return 1, False  # `(B, T)`, which has no features
        candidates = (0, *range(1, min(3, table.dim() - 1)))  # the last dimension is features
        matching = [d for d in candidates if table.shape[d] in lengths]
        if not matching and joint and any(table.shape[d] == joint for d in candidates):
            return None, False
        if table.dim() > 2 and table.shape[0] == batch:
            matching = [d for d in matching if d > 0][:1] or matching
        if len(matching) != 1:
            raise AttachError(
                f"a per-token table of shape {tuple(table.shape)} has "
                f"{'several dimensions' if matching else 'no dimension'} of "
                f"{' or '.join(map(str, sorted(lengths)))} tokens"
            )
        dimension = matching[0]
        by_head = dimension == 1 and table.dim() == 3 and table.shape[0] in self.signature.heads
        return dimension, dimension == 0 or table.shape[0] != batch or by_head

    def rows(self, table: Tensor, kept: KeptTokens) -> Tensor:
        """Gather a table's rows of the tokens that stay; rows of text in front stay as they are.

        Raises:
            AttachError: As `token_dimension`, or if samples that keep different tokens share it.
        """
        length = kept.length
        dimension, shared = self.token_dimension(table, kept.layout, kept.front)
        if dimension is None:
            return table
        require(not shared or kept.move.shared, _SHARED, AttachError)
        full = table.unsqueeze(0) if dimension == 0 else table.movedim(dimension, 1)
        # It has rows for the whole sequence, protected tokens included, for all but the class and
        # register tokens in front, or only for the tokens that may skip.
        covered, move = length - kept.layout.prefix, kept.routable_move
        if full.shape[1] - length in (0, self.joint_text):
            covered, move = length, kept.move
        elif full.shape[1] - (length - kept.front) in (0, self.joint_text):
            covered, move = length - kept.front, kept.move_after_front
        text = full.shape[1] - covered
        gathered = torch.cat((full[:, :text], move.take(full[:, text:])), 1)
        return gathered[0] if dimension == 0 else gathered.movedim(1, dimension)

    @property
    def joint_text(self) -> int:
        """Rows of text that come in an argument of their own."""
        text = self.get(TEXT)
        return text.shape[1] if isinstance(text, Tensor) and text.dim() == 3 else 0


def replace_image(output: Any, call: Call, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a block's output, a tensor `(B, T, D)` or what holds it, its image tokens changed.

    The image tokens have the shape of the call's; where text has it too, the names in the block's
    `return` decide.

    Raises:
        AttachError: If no tensor has the shape of the call's tokens, or several have it.
    """
    name, shape = call.signature.name, call.tokens.shape
    items, spec = tree_flatten(output)
    candidates = [i for i, x in enumerate(items) if isinstance(x, Tensor) and x.shape == shape]
    returned = call.signature.returned
    if returned in candidates and len(items) == len(output):
        candidates = [returned]
    require(
        candidates,
        f"{name} returns nothing of the shape of its {shape[1]} tokens (batch, tokens, width)",
        AttachError,
    )
    require(
        len(candidates) <= 1,
        f"{name} returns {len(candidates)} sequences of {shape[1]} tokens, and which one is "
        "the image's is unknown; use another rate, so that their lengths differ",
        AttachError,
    )
    image = candidates[0]
    items[image] = change(items[image])
    return tree_unflatten(items, spec)


def _returned(block: nn.Module, tokens: str) -> int | None:
    """Return the position of a name in the tuple that a block's source returns, None if unclear."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(block).forward)))
        parsed = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return None
    positions = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            names = [item.id if isinstance(item, ast.Name) else "" for item in node.value.elts]
            positions.add(names.index(tokens) if names.count(tokens) == 1 else None)
    return positions.pop() if len(positions) == 1 else None
