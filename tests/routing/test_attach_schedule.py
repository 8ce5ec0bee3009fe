"""A route that changes during training, and what a checkpoint of it needs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import routing
from routing import AttachError, ScheduleError

TOKENS = 16
ROUTE = "1-2@0.75/0.5:2-3@0.5/0.75:none"  # of eight passes: four, two, two


def blocks():
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(5))


def run(layers, passes=1):
    """Return the tokens that each block saw, for each pass."""
    seen, handles = [], []
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(lambda m, a: seen[-1].append(a[0].shape[1])))
    for _ in range(passes):
        seen.append([])
        x = torch.randn(2, TOKENS, 8)
        for layer in layers:
            x = layer(x)
    for handle in handles:
        handle.remove()
    return seen


def test_a_route_changes_with_the_passes_of_training():
    layers = blocks()
    with routing.attach(layers, ROUTE, steps=8) as attached:
        assert str(attached.route) == "1-2@0.75" and "pass 0 of 8" in repr(attached)
        first = run(layers, 5)
        layers.eval()
        assert run(layers) == [[16] * 5]
        with attached.mode("always"):  # samples in between are no training
            assert run(layers) == [[16, 16, 8, 8, 16]]
        rest = run(layers.train(), 5)
        assert str(attached.route) == "none"
    assert first + rest == [[16, 4, 4, 16, 16]] * 4 + [[16, 16, 8, 8, 16]] * 2 + [[16] * 5] * 4


def test_a_resumed_run_continues_the_schedule_and_the_subsets():
    layers, ids = blocks(), []
    with routing.attach(layers, ROUTE, steps=8, seed=3) as attached:
        for _ in range(6):
            if attached.step == 3:
                state = json.loads(json.dumps(attached.state_dict()))
            run(layers)
            ids.append(attached.inner[0].ids)
    with routing.attach(layers, ROUTE, steps=8) as attached:
        attached.load_state_dict(state)
        for expected in ids[3:]:
            run(layers)
            assert torch.equal(attached.inner[0].ids, expected)
        with pytest.raises(AttachError, match=r"\{'step': 3\}: expected what state_dict"):
            attached.load_state_dict({"step": 3})


@pytest.mark.parametrize(
    ("route", "steps", "error", "part"),
    [
        (ROUTE, None, ScheduleError, "changes during training; pass steps="),
        (ROUTE, 0, AttachError, "steps=0: expected the number of training passes"),
        ("1-2/0.5", 4, ScheduleError, "expected the fraction of training"),
        ("1-2/0.5:3-9", 4, routing.RouteError, "the list has 5 blocks"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(route, steps, error, part):
    with pytest.raises(error, match=part):
        routing.attach(blocks(), route, steps=steps)


def test_every_stage_is_checked_when_it_is_attached():
    layers = nn.ModuleList([*blocks()[:4], nn.Sequential(nn.Conv1d(8, 8, 3))])
    with pytest.raises(AttachError, match="is a causal convolution"):
        routing.attach(layers, "1-2/0.5:4-4", steps=4)
