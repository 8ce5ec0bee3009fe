"""The route grammar: parse and print are inverses, and a wrong route says what to type."""

from __future__ import annotations

import ast
import math
import sys
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small import ROOT

from routing.route import Route, RouteError, Segment, keep_count

ends = st.integers(-40, 40)
rates = st.floats(0, 1, exclude_min=True, exclude_max=True)
segments = st.builds(Segment, ends, ends, rates)
routes = st.builds(Route, st.lists(segments, max_size=4).map(tuple))


@st.composite
def valid(draw):
    """A depth and a resolved route that fits it."""
    depth = draw(st.integers(1, 40))
    cuts = draw(st.lists(st.integers(0, depth - 1), max_size=6, unique=True).map(sorted))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    return depth, Route(tuple(Segment(a, b, draw(rates)) for a, b in pairs))


@given(routes)
def test_print_then_parse(route):
    assert Route.parse(str(route)) == route
    assert Route.parse(str(route).replace("+", ",")) == route
    assert Route.parse(route) is route


@given(valid())
def test_valid_routes_resolve_to_themselves(case):
    depth, route = case
    assert route.resolve(depth) == route
    negative = Route(tuple(Segment(s.start - depth, s.end - depth, s.rate) for s in route.segments))
    assert negative.resolve(depth) == route
    blocks = route.sparse_blocks
    assert len(set(blocks)) == len(blocks) and all(0 <= b < depth for b in blocks)
    assert list(blocks) == sorted(blocks)
    assert route.ruler(depth).replace("[", "").replace("]", "").split() == [str(i) for i in range(depth)]


@given(segments, st.integers(1, 30))
def test_what_to_type_instead_is_a_valid_route(segment, depth):
    try:
        Route((segment,)).resolve(depth)
    except RouteError as error:
        Route.parse(str(error).rpartition("try route=")[2]).resolve(depth)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ()),
        ("auto", (Segment(2, -4),)),
        ("auto@0.75", (Segment(2, -4, 0.75),)),
        ("2-8", (Segment(2, 8),)),
        ("-10--4", (Segment(-10, -4),)),
        ("0-4,6-9", (Segment(0, 4), Segment(6, 9))),
        ("0-4+6-9@0.25", (Segment(0, 4), Segment(6, 9, 0.25))),
        (["0-4", "6-9"], (Segment(0, 4), Segment(6, 9))),
        ("[0-4,6-9]", (Segment(0, 4), Segment(6, 9))),
        (None, ()),
    ],
)
def test_forms(text, expected):
    assert Route.parse(text).segments == expected


def test_auto_is_the_guideline():
    assert str(Route.parse("auto")) == "2--4"
    at = {12: "2-8", 24: "2-20", 28: "2-24"}
    assert {d: str(Route.parse("auto").resolve(d)) for d in at} == at


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8-2", "route=8-2: start must not exceed end; blocks are 0..11; try route=2-8"),
        ("2-30", "route=2-30: mamba-S has 12 blocks, 0..11; try route=2-11"),
        ("2--20", "route=2--20: mamba-S has 12 blocks, 0..11; try route=0-2"),
        ("-2--4", "route=-2--4 (10-8 here): start must not exceed end; blocks are 0..11; try route=8-10"),
        ("0-6+4-9", "route=0-6+4-9: 4-9 must start after the end of 0-6"),
        ("6-9+0-4", "route=6-9+0-4: 0-4 must start after the end of 6-9"),
    ],
)
def test_routes_that_do_not_fit(text, message):
    with pytest.raises(RouteError) as caught:
        Route.parse(text).resolve(12, "mamba-S")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("2-8@1.5", "try route=2-8@0.5"),
        ("2-8@75%", "try route=2-8@0.75"),
        ("2-8@0", "try route=none"),
        ("2-8@1", "between 0 and 1"),
        ("2-8@half", "must be a number"),
        ("5", "try route=5-5"),
        ("2..8", "expected none, auto"),
        ("2-8+none", "none stands alone"),
        ([[1, 4]], "expected none, auto"),
        ("2-" + "9" * 5000, "expected none, auto"),
    ],
)
def test_texts_that_are_no_route(text, part):
    with pytest.raises(RouteError, match="route") as caught:
        Route.parse(text)
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("start", [2.5, "2", True, None])
def test_a_segment_begins_at_a_whole_number(start):
    with pytest.raises(RouteError, match=f"route={start}-8: expected two block indices"):
        Segment(start, 8)


def test_ruler_and_blocks():
    assert Route.parse("0-4+6-6").ruler(8) == "[0 1 2 3 4] 5 [6] 7"
    assert Route.parse("none").ruler(3) == "0 1 2"
    assert Route.parse("2-8").sparse_blocks == (2, 3, 4, 5, 6, 7, 8)
    with pytest.raises(RouteError, match="after resolve"):
        _ = Route.parse("auto").sparse_blocks


@given(st.integers(1, 5000), st.integers(0, 999), st.sampled_from([1.0, 0.5, 0.1]))
@example(100, 290, 1.0)  # 100 * 0.29 is 28.999999999999996
@example(100, 700, 0.1)  # a schedule's factor
def test_keep_count(n, thousandths, factor):
    exact = Fraction(thousandths, 1000) * Fraction(str(factor))
    assert keep_count(n, thousandths / 1000 * factor) == n - math.floor(n * exact)


def test_one_token_stays_just_below_one():
    assert keep_count(64, math.nextafter(1, 0)) == keep_count(1, 0.5) == 1


def test_routing_depends_on_torch_only():
    """The folder works alone: it imports the standard library, torch, Triton and itself."""
    for file in sorted((ROOT / "routing").rglob("*.py")):
        imported = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
        assert imported <= {*sys.stdlib_module_names, "torch", "triton", "routing"}, file
