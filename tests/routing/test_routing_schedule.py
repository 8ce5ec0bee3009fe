"""Schedules and the options of a run: parse, print, values, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import RouteSchedule, Routing, RoutingOptions, Schedule, Selection, UserError

factors = st.floats(0, 4)
marks = st.floats(0, 1, exclude_min=True)


@st.composite
def schedules(draw):
    kind = draw(st.sampled_from(["constant", "linear", "cosine", "steps"]))
    if kind == "constant":
        return Schedule(kind, ((0.0, draw(factors)),))
    if kind == "steps":
        starts = [0.0, *sorted(draw(st.lists(marks, max_size=3, unique=True)))]
        return Schedule(kind, tuple((at, draw(factors)) for at in starts))
    return Schedule(kind, ((0.0, draw(factors)), (draw(marks), draw(factors))))


@given(schedules(), st.floats(0, 1))
def test_print_parse_and_range(schedule, progress):
    assert Schedule.parse(str(schedule)) == schedule
    values = [factor for _, factor in schedule.points]
    assert min(values) - 1e-9 <= schedule.at(progress) <= max(values) + 1e-9
    assert schedule.at(0) == values[0] and abs(schedule.at(1) - values[-1]) < 1e-9
    assert schedule.largest == max(values)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("constant", [1, 1, 1]),
        ("constant:0.5", [0.5, 0.5, 0.5]),
        ("linear", [1, 0.5, 0]),
        ("linear:0:1:0.5", [0, 1, 1]),
        ("cosine:1:0", [1, 0.5, 0]),
        ("steps:1@0+0.25@0.5+0@0.75", [1, 0.25, 0]),
    ],
)
def test_values(text, values):
    schedule = Schedule.parse(text)
    assert [schedule.at(p) for p in (0, 0.5, 1)] == pytest.approx(values)


@pytest.mark.parametrize(
    "text",
    ["linaer:1:0", "linear:1", "linear:1:0:2", "linear:a:b", "steps", "steps:1@0.5", "steps:1@0+2@0",
     "constant:-1", "constant:nan", "cosine:1:0:0"],
)  # fmt: skip
def test_what_is_no_schedule(text):
    with pytest.raises(UserError, match="schedule") as caught:
        Schedule.parse(text)
    assert "\n" not in str(caught.value)


def test_route_schedules():
    stages = RouteSchedule.parse("auto/0.5:4-8@0.75/0.9:none")
    assert RouteSchedule.parse(str(stages)) == stages
    stages = stages.resolve(12)
    assert str(stages) == "2-8/0.5:4-8@0.75/0.9:none"
    assert [str(stages.at(p)) for p in (0, 0.49, 0.5, 0.95)] == ["2-8", "2-8", "4-8@0.75", "none"]
    assert str(RouteSchedule.parse("0-4+6-9")) == "0-4+6-9"
    for text in ("2-8/none", "2-8/0.9:nope", "2-8/0.9:none/0.5:1-3", "2-8/2:none", "2-8/x:none"):
        with pytest.raises(UserError):
            RouteSchedule.parse(text)
    with pytest.raises(UserError, match="12 blocks"):
        RouteSchedule.parse("2-8/0.5:2-20").resolve(12)


def test_options_over_a_run():
    options = RoutingOptions(schedule="linear:1:0", off_after=0.9)
    routes = options.schedule_route("0-4+6-9@0.25", 12)
    options.check(routes, 12, (8, 8))
    assert str(routes.at(0)) == "0-4+6-9@0.25"
    assert str(routes.at(0.5)) == "0-4@0.25+6-9@0.125"
    assert not routes.at(0.9) and not routes.at(0.95)
    assert not RoutingOptions().schedule_route("2-8/0.5:none", 12).at(0.5)
    assert not RoutingOptions(schedule="linear:1:0").schedule_route("2-8", 12).at(1.0)
    always = RoutingOptions("blocks", block=4, shared=True)
    constant = always.schedule_route("auto", 12)
    assert str(constant.at(0.3)) == "2-8" and constant.at(0.3) is constant.at(0)  # parsed once
    assert Routing(constant.at(0), always).selection == Selection("blocks", shared=True, block=4)


def check(route: str, options: RoutingOptions) -> None:
    """Check options with a route of a model of 12 blocks and 8x8 tokens."""
    options.check(options.schedule_route(route, 12), 12, (8, 8))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"route": "8-2"}, "try route=2-8"),
        ({"reinsert": "sum"}, "sum_input"),
        ({"remove": "after:²"}, "after:4"),
        ({"route": "0-2+4-6", "reinsert": "none"}, "single segment"),
        ({"reinsert": "none", "remove": "never"}, "try remove=start"),
        ({"reinsert": "none", "random_end": True}, "try random_end=false"),
        ({"remove": "after:9"}, "block 9 is not in route 2-8; try remove=after:3"),
        ({"remove": "after:4", "random_end": True}, "try remove=start"),
        ({"schedule": "linear:1:3"}, "must stay below 1"),
        ({"selection": "quad"}, "rate 0.75"),
        ({"selection": "quad", "route": "2-8@0.75", "schedule": "linear:1:0"}, "schedule=constant"),
        ({"selection": "quad", "route": "2-8@0.75", "schedule": "constant:0.5"}, "and not 40"),
        ({"off_after": 2}, "off_after=2"),
        ({"path_drop": 0.1}, "learned=fuse"),
        ({"route": "none", "learned": "fuse"}, "try route=auto"),
        ({"route": "2-4+6-8", "learned": "fuse"}, "belongs to one span"),
        ({"learned": "fuse", "random_end": True}, "random_end=false"),
        ({"learned": "fuse", "reinsert": "sum_input"}, "reinsert=identity"),
    ],
)
def test_options_that_cannot_run(options, part):
    with pytest.raises(UserError) as caught:
        check(options.pop("route", "auto"), RoutingOptions(**options))
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_good_config_passes():
    check("2-8@0.75", RoutingOptions("quad"))
    check("2-8@0.375", RoutingOptions("quad", schedule="constant:2"))
    check("auto@0.75", RoutingOptions(learned="fuse", path_drop=0.1))
