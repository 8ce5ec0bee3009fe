"""Selections: exact counts, ascending ids, whole groups, fair marginals."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import MODES, Draws, RoutingError, Selection, keep_count, select
from routing.options import CONSTRAINTS, only_rate

FREE = [mode for mode in MODES if mode not in CONSTRAINTS]


def numbers(batch, n, seed=0):
    return Draws(seed, 0, torch.arange(batch)).uniform("route.0", n)


@st.composite
def cases(draw):
    grid = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    keep = draw(st.integers(1, grid[0] * grid[1]))
    return draw(st.sampled_from(FREE)), grid, keep, draw(st.integers(1, 4)), draw(st.integers(0, 99))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_exact_count_ascending_in_range(case):
    mode, grid, keep, block, seed = case
    n = grid[0] * grid[1]
    ids = select(mode, grid, keep, numbers(3, n, seed), block)
    assert ids.shape == (3, keep) and ids.dtype == torch.int64
    assert (ids[:, 1:] > ids[:, :-1]).all() and ids.min() >= 0 and ids.max() < n


@settings(max_examples=100, deadline=None)
@given(cases())
def test_whole_groups_but_for_one(case):
    _, grid, keep, block, seed = case
    n = grid[0] * grid[1]
    token = torch.arange(n)
    for mode in ("rows", "columns", "blocks"):
        sides = {"rows": (1, grid[1]), "columns": (grid[0], 1), "blocks": (block, block)}[mode]
        # A tiling that does not fill the grid may lie anywhere.
        free = [g if g % s else 1 for g, s in zip(grid, sides, strict=True)]
        for ids in select(mode, grid, keep, numbers(2, n, seed), block):
            partial = []
            for down, right in itertools.product(*map(range, free)):
                row, column = (token // grid[1] + down) % grid[0], (token + right) % grid[1]
                group = row // sides[0] * n + column // sides[1]
                kept = torch.bincount(group[ids], minlength=n * n)
                size = torch.bincount(group, minlength=n * n)
                partial.append(int(((kept > 0) & (kept < size)).sum()))
            assert min(partial) <= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grid", [(8, 8), (6, 10), (7, 5), (5, 5), (4, 5)])
def test_every_token_stays_equally_often(mode, grid):
    n = grid[0] * grid[1]
    rate = only_rate(mode)
    keep = n // 2 - 3 if rate is None else keep_count(n, rate)
    if mode in CONSTRAINTS:
        try:
            CONSTRAINTS[mode].check(grid, keep)
        except RoutingError as error:
            assert grid != (8, 8)
            pytest.skip(str(error))
    batch = 20000 if mode == "blocks" else 6000
    counts = torch.bincount(select(mode, grid, keep, numbers(batch, n), 2).flatten(), minlength=n)
    assert (counts / batch - keep / n).abs().max() < 5 * (0.25 / batch) ** 0.5


def test_subsets_are_uniform():
    """All 6 pairs of 4 tokens occur equally often."""
    ids = select("random", (2, 2), 2, numbers(6000, 4))
    counts = torch.bincount(ids[:, 0] * 4 + ids[:, 1])
    assert (counts[counts > 0] - 1000).abs().max() < 160 and (counts > 0).sum() == 6


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_stride_is_even(height, width, data):
    n = height * width
    keep = data.draw(st.integers(1, n))
    ids = select("stride", (height, width), keep, numbers(2, n))
    around = torch.cat((ids, ids[:, :1] + n), 1).diff(dim=1)
    assert around.min() >= n // keep and around.max() <= -(-n // keep)


@pytest.mark.parametrize("grid", [(4, 4), (2, 8), (8, 6)])
def test_quad_keeps_one_of_every_square(grid):
    n = grid[0] * grid[1]
    for ids in select("quad", grid, n // 4, numbers(5, n)):
        squares = ids // grid[1] // 2 * grid[1] + ids % grid[1] // 2
        assert squares.unique().numel() == n // 4


def test_samples_differ_unless_shared():
    draws = Draws(0, 4, torch.arange(5))
    for mode in FREE:
        ids = Selection(mode).ids(draws, 0, (8, 8), 32)
        assert ids.shape == (5, 32)
        assert len(ids.unique(dim=0)) == (2 if mode == "stride" else 5)  # every second token
        shared = Selection(mode, shared=True).ids(draws, 0, (8, 8), 32)
        assert shared.shape == (1, 32)
        again = Selection(mode, shared=True).ids(Draws(0, 4, torch.tensor([9])), 0, (8, 8), 32)
        assert torch.equal(shared, again)
    assert not torch.equal(Selection().ids(draws, 0, (8, 8), 32), Selection().ids(draws, 1, (8, 8), 32))


def test_unsorted_keeps_ids_ascending_and_draws_a_shuffle():
    draws = Draws(0, 0, torch.arange(3))
    unsorted = Selection("unsorted")
    assert torch.equal(unsorted.ids(draws, 0, (4, 4), 8), Selection().ids(draws, 0, (4, 4), 8))
    shuffle = unsorted.shuffle(draws, 0, 8)
    assert torch.equal(shuffle.sort(1).values, torch.arange(8).expand(3, 8))
    assert (shuffle != torch.arange(8)).any(1).all()
    assert Selection().shuffle(draws, 0, 8) is None


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Selection("row"), "did you mean rows"),
        (lambda: Selection(block=0), "block=0: expected a side of at least 1"),
        (lambda: select("quad", (8, 8), 32, torch.rand(1, 64)), "2-8@0.75"),
        (lambda: select("quad", (7, 8), 14, torch.rand(1, 56)), "7x8 is odd"),
        (lambda: select("quad", (4, 4), 5, torch.rand(1, 16)), "not 5"),
        (lambda: select("random", (4, 4), 17, torch.rand(1, 16)), "keeps 1..16"),
        (lambda: select("spiral", (4, 4), 8, torch.rand(1, 16)), "expected one of"),
    ],
)
def test_errors(make, part):
    with pytest.raises(RoutingError) as caught:
        make()
    assert part in str(caught.value) and "\n" not in str(caught.value)
