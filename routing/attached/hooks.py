"""Route tokens past the blocks of a model that knows nothing of routing.

    attached = routing.attach(model.transformer_blocks, "2-8@0.5")
    ...                        # train as before; evaluation is dense
    attached.remove()          # no trace is left

or, for as long as a `with` lasts, `with routing.attach(vit, "auto"): ...`. A model, instead of its
list of blocks, also determines the grid and the prefix.

The work is done in hooks on the blocks. The hook before a route's first block gathers the tokens
that stay and keeps the rest; the one after its last block puts them back. Per-token arguments
(rotary tables) are gathered with them; text that joins the attention in an argument of its own is
never routed. Recomputation under activation checkpointing finds the subset of its own pass. The
hooks themselves are never compiled: `torch.compile` breaks its graph there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from experiments.runtime.parsing import whole
from routing.attached.calls import SHARED, AttachError, Call, Signature, replace_image
from routing.attached.passes import ForwardPass, Passes
from routing.attached.supported import geometry, refuse_positional, refuse_unknown_prefix
from routing.errors import one_of, suggest
from routing.layout import Layout
from routing.rng import Draws
from routing.route import Route, keep_count
from routing.selection import Selection, check_ids, ids_of_segment

_FREE = ("random", "stride")  # need no grid
_WHOLE_GRAPH = "routing.attach moves tokens between compiled graphs; leave fullgraph=True out"
WHEN = ("training", "always", "never")


class Attached:
    """Route tokens past blocks of somebody else's model, until `remove()` or the end of a `with`.

    Args:
        blocks: The list of blocks, several joined into one (`[*m.transformer_blocks,
            *m.single_transformer_blocks]`), or a diffusers or timm model that has them.
        route: Which blocks are skipped, counted in that list.
        grid: Rows and columns of tokens; needed by `rows`, `columns`, `blocks` and `quad`, and
            known where a model was passed.
        selection: How the tokens that stay are chosen. A plain name is shared by the batch where
            the model's rotary tables are, else per sample; a `Selection` is taken as it is.
        prefix: Tokens before the image's that are never routed (class and register tokens, text
            in the same sequence); needed where neither the model nor a call of it has it.
        seed: Of the draws; with the number of the pass and the sample's index it fixes a subset.
        when: `training` follows routes whose first block is in training mode, `always` all of
            them, `never` keeps the hooks silent.
        extra: Names of block arguments with one row for each token, besides rotary tables.

    Attributes:
        ids: Explicit raster ids of the tokens that stay, (K,), (1, K) or (B, K), one tensor for
            each segment or None to draw it; None draws all.
        inner: Layouts of the latest routed pass, one for each segment: `.ids` stayed.

    Raises:
        AttachError: If the blocks mix tokens by position, have a route already or repeat, if they
            have no argument of a name in `extra`, or if grid or prefix are needed and unknown.
        RouteError: If the route does not fit the blocks.
    """

    def __init__(
        self,
        blocks: nn.Module | Sequence[nn.Module],
        route: str | Route,
        *,
        grid: tuple[int, int] | None = None,
        selection: str | Selection = "random",
        prefix: int | None = None,
        seed: int = 0,
        when: str = "training",
        extra: Sequence[str] = (),
    ) -> None:
        self._whole = False
        if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.ModuleList | nn.Sequential):
            self._whole = True
            blocks, own_grid, own_prefix = geometry(blocks)
            grid = own_grid if grid is None else grid
            prefix = own_prefix if prefix is None else prefix
        members = list(blocks) if isinstance(blocks, Iterable) else []
        if not members or not all(isinstance(block, nn.Module) for block in members):
            raise AttachError("blocks: expected a model or its list of blocks, as in model.blocks")
        if isinstance(extra, str) or not isinstance(extra, Collection):
            raise AttachError(f"extra={extra!r}: expected names in a sequence: ('{extra}',)")
        self._route = Route.parse(route).resolve(len(members), "the list")
        for i in self._route.sparse_blocks:
            refuse_positional(members[i])
            if _has_route(members[i]):
                raise AttachError(
                    f"block {i} has a route already (a copy has that of its original); call "
                    "remove() on what the first attach returned, or copy before attaching"
                )
        for i, first in enumerate(map(members.index, members)):
            if first < i:
                raise AttachError(
                    f"block {i} is block {first} once more, and their calls cannot be told apart; "
                    "pass a list in which every block is another module"
                )
        pair = isinstance(grid, Sequence) and [isinstance(side, Integral) for side in grid]
        if grid is not None and not (pair == [True, True] and min(grid) > 0):
            raise AttachError(f"grid={grid!r}: expected (rows, columns), such as grid=(16, 16)")
        self._signatures = [Signature(block, extra) for block in members]
        timm = any(signature.library == "timm" for signature in self._signatures)
        if prefix is None and timm and not self._whole:  # their sequences begin with a class token
            raise AttachError(
                "the number of class and register tokens before the image's is unknown; pass the "
                "model instead of its blocks, or prefix=1 (prefix=0 if there are none)"
            )
        self.grid = None if grid is None else (int(grid[0]), int(grid[1]))
        self.prefix, self.seed, self.when = whole(prefix or 0, "prefix=", AttachError), seed, when
        self._prefix_known, self.automatic = prefix is not None, isinstance(selection, str)
        if self.prefix < 0:
            raise AttachError(f"prefix={prefix}: expected 0 or more tokens before the image's")
        self.selection = selection if isinstance(selection, Selection) else Selection(selection)
        self.ids: Sequence[Tensor | None] | Tensor | None = None
        self.inner: tuple[Layout, ...] = ()
        if grid is None and self.selection.mode not in _FREE:
            raise AttachError(
                f"selection {self.selection.mode} needs the grid of tokens; "
                "pass grid=(rows, columns)"
            )
        if self.selection.mode == "unsorted":
            raise AttachError("selection unsorted shuffles scans, and these blocks have none")
        _check_extra(extra, [self._signatures[i] for i in self._route.sparse_blocks])
        self._starts = {segment.start: k for k, segment in enumerate(self._route.segments)}
        self._inside = {
            i: k for k, s in enumerate(self._route.segments) for i in range(s.start, s.end + 1)
        }
        self._passes = Passes()
        self._handles: list[RemovableHandle] = []
        for i, block in enumerate(members):
            # A compiler would specialise on the block and the pass, and run some hooks eagerly
            # and others not; outside of its graphs, all of them are the same.
            before = torch.compiler.disable(partial(self._before, i), reason=_WHOLE_GRAPH)
            after = torch.compiler.disable(partial(self._after, i), reason=_WHOLE_GRAPH)
            before.route_of = self if i in self._inside else None
            self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(block.register_forward_hook(after, with_kwargs=True))

    def remove(self) -> None:
        """Take all hooks off again and forget everything but `step` and `inner`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._passes = Passes(self.step)
        self.when = "never"  # for copies of the model that still hold the hooks

    @property
    def route(self) -> Route:
        """The route; for another one, `remove()` this and attach again."""
        return self._route

    @property
    def when(self) -> str:
        """When tokens are routed: `training`, `always` or `never`."""
        return self._when

    @when.setter
    def when(self, value: str) -> None:
        one_of("when", value, WHEN, AttachError)
        self._when = value

    @property
    def step(self) -> int:
        """Number of the next routed pass; set it to go on where an interrupted run was."""
        return self._passes.step

    @step.setter
    def step(self, value: int) -> None:
        self._passes.step = int(value)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, _: dict) -> Attached:
        # A copy of the model (an EMA) shares the attachment: it is dense in evaluation, and
        # removing the attachment silences the copy's hooks too.
        return self

    @contextmanager
    def mode(self, when: str) -> Iterator[Attached]:
        """Route `training`, `always` or `never` for as long as a `with` lasts."""
        before, self.when = self.when, when
        try:
            yield self
        finally:
            self.when = before

    def _before(
        self, i: int, block: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Hook before block `i`: gather where a route starts, and tables inside it."""
        call = Call(self._signatures[i], args, kwargs)
        on = self.when == "always" or (self.when == "training" and block.training)
        routed = on and i in self._starts
        now = self._passes.enter(i, call.get(call.signature.tokens), routed)
        if now is None:
            return None
        if now.open is not None and i > self.route.segments[now.open].end:
            now.late[i] = now.open  # this pass left the route's last block out
        if i in now.late:
            now.open = now.late[i]
            call.tokens = now.close(call.tokens)
        k = self._starts.get(i, -1)
        if routed and now.task is None:
            self._decide(now, k, call)
        if k in now.moves:
            now.open = k
            now.bypass[k] = call.tokens
            call.tokens = now.moves[k].take(call.tokens)
        inside = self._inside.get(i)
        if inside is not None and inside in now.moves:
            came, kept = call.tokens.shape[1], now.moves[inside].kept
            if came != kept:
                raise AttachError(
                    f"{came} tokens come into block {i} where {kept} are in the route; the model "
                    "changes its sequence inside the route, so end it before that block"
                )
            call.refuse_masks(now.layouts[inside].full_length)
            self._gather_tables(now, inside, call)
        return call.args, call.kwargs

    def _after(
        self, i: int, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Hook after block `i`: put the tokens back where a route ends."""
        now, k = self._passes.current(), self._inside.get(i)
        if now is None or k not in now.moves or i != self.route.segments[k].end:
            return None
        now.open = k
        return replace_image(output, Call(self._signatures[i], args, kwargs), now.close)

    def _decide(self, now: ForwardPass, k: int, call: Call) -> None:
        """Decide which tokens stay in segment `k` of a pass."""
        x = call.tokens
        batch, tokens = x.shape[0], x.shape[1] - self.prefix
        grid = self.grid
        if tokens < 1:
            raise AttachError(
                f"prefix={self.prefix}: {x.shape[1]} tokens come into block "
                f"{self.route.segments[k].start}, and none of them is the image's"
            )
        if not self._prefix_known:
            refuse_unknown_prefix(call, grid, self._whole)
        if grid is None or grid[0] * grid[1] != tokens:
            if self.selection.mode not in _FREE:
                raise AttachError(
                    f"{tokens} tokens come in where grid={grid} has another number; pass this "
                    "input's grid of tokens, grid=(rows, columns)"
                )
            grid = (1, tokens)
        outer = Layout(grid, prefix=self.prefix, device=x.device)
        shared = self._shared(call, batch, tokens)
        ids = ids_of_segment(self.ids, self.route, k)
        if ids is None:
            index = torch.arange(batch, device=x.device) + _rank() * batch
            keep = keep_count(tokens, self.route.segments[k].rate)
            draws = Draws(self.seed, now.step, index)
            ids = replace(self.selection, shared=shared).ids(draws, k, grid, keep)
        check_ids(ids, grid, batch)
        if shared and ids.dim() > 1 and ids.shape[0] > 1:
            raise AttachError(SHARED)
        inner = now.layouts[k] = outer.subset(ids)
        now.moves[k] = outer.move_to(inner)
        self.inner = tuple(now.layouts.values())

    def _shared(self, call: Call, batch: int, tokens: int) -> bool:
        """Whether the batch has to share its subset, for the sake of tables that it shares."""
        must = batch > 1 and any(
            call.token_dimension(table, tokens, self.prefix)[1]
            for table in tree_leaves(call.tables())
            if isinstance(table, Tensor)
        )
        if must and not self.automatic and not self.selection.shared:
            raise AttachError(SHARED)
        return must or self.selection.shared

    def _gather_tables(self, now: ForwardPass, k: int, call: Call) -> None:
        for name, table in call.tables().items():
            seen, gathered = now.tables.get((k, name), (None, None))
            if seen is not table:
                rows = partial(call.rows, inner=now.layouts[k])
                gathered = tree_map_only(Tensor, rows, table)
                now.tables[k, name] = table, gathered
            call.put(name, gathered)


attach = Attached  # as it reads where it is called


def _has_route(block: nn.Module) -> bool:
    """Whether a hook on the block, which its copies have too, is of a route not removed."""
    owners = [getattr(hook, "route_of", None) for hook in block._forward_pre_hooks.values()]
    return any(owner is not None and owner._handles for owner in owners)


def _check_extra(extra: Sequence[str], known: Sequence[Signature]) -> None:
    """Refuse names that are no argument of any block in the route."""
    for name in extra:
        if known and not any(block.any_name or name in block.places for block in known):
            has = known[0].places
            raise AttachError(
                f"extra: the blocks have no argument {name}; they have {', '.join(has)}"
                f"{suggest(name, has)}"
            )


def _rank() -> int:
    group = torch.distributed
    return group.get_rank() if group.is_available() and group.is_initialized() else 0
