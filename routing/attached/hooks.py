"""Route tokens past the blocks of a model of another library.

    attached = routing.attach(model.transformer_blocks, "2-8@0.5")
    ...                        # train as before; evaluation is dense
    attached.remove()          # removes every hook

or, for the duration of a block, `with routing.attach(vit, "auto"): ...`. A model, instead of its
list of blocks, also determines the grid and the prefix.

The work is done in hooks on the blocks. Before each block, a `Call` reads the tokens, rotary tables
and masks among its arguments, and `Passes` says which forward pass it belongs to (activation
checkpointing runs a block again, and needs the subset of its own pass). Before a segment's first
block, `_decide` finds the tokens that may skip, all but prefix and `protect=`, and draws those that
stay (`KeptTokens`); `ForwardPass.open` gathers them and holds all for the end of the segment.
Before each block inside, the rows of per-token tables are gathered too; text in an argument of its
own is never routed. After the last block, `ForwardPass.close` puts the tokens back. The hooks are
never compiled: `torch.compile` breaks its graph there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from routing.attached.arguments import (
    block_list,
    check_extra_names,
    check_names,
    check_routed_blocks,
    check_selection,
    check_when,
    grid_of_call,
    parse_grid,
    parse_prefix,
    parse_seed,
    parse_step,
    refuse_long_skips,
)
from routing.attached.calls import AttachError, Call, Signature, replace_image
from routing.attached.kept import KeptTokens
from routing.attached.passes import ForwardPass, Passes
from routing.attached.protected import count_forced, force_keep, parse_protect, routable_positions
from routing.attached.supported import JoinedText, geometry, refuse_unknown_prefix
from routing.explicit_ids import check_ids, ids_of_segment
from routing.layout import Layout
from routing.route import Route, keep_count
from routing.routed_pass import Selection

_WHOLE_GRAPH = "routing.attach moves tokens between compiled graphs; leave fullgraph=True out"


class Attached:
    """Route tokens past blocks of another library's model until `remove()` or the end of a `with`.

    Args:
        blocks: The list of blocks, several joined into one (`[*m.transformer_blocks,
            *m.single_transformer_blocks]`), or a model that has them: a diffusers or timm one, or
            your own with `blocks`.
        route: Which blocks are skipped, counted in that list.
        grid: Rows and columns of tokens; needed by `rows`, `columns`, `blocks` and `quad`, and
            known if a model is passed.
        selection: How the tokens that stay are chosen. With a plain name, the batch shares a subset
            if it shares rotary tables, otherwise each sample has its own; a `Selection` is used as
            it is.
        prefix: Tokens before the image's that are never routed (class and register tokens, text
            in the same sequence); required if neither the model nor its calls determine it.
        protect: Further tokens that are never routed, wherever they are in the sequence: a slice,
            several in a list, or a bool mask `(T,)` or `(B, T)` that leaves the same number of
            tokens of each sample to the route, best on the CPU, which avoids a synchronisation.
        keep: Tokens that are forced to stay, among those that may skip: bool `(N,)` or `(B, N)`.
            Others are drawn until as many stay as the route says; if more are forced, more stay in
            every sample. If the batch shares a subset, a token stays if any sample forces it, and
            a warning says once if this leaves fewer tokens to skip than the rate.
        seed: Seed, number of the pass and index of the sample determine a subset.
        when: `training` follows routes whose first block is in training mode, `always` all routes,
            `never` none.
        extra: Names of block arguments with one row for each token, besides rotary tables.

    Attributes:
        prefix: As the argument; set it again for each batch with another number of text tokens.
        protect: As the argument; set it again for each batch with other tokens to protect.
        keep: As the argument; set it again for each batch, to None if no token is forced.
        ids: Explicit raster ids of the tokens that stay, (K,), (1, K) or (B, K), one tensor for
            each segment or None to draw it; None draws all.
        inner: Layouts of the latest routed pass, one for each segment: `.ids` stayed.

    Raises:
        AttachError: If the blocks mix tokens by position, take long skip connections, have a route
            already or repeat, if they have no argument of a name in `extra`, if grid or prefix are
            needed and unknown, or if `prefix` is given to blocks whose text is not in front of the
            image (Z-Image).
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
        protect: slice | Sequence[slice] | Tensor | None = None,
        keep: Tensor | None = None,
        seed: int = 0,
        when: str = "training",
        extra: Sequence[str] = (),
    ) -> None:
        self._grid_stated = grid is not None
        self._is_model = isinstance(blocks, nn.Module) and not isinstance(
            blocks, nn.ModuleList | nn.Sequential
        )
        if self._is_model:
            blocks, model_grid, model_prefix = geometry(blocks)  # type: ignore[arg-type]
            grid = model_grid if grid is None else grid
            prefix = model_prefix if prefix is None else prefix
        members = block_list(blocks)
        check_names(extra, "extra", AttachError)
        self._route = Route.parse(route).resolve(len(members), "the list")
        check_routed_blocks(members, self._route)
        self._signatures = [Signature(block, extra) for block in members]
        refuse_long_skips(self._signatures)
        check_extra_names(extra, [self._signatures[i] for i in self._route.sparse_blocks])
        self.grid = parse_grid(grid)
        self.prefix = prefix
        self.protect = protect
        self.keep = keep
        self.seed, self.when = parse_seed(seed), when
        self.automatic = isinstance(selection, str)
        self.selection = selection if isinstance(selection, Selection) else Selection(selection)
        check_selection(self.selection, self.grid)
        self._joined_text, self._warned = JoinedText(), False
        self.ids: Sequence[Tensor | None] | Tensor | None = None
        self.inner: tuple[Layout, ...] = ()
        self._starts = {segment.start for segment in self._route.segments}
        self._inside: dict[int, int] = {}  # segment by each of its blocks
        for k, segment in enumerate(self._route.segments):
            for i in range(segment.start, segment.end + 1):
                self._inside[i] = k
        self._passes = Passes()
        self._handles: list[RemovableHandle] = []
        for i, block in enumerate(members):
            # A compiler would specialise on block and pass, and run only some of the hooks eagerly;
            # disabled, all hooks behave alike.
            before = torch.compiler.disable(partial(self._before, i), reason=_WHOLE_GRAPH)
            after = torch.compiler.disable(partial(self._after, i), reason=_WHOLE_GRAPH)
            before.route_of = self if i in self._inside else None
            self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(block.register_forward_hook(after, with_kwargs=True))

    def remove(self) -> None:
        """Remove all hooks and clear all state but `step` and `inner`."""
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
        check_when(value)
        self._when = value

    @property
    def prefix(self) -> int:
        """Number of tokens before the image, never routed."""
        return self._prefix

    @prefix.setter
    def prefix(self, value: int | None) -> None:
        self._prefix = parse_prefix(value, self._signatures, self._is_model)
        self._prefix_stated = value is not None

    @property
    def protect(self) -> tuple[slice, ...] | Tensor:
        """Tokens that are never routed, as slices or a mask."""
        return self._protect

    @protect.setter
    def protect(self, value: slice | Sequence[slice] | Tensor | None) -> None:
        self._protect = parse_protect(value)
        self._protect_stated = value is not None

    @property
    def step(self) -> int:
        """Number of the next routed pass; set it to resume an interrupted run."""
        return self._passes.step

    @step.setter
    def step(self, value: int) -> None:
        self._passes.step = parse_step(value)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        parts = [f"route {self._route} of {len(self._signatures)} blocks"]
        if self.prefix:
            parts.append(f"prefix {self.prefix}")
        if len(self._protect):
            mask = isinstance(self._protect, Tensor)
            parts.append(f"protect {'mask' if mask else ', '.join(map(str, self._protect))}")
        parts.append(f"when {self.when}" if self._handles else "removed")
        for layout in self.inner:
            total = layout.full_length - layout.prefix
            parts.append(f"{layout.tokens} of {total} tokens stayed")
        return f"<routing.attach: {', '.join(parts)}>"

    def __deepcopy__(self, _: dict) -> Attached:
        # A copy of the model (an EMA) shares the attachment: it is dense in evaluation, and
        # removing the attachment silences the copy's hooks too.
        return self

    @contextmanager
    def mode(self, when: str) -> Iterator[Attached]:
        """Temporarily set `when` to `training`, `always` or `never`."""
        before, self.when = self.when, when
        try:
            yield self
        finally:
            self.when = before

    def _before(
        self, i: int, block: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Hook before block `i`: gather where a segment starts, and tables inside it."""
        call, k = Call(self._signatures[i], args, kwargs), self._inside.get(i)
        starts = i in self._starts
        if k is None or starts:
            self._joined_text.note(call)
        on = self.when == "always" or (self.when == "training" and block.training)
        now = self._passes.enter(i, call.get(call.signature.tokens), routed=on and starts)
        if now is None:
            return None
        for skipped_by in now.skipped:
            if i > self.route.segments[skipped_by].end:
                now.late_ends[i] = skipped_by  # this pass left the segment's last block out
        if i in now.late_ends:
            call.tokens = now.close(now.late_ends[i], call.tokens)
        if k is None:
            return call.args, call.kwargs
        if starts and on and now.task is None:
            self._decide(now, k, call)
        if k in now.kept:
            if starts:
                call.tokens = now.open(k, call.tokens)
            self._check_inside(i, call, now.kept[k])
            self._gather_tables(now, k, call)
        return call.args, call.kwargs

    def _after(
        self, i: int, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Hook after block `i`: put the tokens back where a segment ends."""
        now, k = self._passes.current(), self._inside.get(i)
        if now is None or k not in now.kept or i != self.route.segments[k].end:
            return None
        call = Call(self._signatures[i], args, kwargs)
        return replace_image(output, call, partial(now.close, k))

    def _check_inside(self, i: int, call: Call, kept: KeptTokens) -> None:
        """Refuse a call inside a segment with other tokens than those that stay, or a mask."""
        tokens, expected = call.tokens.shape[1], kept.move.kept
        if tokens != expected:
            raise AttachError(
                f"{tokens} tokens come into block {i} where {expected} are in the route; the model "
                "changes its sequence inside the route, so end it before that block"
            )
        call.refuse_masks(kept.length)

    def _decide(self, now: ForwardPass, k: int, call: Call) -> None:
        """Decide which tokens stay in segment `k` of a pass."""
        x = call.tokens
        length = x.shape[1]
        positions, tokens = routable_positions(self.protect, self.prefix, x)
        protected = length - tokens
        if tokens < 1:
            cause = "protect" if protected > self.prefix else f"prefix={self.prefix}"
            raise AttachError(
                f"{cause}: {length} tokens come into block "
                f"{self.route.segments[k].start}, and none of them is the image's"
            )
        self._joined_text.check(call, k, tokens, self.prefix)
        if not (self._prefix_stated or self._protect_stated):
            refuse_unknown_prefix(call, self.grid, self._is_model)
        grid = grid_of_call(self.grid, self._grid_stated, self.selection, tokens, protected)
        outer = Layout(grid, prefix=protected, device=x.device)
        ids = ids_of_segment(self.ids, self.route, k)
        if ids is None:
            ids = self._draw(now, k, call, outer)
        elif self.keep is not None:
            raise AttachError("keep and ids are both set, and ids already are the tokens that stay")
        check_ids(ids, outer.grid, len(x))
        now.kept[k] = KeptTokens.select(outer, ids, positions, length, self.prefix)
        self.inner = tuple(kept.layout for kept in now.kept.values())

    def _draw(self, now: ForwardPass, k: int, call: Call, outer: Layout) -> Tensor:
        """Draw the ids of the tokens that stay in segment `k`; those of `keep` are among them."""
        x, tokens = call.tokens, outer.tokens
        shared = self._shares_subset(call, outer)
        rate_keeps = keep_count(tokens, self.route.segments[k].rate)
        draws = now.draws(self.seed, len(x), x.device)
        ids = replace(self.selection, shared=shared).ids(draws, k, outer.grid, rate_keeps)
        if self.keep is None:
            return ids
        ids = force_keep(ids, self.keep, draws.uniform(f"keep.{k}", tokens))
        if shared and ids.shape[1] > rate_keeps and not self._warned:
            self._warn_of_united_masks(self.keep, rate_keeps, ids.shape[1], tokens)
        return ids

    def _shares_subset(self, call: Call, outer: Layout) -> bool:
        """Whether samples keep the same tokens: as the selection says, or as they share tables."""
        shared = self.selection.shared
        if self.automatic and len(call.tokens) > 1:
            for table in tree_leaves(call.tables()):
                if isinstance(table, Tensor):
                    _, one_for_all = call.token_dimension(table, outer, self.prefix)
                    shared |= one_for_all
        return shared

    def _warn_of_united_masks(self, keep: Tensor, rate_keeps: int, stay: int, tokens: int) -> None:
        """Warn once if fewer tokens skip because samples with different `keep` share a subset."""
        of_one, of_any = count_forced(keep)
        if of_any <= of_one:
            return
        self._warned = True
        warnings.warn(
            f"keep= forces up to {of_one} tokens of a sample, but the samples share one subset, so "
            f"the {of_any} tokens that any of them forces stay in all: {stay} of {tokens} stay "
            f"where the rate leaves {rate_keeps}; use a mask (N,) that the batch shares",
            stacklevel=2,
        )

    def _gather_tables(self, now: ForwardPass, k: int, call: Call) -> None:
        for name, table in call.tables().items():
            source, gathered = now.tables.get((k, name), (None, None))
            if source is not table:
                rows = partial(call.rows, kept=now.kept[k])
                gathered = tree_map_only(Tensor, rows, table)
                now.tables[k, name] = table, gathered
            call.put(name, gathered)


attach = Attached  # the public name, a verb
