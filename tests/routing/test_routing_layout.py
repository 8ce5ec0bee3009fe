"""Layout against plain Python: paths, restricted orders, gaps, neighbours, tables."""

from __future__ import annotations

import functools

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import Layout, LayoutError
from routing.grid import PATHS, path

NAMES = [*PATHS, *(f"{name}:reversed" for name in PATHS)]
quick = settings(max_examples=40, deadline=None)


@st.composite
def subsets(draw):
    """A grid, a prefix and ids of a batch, in any order."""
    grid = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    n = grid[0] * grid[1]
    keep = draw(st.integers(1, n))
    rows = [draw(st.permutations(range(n)))[:keep] for _ in range(draw(st.integers(1, 3)))]
    return grid, draw(st.integers(0, 3)), torch.tensor(rows)


def rows_of(table, batch):
    """A per-sample view of a table that may be shared."""
    return table.expand(batch, *table.shape) if table.dim() == 1 else table


@pytest.mark.parametrize("grid", [(4, 6), (5, 3), (1, 5), (5, 1)])
def test_paths_are_the_raster_and_the_eight_snakes(grid):
    assert sorted(PATHS) == ["raster", *(f"zigzag:{k}" for k in range(8))]
    for name in NAMES:
        assert path(grid, name).tolist() == reference.scan_order(grid, 0, name)
    if 1 not in grid:
        assert len({tuple(path(grid, name).tolist()) for name in PATHS}) == 9


def presence(grid, prefix, ids):
    """Which tokens of the full sequence are present, bool `(B, T)`, prefix included."""
    present = torch.ones(len(ids), prefix + grid[0] * grid[1], dtype=torch.bool)
    present[:, prefix:] = False
    return present.scatter(1, prefix + ids, True)


@quick
@given(subsets(), st.sampled_from(NAMES))
def test_an_order_is_the_path_filtered_with_its_positions_and_gaps(case, name):
    grid, prefix, ids = case
    layout, present, order = Layout(grid, ids, prefix), presence(*case), reference.scan_order(grid, prefix, name)
    gaps_of_tokens = reference.gaps_along(order, present, prefix)
    tables = layout.permutation(name), layout.positions(name), layout.gaps(name)
    assert all((table.dim() == 1) == (len(ids) == 1) for table in tables)
    permutation, positions, gaps = (rows_of(table, len(ids)) for table in tables)
    for b in range(len(ids)):
        tokens = present[b].nonzero().flatten()
        steps = [step for step, token in enumerate(order) if present[b, token]]
        scanned = [order[step] for step in steps]
        assert tokens[permutation[b]].tolist() == scanned
        assert positions[b].tolist() == steps
        assert torch.equal(gaps[b].double(), gaps_of_tokens[b, scanned])


@quick
@given(subsets(), st.sampled_from(["self", "zero", "nearest"]))
def test_neighbours(case, missing):
    grid, prefix, ids = case
    layout, present = Layout(grid, ids, prefix), presence(*case)
    table = layout.neighbours(missing).expand(len(ids), 4, -1)
    assert (table[:, :, :prefix] == layout.length).all()
    for b, row in enumerate(ids.sort(1).values.tolist()):
        local = {prefix + token: prefix + i for i, token in enumerate(row)} | {None: layout.length}
        for token in row:
            for side, step in enumerate([(0, -1), (0, 1), (-1, 0), (1, 0)]):
                y, x = divmod(token, grid[1])
                expected = reference.neighbour(b, y, x, step, grid, present, prefix, missing)
                assert table[b, side, local[prefix + token]] == local[expected]


@quick
@given(subsets(), st.sampled_from(NAMES), st.integers(0, 2))
def test_scans_are_undone(case, name, extra):
    grid, prefix, ids = case
    layout = Layout(grid, ids, prefix)
    batch = len(ids) if len(ids) > 1 else 1 + extra  # one row of ids serves any batch
    x = torch.randn(batch, layout.length, 2)
    y = layout.to_scan(x, name)
    perm = rows_of(layout.permutation(name), batch)
    assert torch.equal(y, torch.stack([row[p] for row, p in zip(x, perm, strict=True)]))
    assert torch.equal(layout.from_scan(y, name), x)


@quick
@given(subsets(), st.sampled_from(NAMES))
def test_all_ids_in_any_order_are_the_full_layout(case, name):
    grid, prefix, _ = case
    n = grid[0] * grid[1]
    full, explicit = Layout(grid, prefix=prefix), Layout(grid, torch.randperm(n), prefix)
    assert full.is_full and not explicit.is_full and full.length == explicit.length == full.full_length
    assert torch.equal(full.permutation(name), explicit.permutation(name))
    for one, other in zip(full.scan_order(name) or (), explicit.scan_order(name) or (), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(full.gaps(name), explicit.gaps(name))
    assert torch.equal(full.positions(name), explicit.positions(name))
    for missing in ("self", "zero", "nearest"):
        assert torch.equal(full.neighbours(missing), explicit.neighbours(missing))


def test_gradients_of_scans_and_moves_are_exact():
    outer = Layout((2, 3), prefix=1)
    for ids in (None, torch.tensor([[0, 2, 5], [1, 3, 4]]), torch.tensor([[0, 4, 5]])):
        layout = outer if ids is None else outer.subset(ids)
        x = torch.randn(2, 7, 2, dtype=torch.float64, requires_grad=True)
        y = torch.randn(2, layout.length, 2, dtype=torch.float64, requires_grad=True)
        for move in (layout.to_scan, layout.from_scan):
            scan = functools.partial(move, name="zigzag:3")
            assert torch.autograd.gradcheck(scan, y) and torch.autograd.gradgradcheck(scan, y)
        if ids is not None:
            move = outer.move_to(layout)
            assert torch.autograd.gradcheck(move.take, x) and torch.autograd.gradcheck(move.put, (x, y))
            assert torch.autograd.gradgradcheck(move.take, x)


def test_full_layouts_share_tables_and_subsets_compute_once():
    a, b = Layout((4, 4), prefix=2), Layout((4, 4), prefix=2)
    assert a.permutation("zigzag:1") is b.permutation("zigzag:1")
    assert a.gaps("raster") is b.gaps("raster") and a.neighbours() is b.neighbours()
    sub = a.subset(torch.tensor([[1, 2, 9], [0, 4, 5]]))
    for make in (lambda: sub.permutation("zigzag:1"), lambda: sub.gaps("zigzag:1"), sub.neighbours):
        assert make() is make()


def test_tables_made_under_inference_mode_serve_training():
    with torch.inference_mode():
        Layout((3, 11)).to_scan(torch.zeros(1, 33, 1), "zigzag:6")
        Layout((3, 11)).neighbours()
    x = torch.randn(1, 33, 1, requires_grad=True)
    Layout((3, 11)).to_scan(x, "zigzag:6").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@quick
@given(subsets())
def test_tables_follow_the_tokens(case):
    grid, prefix, ids = case
    n = grid[0] * grid[1]
    layout = Layout(grid, ids, prefix)
    table, values = torch.randn(n, 2), torch.randn(len(ids), n, 2)
    for b in range(len(ids)):
        present = ids[b].sort().values
        assert torch.equal(layout.take(table)[b], table[present])
        assert torch.equal(layout.take_batched(values)[b], values[b][present])
        assert layout.mask()[b].nonzero().flatten().tolist() == present.tolist()
    full = Layout(grid, prefix=prefix)
    assert torch.equal(full.take(table)[0], table) and full.take_batched(values) is values
    assert full.mask().all() and full.mask().shape == (1, n)


@quick
@given(subsets())
def test_moves_take_and_put(case):
    grid, prefix, ids = case
    outer = Layout(grid, prefix=prefix)
    inner = outer.subset(ids)
    x = torch.randn(len(ids), outer.length, 3)
    move = outer.move_to(inner)
    taken = move.take(x)
    for b, row in enumerate(inner.ids):
        assert torch.equal(taken[b], x[b][[*range(prefix), *(row + prefix).tolist()]])
    assert torch.equal(move.put(x, taken), x)
    other = move.put(x, taken + 1)
    assert torch.equal(move.take(other), taken + 1) and torch.equal(move.take(x), taken)
    assert ((other != x).any(-1).sum(1) == inner.length).all()


def test_shuffle_moves_tokens_and_leaves_geometry():
    ids = torch.tensor([[0, 3, 5, 6], [1, 2, 4, 7]])
    shuffle = torch.tensor([[2, 0, 3, 1], [3, 2, 1, 0]])
    plain, mixed = Layout((2, 4), ids, 1), Layout((2, 4), ids, 1, shuffle)
    assert torch.equal(plain.gaps("zigzag:0"), mixed.gaps("zigzag:0"))
    assert torch.equal(plain.neighbours(), mixed.neighbours())
    for name in ("raster", "zigzag:2"):
        for b in range(2):
            sorted_grid = plain.permutation(name)[b, 1:]
            assert torch.equal(mixed.permutation(name)[b, 1:], sorted_grid[shuffle[b]])
        x = torch.randn(2, 5, 2)
        y = mixed.to_scan(x, name)
        assert torch.equal(y[:, 0], x[:, 0]) and not torch.equal(y, plain.to_scan(x, name))
        assert torch.equal(mixed.from_scan(y, name), x)
    # Drawn elsewhere, ids and shuffle come to where the tokens are.
    moved = Layout((2, 4), device="meta").subset(ids, shuffle)
    assert moved.shuffle.device.type == moved.permutation("raster").device.type == "meta"


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Layout((2, 2)).permutation("zigzag:8"), "zigzag:0 .. zigzag:7"),
        (lambda: Layout((2, 2)).permutation("rastr"), "did you mean raster"),
        (lambda: Layout((2, 2)).neighbours("selff"), "did you mean self"),
        (lambda: Layout((2, 2)).move_to(Layout((2, 2))), "explicit ids"),
        (lambda: Layout((2, 2), torch.tensor([0, 3])).move_to(Layout((2, 2), torch.tensor([0]))), "needs all tokens"),
    ],
)
def test_errors(make, part):
    with pytest.raises(LayoutError) as caught:
        make()
    assert part in str(caught.value)
