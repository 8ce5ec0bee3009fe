"""A training step never waits for its GPU: what `test_host_sync.py` runs in a process of its own.

Where there is a GPU, torch itself watches (`set_sync_debug_mode`). Where there is none, the step
runs on fake CUDA tensors, which have a device and a shape and no values: reading one raises, and
so does, here, every copy to the CPU and every blocking copy from it. Kernels are the torch ones
and the backward pass is left out (autograd wants a real device for it).
"""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from backbones.ops import dispatch, native
from experiments import components as build
from experiments.benchmark import step_times
from experiments.benchmark.bench_options import BenchOptions
from experiments.data.dataset import create
from experiments.training import step as training_step
from routing import rng
from routing.route import Route

COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in COPIES:
            into = func is COPIES[1]
            source = args[1] if into else args[0]
            target = args[0].device if into else torch.device(kwargs.get("device") or source.device)
            free = kwargs.get("non_blocking") or (into and len(args) > 2 and args[2])
            if source.device.type != target.type and not (free and target.type == "cuda"):
                raise AssertionError(f"a copy from {source.device} to {target} waits for the device")
        return func(*args, **kwargs)


@pytest.fixture
def fake_gpu(monkeypatch):
    make = build.make_model

    def made_on_gpu(*args):
        with torch.device("cuda"):
            model = make(*args)
        monkeypatch.setattr(model, "to", lambda device: model)
        return model

    monkeypatch.setattr(build, "make_model", made_on_gpu)
    monkeypatch.setattr(training_step, "SampleOrder", lambda *_: SimpleNamespace(lookup=lambda at: at))
    monkeypatch.setattr(rng, "kernel", lambda: None)
    monkeypatch.setattr(dispatch, "KERNELS", dict.fromkeys(dispatch.KERNELS, ()))
    monkeypatch.setattr(native.ACTIVE, "choices", {})
    monkeypatch.setattr(step_times, "open_gates", lambda model: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.device("cuda")


def prepared(name, route, selection, device, **options):
    o = BenchOptions(backbone=(name,), depth=4, batch=4, selection=selection, **options)
    return step_times.Step(step_times.Case(name, "S/2", 64, Route.parse(route), 0.5), o, device)


CASES = [
    *((name, "1-2", "random") for name in ("dit", "mamba", "rwkv")),
    ("dit", "none", "random"),
    ("dit", "0-1,3-3", "rows"),
    ("dit", "1-2", "columns"),
    ("dit", "1-2", "stride"),
    ("dit", "1-2@0.75", "quad"),
    ("mamba", "1-2", "unsorted"),
    ("rwkv", "1-2", "blocks"),
]


@pytest.mark.parametrize(("name", "route", "selection"), CASES)
def test_a_step_on_a_gpu_reads_nothing_back(name, route, selection, fake_gpu):
    step = prepared(name, route, selection, fake_gpu)

    def backward(loss):
        for p in step.params:
            p.grad = torch.empty_like(p)

    step.training_step.backward = backward
    step()  # What is made once (tables, moments) may wait.
    with NoSync():
        step()
        step()


def test_the_check_sees_what_waits(fake_gpu):
    x = torch.ones(3, device=fake_gpu)
    with NoSync():
        for wait in (lambda: x.cpu(), lambda: torch.ones(3).to(fake_gpu), lambda: torch.tensor([1.0], device=fake_gpu)):
            with pytest.raises(AssertionError, match="waits for the device"):
                wait()
        for read in (lambda: float(x.sum()), lambda: x.nonzero(), lambda: bool(x.any()), lambda: x.tolist()):
            with pytest.raises(Exception, match="aten"):
                read()


@pytest.mark.parametrize(("name", "task"), [("digits", "class"), ("scenes", "class"), ("scenes", "text")])
def test_computed_samples_are_made_on_a_gpu_without_waiting(name, task, monkeypatch):
    data = create({"name": name}, task=task)
    monkeypatch.setattr(rng, "kernel", lambda: None)
    monkeypatch.setattr(data, "_check", lambda *_: None)  # reads sample numbers, which are the host's
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        data.device = torch.device("cuda")
        for splits in (vars(data).get(key, {}) for key in ("_pixels", "_labels")):
            splits.update({key: mode.from_tensor(value).to("cuda") for key, value in splits.items()})
        if hasattr(data, "_scaled"):
            data._scaled = mode.from_tensor(data._scaled).to("cuda")
        index = torch.empty(4, dtype=torch.int64)
        data.batch(index, None)
        with NoSync():
            batch = data.batch(index, None)
        assert {t.device.type for t in (batch.x, batch.y, batch.text) if t is not None} == {"cuda"}
