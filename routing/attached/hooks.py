"""Route tokens past the blocks of a model of another library.

    attached = routing.attach(model.transformer_blocks, "2-8@0.5")
    ...                        # train as before; evaluation is dense
    attached.remove()          # removes every hook

or, for the duration of a block, `with routing.attach(vit, "auto"): ...`. A model, instead of its
list of blocks, also determines the grid and the prefix.

The work is done in hooks on the blocks. Before each block, a `Call` reads the tokens and what comes
with them among its arguments, and `Passes` says which forward pass it belongs to (activation
checkpointing runs a block again, and needs the subset of its own pass). Before a segment's first
block, `_decide` finds the tokens that may skip, all but prefix and `protect=`, and draws those that
stay (`KeptTokens`); `ForwardPass.open` gathers them and holds all for the end of the segment.
Before each block inside, the rows of per-token arguments are gathered too; text in an argument of
its own is never routed. After the last block, `ForwardPass.close` puts the tokens back. When a
block is first routed, `examine` finds which arguments those are, and refuses a block that places
its tokens by their index. The hooks are never compiled: `torch.compile` breaks its graph there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from routing.attached.calls import (
    AttachError,
    Call,
    Rows,
    Signature,
    check_names,
    inner,
    leaves,
    replace_rows,
)
from routing.attached.keep import (
    KeptTokens,
    count_forced,
    force_keep,
    parse_protect,
    routable_positions,
)
from routing.attached.models import (
    JoinedText,
    block_list,
    geometry,
    refuse_long_skips,
    refuse_positional,
    refuse_prefix,
    refuse_unknown_prefix,
    unwrap,
)
from routing.attached.passes import ForwardPass, Passes
from routing.attached.positions import Arguments, by_sizes, candidates, examine
from routing.errors import one_of, require, suggest
from routing.explicit_ids import check_ids, ids_of_segment
from routing.layout import Layout
from routing.route import Route, RouteSchedule, keep_count
from routing.routed_pass import Selection
from routing.schedule import ScheduleError

WHEN = ("training", "always", "never")
WITHOUT_GRID = ("random", "stride")  # selections that need no grid
_WHOLE_GRAPH = "routing.attach moves tokens between compiled graphs; leave fullgraph=True out"


@dataclass(frozen=True)
class _Span:
    """The blocks of a route.

    Attributes:
        starts: The first block of each segment.
        segment: The segment of each block inside.
    """

    starts: frozenset[int]
    segment: Mapping[int, int]


def _span(route: Route) -> _Span:
    segment = {i: k for k, s in enumerate(route.segments) for i in range(s.start, s.end + 1)}
    return _Span(frozenset(s.start for s in route.segments), segment)


class Attached:
    """Route tokens past blocks of another library's model until `remove()` or the end of a `with`.

    Args:
        blocks: The list of blocks, several joined into one (`[*m.transformer_blocks,
            *m.single_transformer_blocks]`), or a model that has them: a diffusers or timm one, or
            your own with `blocks`.
        route: Which blocks are skipped, counted in that list; stages need `steps`.
        steps: Passes of training in the run, which a route that changes during training divides,
            as in `2-8@0.75/0.85:none`; each micro-batch of an accumulated gradient is a pass.
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
        extra: Names of block arguments with one row for each token, for those where it is unclear.
        carry: Names of block arguments with one row for each token that a block returns and the
            next one gets, in the order in which they are returned, such as mamba_ssm's `residual`.
        ordered: The blocks mix tokens along the sequence (causal convolutions, shifts, scans), and
            are to see those of a route as one sequence.
        positions: `own` routes blocks that place tokens by their index or number.

    Attributes:
        prefix: As the argument; set it again for each batch with another number of text tokens.
        protect: As the argument; set it again for each batch with other tokens to protect.
        keep: As the argument; set it again for each batch, to None if no token is forced.
        ids: Explicit raster ids of the tokens that stay, (K,), (1, K) or (B, K), one tensor for
            each segment or None to draw it; None draws all.
        inner: Layouts of the latest routed pass, one for each segment: `.ids` stayed.

    Raises:
        AttachError: If the blocks mix tokens by position, take long skip connections, have a route
            already or repeat, if they have no argument of a name in `extra` or `carry`, if grid or
            prefix are needed and unknown, or if `prefix` is given to blocks whose text is not in
            front of the image (Z-Image). Some of it shows in the first routed pass.
        RouteError: If the route does not fit the blocks.
        ScheduleError: If it has several stages and `steps` is missing.
    """

    def __init__(
        self,
        blocks: nn.Module | Sequence[nn.Module],
        route: str | Route | RouteSchedule,
        *,
        steps: int | None = None,
        grid: tuple[int, int] | None = None,
        selection: str | Selection = "random",
        prefix: int | None = None,
        protect: slice | Sequence[slice] | Tensor | None = None,
        keep: Tensor | None = None,
        seed: int = 0,
        when: str = "training",
        extra: Sequence[str] = (),
        carry: Sequence[str] = (),
        ordered: bool = False,
        positions: str | None = None,
    ) -> None:
        self._grid_stated = grid is not None
        self._is_model = isinstance(blocks, nn.Module) and not isinstance(
            blocks, nn.ModuleList | nn.Sequential
        )
        if self._is_model:
            blocks, model_grid, model_prefix = geometry(unwrap(blocks))  # type: ignore[arg-type]
            grid = model_grid if grid is None else grid
            prefix = model_prefix if prefix is None else prefix
        members = block_list(blocks)
        check_names(extra, "extra", AttachError)
        check_names(carry, "carry", AttachError)
        require(
            positions in (None, "own"),
            f"positions={positions!r}: expected 'own' (the blocks place tokens by their index, and "
            "are routed all the same), or nothing",
            AttachError,
        )
        self._schedule = _schedule(route, steps, len(members))
        self.steps = steps
        self._ordered, self._own = bool(ordered), positions == "own"
        self._spans = {route: _span(route) for _, route in self._schedule.stages}
        inside = {i for span in self._spans.values() for i in span.segment}
        self._starts = {i for span in self._spans.values() for i in span.starts}
        for i in sorted(inside):
            refuse_positional(members[i], self._ordered, self._own)
            require(not _has_route(members[i]), _ROUTED.format(i=i), AttachError)
        self._signatures = [Signature(block, extra, carry) for block in members]
        refuse_long_skips(self._signatures)
        for key, names in (("extra", extra), ("carry", carry)):
            _check_arguments(key, names, [self._signatures[i] for i in sorted(inside)])
        self._arguments: dict[int, Arguments] = {}  # of the blocks that were examined
        self.grid = _parse_grid(grid)
        self.prefix = prefix
        self.protect = protect
        self.keep = keep
        self.seed, self.when = _parse_seed(seed), when
        self.automatic = isinstance(selection, str)
        self.selection = selection if isinstance(selection, Selection) else Selection(selection)
        _check_selection(self.selection, self.grid)
        self._joined_text, self._warned = JoinedText(), False
        self.ids: Sequence[Tensor | None] | Tensor | None = None
        self.inner: tuple[Layout, ...] = ()
        self._trained = 0  # passes of training, which a schedule counts
        self._passes = Passes()
        self._handles: list[RemovableHandle] = []
        for i, block in enumerate(members):
            # A compiler would specialise on block and pass, and run only some of the hooks eagerly;
            # disabled, all hooks behave alike.
            before = torch.compiler.disable(partial(self._before, i), reason=_WHOLE_GRAPH)
            after = torch.compiler.disable(partial(self._after, i), reason=_WHOLE_GRAPH)
            before.route_of = self if i in inside else None
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
        """The route of the next pass; for another one, `remove()` this and attach again."""
        return self._schedule.at(self._trained / self.steps if self.steps else 0.0)

    @property
    def when(self) -> str:
        """When tokens are routed: `training`, `always` or `never`."""
        return self._when

    @when.setter
    def when(self, value: str) -> None:
        one_of("when", value, WHEN, AttachError)
        self._when = value

    @property
    def prefix(self) -> int:
        """Number of tokens before the image, never routed."""
        return self._prefix

    @prefix.setter
    def prefix(self, value: int | None) -> None:
        self._prefix = _parse_prefix(value, self._signatures, self._is_model)
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
        """Number of the next routed pass; set it to resume a run that stored only this number."""
        return self._passes.step

    @step.setter
    def step(self, value: int) -> None:
        self._passes.step = self._trained = _parse_step(value)

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs so that a resumed run continues subsets and schedule."""
        return {"seed": self.seed, "step": self.step, "trained": self._trained}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            AttachError: If it is of another form.
        """
        require(
            isinstance(state, Mapping) and set(state) == {"seed", "step", "trained"},
            f"{state!r}: expected what state_dict() of an attached route returned",
            AttachError,
        )
        self.seed, self.step = _parse_seed(state["seed"]), state["step"]
        self._trained = _parse_step(state["trained"])

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        parts = [f"route {self._schedule} of {len(self._signatures)} blocks"]
        if self.steps:
            parts.append(f"pass {self._trained} of {self.steps}")
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
        """Hook before block `i`: gather where a segment starts, and per-token arguments inside."""
        call = Call(self._signatures[i], args, kwargs)
        on = self.when == "always" or (self.when == "training" and block.training)
        may_start = on and i in self._starts
        now = self._passes.enter(i, call.get(call.signature.tokens), routed=may_start)
        if may_start and now is not None and now.route is None:
            now.route = self.route
            self._trained += block.training
        span = _NOWHERE if now is None or now.route is None else self._spans_of(now.route)
        k, starts = span.segment.get(i), i in span.starts
        if k is None or starts:
            self._joined_text.note(call)
        if now is None or now.route is None:
            return None
        for skipped_by in now.skipped:
            if i > now.route.segments[skipped_by].end:
                now.late_ends[i] = skipped_by  # this pass left the segment's last block out
        if i in now.late_ends:
            self._put(call, now.close(now.late_ends[i], self._values(call)))
        if k is None:
            return call.args, call.kwargs
        if starts and on and now.task is None:
            self._decide(now, k, i, block, call)
        if k in now.kept:
            if starts:
                self._put(call, now.open(k, self._values(call)))
            self._check_inside(i, call, now.kept[k])
            self._gather(now, k, i, block, call)
        return call.args, call.kwargs

    def _spans_of(self, route: Route) -> _Span:
        """Return the blocks of a route, of which a schedule of the rate has one for each pass."""
        if route not in self._spans:
            return _span(route)
        return self._spans[route]

    def _values(self, call: Call) -> list[Any]:
        """Return the tokens of a call and what blocks hand on."""
        return [call.tokens, *(call.get(name) for name in call.signature.carry)]

    def _put(self, call: Call, values: Sequence[Any]) -> None:
        """Replace the tokens of a call and what blocks hand on."""
        for name, value in zip((call.signature.tokens, *call.signature.carry), values, strict=True):
            if value is not None:
                call.put(name, value)

    def _after(
        self, i: int, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Hook after block `i`: put the tokens back where a segment ends."""
        now = self._passes.current()
        if now is None or now.route is None:
            return None
        k = self._spans_of(now.route).segment.get(i)
        if k not in now.kept or i != now.route.segments[k].end:
            return None
        call = Call(self._signatures[i], args, kwargs)
        found = self._arguments.get(i)
        per_token = {*call.signature.tables, *(found.rows if found else ())}
        return replace_rows(output, call, partial(now.close, k), call.text_rows(per_token))

    def _check_inside(self, i: int, call: Call, kept: KeptTokens) -> None:
        """Refuse a call inside a segment with other tokens than those that stay, or a mask."""
        tokens, expected = call.tokens.shape[1], kept.move.kept
        if tokens != expected:
            raise AttachError(
                f"{tokens} tokens come into block {i} where {expected} are in the route; the model "
                "changes its sequence inside the route, so end it before that block"
            )
        call.refuse_masks(kept.length)

    def _per_token(
        self,
        i: int,
        block: nn.Module,
        call: Call,
        rows: Rows,
        bounds: Callable[[], tuple[int, int]],
    ) -> Arguments:
        """Return which arguments of block `i` have a row for each token; see `examine`."""
        known = self._arguments.get(i)
        if known and all(unit.name in known.seen for unit in candidates(call, rows)):
            return known
        where = f"block {i} ({call.signature.name})"
        if self._own:
            found = by_sizes(call, rows, where)
        elif rows.length < 3 or not len(call.tokens):
            return Arguments({}, frozenset())  # too little to look at
        else:
            found = examine(inner(block), call, rows, bounds(), self._ordered, where)
        if known:
            found = Arguments(
                {**known.rows, **found.rows}, known.seen | found.seen, found.text_last
            )
        self._arguments[i] = found
        return found

    def _decide(self, now: ForwardPass, k: int, i: int, block: nn.Module, call: Call) -> None:
        """Decide which tokens stay in segment `k` of a pass, before its first block `i`."""
        assert now.route is not None
        x = call.tokens
        length = x.shape[1]
        positions, tokens = routable_positions(self.protect, self.prefix, x)
        protected = length - tokens
        if tokens < 1:
            cause = "protect" if protected > self.prefix else f"prefix={self.prefix}"
            raise AttachError(
                f"{cause}: {length} tokens come into block {i}, and none of them is the image's"
            )
        self._joined_text.check(call, k, tokens, self.prefix)
        if not (self._prefix_stated or self._protect_stated):
            refuse_unknown_prefix(call, self.grid, self._is_model)
        grid = _grid_of_call(self.grid, self._grid_stated, self.selection, tokens, protected)
        outer = Layout(grid, prefix=protected, device=x.device)
        call.refuse_masks(length)
        rows = Rows(call, length, tokens, self.prefix)
        found = self._per_token(i, block, call, rows, lambda: _bounds(positions, length))
        ids = ids_of_segment(self.ids, now.route, k)
        if ids is None:
            shared = self._shares_subset(call, rows, found)
            ids = self._draw(now, k, call, outer, shared)
        elif self.keep is not None:
            raise AttachError("keep and ids are both set, and ids already are the tokens that stay")
        check_ids(ids, outer.grid, len(x))
        now.kept[k] = KeptTokens.select(outer, ids, positions, length, self.prefix)
        self.inner = tuple(kept.layout for kept in now.kept.values())

    def _draw(self, now: ForwardPass, k: int, call: Call, outer: Layout, shared: bool) -> Tensor:
        """Draw the ids of the tokens that stay in segment `k`; those of `keep` are among them."""
        assert now.route is not None
        x, tokens = call.tokens, outer.tokens
        rate_keeps = keep_count(tokens, now.route.segments[k].rate)
        draws = now.draws(self.seed, len(x), x.device)
        ids = replace(self.selection, shared=shared).ids(draws, k, outer.grid, rate_keeps)
        if self.keep is None:
            return ids
        ids = force_keep(ids, self.keep, draws.uniform(f"keep.{k}", tokens))
        if shared and ids.shape[1] > rate_keeps and not self._warned:
            self._warn_of_united_masks(self.keep, rate_keeps, ids.shape[1], tokens)
        return ids

    def _shares_subset(self, call: Call, rows: Rows, found: Arguments) -> bool:
        """Whether samples keep the same tokens: as the selection says, or as they share tables."""
        shared = self.selection.shared
        if self.automatic and len(call.tokens) > 1:
            for table, dimension in _tables(call, rows, found):
                shared |= rows.is_shared(table, dimension)
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

    def _gather(self, now: ForwardPass, k: int, i: int, block: nn.Module, call: Call) -> None:
        """Gather the rows of a block's per-token arguments."""
        kept = now.kept[k]
        length, routable = kept.length, kept.length - kept.layout.prefix
        rows = Rows(call, length, routable, kept.front)
        found = self._per_token(i, block, call, rows, lambda: _bounds(kept.positions, length))
        rows.text_last = found.text_last
        for name in (*call.signature.tables, *found.rows):
            value = call.get(name)
            if value is None:
                continue
            source, gathered = now.tables.get((k, name), (None, None))
            if source is not value:
                items, spec = tree_flatten(value)
                for position, item in enumerate(items):
                    dimension = _dimension(call, rows, found, name, value, item)
                    if dimension is not None:
                        items[position] = rows.take(item, dimension, kept)
                gathered = tree_unflatten(items, spec)
                now.tables[k, name] = value, gathered
            call.put(name, gathered)


_NOWHERE = _span(Route())
_ROUTED = (
    "block {i} has a route already (a copy has that of its original); call remove() on what the "
    "first attach returned, or copy before attaching"
)


def _dimension(
    call: Call, rows: Rows, found: Arguments, name: str, value: Any, item: Any
) -> int | None:
    """Return which dimension of a tensor in an argument counts tokens; None for none."""
    if not isinstance(item, Tensor):
        return None
    if name in call.signature.tables:
        return rows.dimension(item)
    index = next(i for i, leaf in enumerate(leaves(value)) if leaf is item)
    dims = rows.dimensions(item) if index in found.rows.get(name, ()) else []
    require(
        len(dims) <= 1,
        f"argument {name} of shape {tuple(item.shape)} has several dimensions of {rows.length} "
        f'tokens; pass extra=("{name}",) if it has a row for each',
        AttachError,
    )
    return dims[0] if dims else None


def _tables(call: Call, rows: Rows, found: Arguments) -> Iterator[tuple[Tensor, int]]:
    """Return the per-token tensors among a call's arguments, and which dimension counts tokens."""
    for name in (*call.signature.tables, *found.rows):
        value = call.get(name)
        for leaf in leaves(value):
            dimension = _dimension(call, rows, found, name, value, leaf)
            if dimension is not None:
                yield leaf, dimension


def _bounds(positions: Tensor, length: int) -> tuple[int, int]:
    """Return how many tokens before the first and after the last that may skip never do."""
    return int(positions.min()), length - 1 - int(positions.max())


def _schedule(route: str | Route | RouteSchedule, steps: Any, depth: int) -> RouteSchedule:
    """Return the route at each progress, with absolute block indices."""
    stages = (
        RouteSchedule(((0.0, route),)) if isinstance(route, Route) else RouteSchedule.parse(route)
    )
    require(
        steps is None or (_is_integer(steps) and steps > 0),
        f"steps={steps!r}: expected the number of training passes in the run, an integer > 0",
        AttachError,
    )
    changes = len(stages.stages) > 1 or stages.factor.kind != "constant" or stages.off_after < 1
    require(
        not changes or steps,
        f"route={stages} changes during training; pass steps= with the number of training passes "
        "in the run",
        ScheduleError,
    )
    return stages.resolve(depth, "the list")


def _has_route(block: nn.Module) -> bool:
    """Whether a hook on the block, which its copies have too, is of a route not removed."""
    for hook in block._forward_pre_hooks.values():
        owner = getattr(hook, "route_of", None)
        if owner is not None and owner._handles:
            return True
    return False


def _parse_grid(grid: Any) -> tuple[int, int] | None:
    """Return a grid of tokens as plain integers; None is unknown."""
    if grid is None:
        return None
    pair = isinstance(grid, Sequence) and [isinstance(side, Integral) for side in grid]
    require(
        pair == [True, True] and min(grid) > 0,
        f"grid={grid!r}: expected (rows, columns), such as grid=(16, 16)",
        AttachError,
    )
    return int(grid[0]), int(grid[1])


def _parse_prefix(prefix: Any, signatures: Sequence[Signature], is_model: bool) -> int:
    """Return the number of prefix tokens; a list of timm blocks does not determine it."""
    refuse_prefix(signatures, prefix)
    timm = any(signature.library == "timm" for signature in signatures)
    require(
        prefix is not None or is_model or not timm,  # their sequences begin with a class token
        "the number of class and register tokens before the image's is unknown; pass the model "
        "instead of its blocks, or prefix=1 (prefix=0 if there are none)",
        AttachError,
    )
    if prefix is None:
        return 0
    require(
        _is_integer(prefix) and prefix >= 0,
        f"prefix={prefix}: expected the number of tokens before the image's, an integer >= 0",
        AttachError,
    )
    return int(prefix)


def _parse_seed(seed: Any) -> int:
    """Return the seed as a plain integer."""
    require(_is_integer(seed), f"seed={seed!r}: expected an integer", AttachError)
    return int(seed)


def _parse_step(step: Any) -> int:
    """Return the number of a routed pass as a plain integer."""
    require(
        _is_integer(step) and step >= 0,
        f"step={step!r}: expected the number of the next routed pass, an integer >= 0",
        AttachError,
    )
    return int(step)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_selection(selection: Selection, grid: tuple[int, int] | None) -> None:
    """Refuse a selection that needs a grid where none is known, or scans."""
    require(
        grid is not None or selection.mode in WITHOUT_GRID or selection.mode == "unsorted",
        f"selection {selection.mode} needs the grid of tokens; pass grid=(rows, columns)",
        AttachError,
    )
    require(
        selection.mode != "unsorted",
        "selection unsorted shuffles scans, and these blocks have none",
        AttachError,
    )


def _grid_of_call(
    grid: tuple[int, int] | None, is_stated: bool, selection: Selection, tokens: int, protected: int
) -> tuple[int, int]:
    """Return the grid of the tokens of a call that may skip: one row if it is unknown.

    Args:
        grid: The grid that was stated, or that of the model.
        is_stated: Whether it was stated.
        selection: How the tokens that stay are chosen.
        tokens: Tokens that may skip.
        protected: All others of the sequence.
    """
    if grid is not None and grid[0] * grid[1] == tokens:
        return grid
    require(
        not (is_stated and protected),
        f"{tokens} tokens are neither prefix nor protected, but grid={grid} has another number: "
        "expected prefix= and protect= to cover all but the image, or this input's grid",
        AttachError,
    )
    require(
        selection.mode in WITHOUT_GRID,
        f"{tokens} tokens come in where grid={grid} has another number; pass this input's grid of "
        "tokens, grid=(rows, columns)",
        AttachError,
    )
    return 1, tokens


def _check_arguments(key: str, names: Sequence[str], signatures: Sequence[Signature]) -> None:
    """Refuse names, given for `key`, that are no argument of any block in the route."""
    for name in names:
        accepted = [block.any_name or name in block.positions for block in signatures]
        if signatures and not any(accepted):
            arguments = signatures[0].positions
            raise AttachError(
                f"{key}: the blocks have no argument {name}; they have {', '.join(arguments)}"
                f"{suggest(name, arguments)}"
            )


attach = Attached  # the public name, a verb
