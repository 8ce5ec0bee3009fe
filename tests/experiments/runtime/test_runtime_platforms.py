"""What this machine is not: Windows, whose Python lacks half of `os`, and a GPU without float64."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from small import ROOT, overrides, small
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import backbones
from experiments.data.dataset import Batch
from experiments.runtime.errors import PACKAGES
from experiments.training.build import build_step
from experiments.training.state import Tally
from experiments.training.step import MicroBatch
from routing import Route, Routing, rng

# What Python on Windows does not have (library reference, "Availability: Unix").
MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "posix", "syslog", "triton")
NAMES = {
    "os": "O_CLOEXEC O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC chown ctermid fchown fork forkpty geteuid "
    "getgid getgroups getloadavg getpgid getpriority getresuid getsid getuid initgroups killpg lchown mkfifo mknod "
    "nice openpty posix_fadvise posix_fallocate pread preadv pwrite pwritev sched_getaffinity sched_setaffinity "
    "sched_yield sendfile setsid setuid statvfs sync sysconf uname wait",
    "signal": "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 alarm "
    "pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait",
    "time": "tzset clock_gettime_ns pthread_getcpuclockid",
}
# Libraries come first and keep what they have: theirs are other files on Windows. A file that is open cannot be renamed there, a folder cannot
# be opened, and only what may be written can be flushed; text files and pipes have an encoding of their own.
WINDOWS = f"""
import fcntl, importlib, os, pkgutil, shutil, signal, sys, time
import accelerate, filelock, hydra, jinja2, matplotlib.pyplot, pandas, psutil, rich.progress, scipy.stats
import sklearn.datasets, submitit, timm, torch._dynamo, yaml
for name in {MODULES}:
    sys.modules[name] = None
for module, names in {NAMES}.items():
    real, kept = sys.modules[module], type(sys)(module)
    vars(kept).update(vars(real))
    for other in list(sys.modules.values()):
        if isinstance(other, type(sys)) and vars(other).get(module) is real:
            vars(other)[module] = kept
    for name in names.split():
        vars(real).pop(name, None)
os = sys.modules["os"]
get, access, replace, fsync, open_ = fcntl.fcntl, os.O_ACCMODE, os.replace, os.fsync, os.open

def is_open(path):
    return any(os.path.realpath(f"/proc/self/fd/{{fd}}") == os.path.realpath(path) for fd in os.listdir("/proc/self/fd"))

def windows_replace(source, target, **other):
    if is_open(source) or is_open(target):
        raise PermissionError(13, "used by another process", str(source))
    replace(source, target, **other)

def windows_fsync(fd):
    if get(fd, 3) & access == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor")
    fsync(fd)

def windows_open(path, *rest, **other):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return open_(path, *rest, **other)

os.replace, os.fsync, os.open = windows_replace, windows_fsync, windows_open
"""
COMMANDS = """
from experiments.run import main
from experiments.runtime.command import run_command
words = sys.argv[1:]
assert run_command(main, [*words, "dry=true"]) == 0
assert run_command(main, words, computes=True) == 0
assert run_command(main, [*words, "train.steps=3"]) == 0
"""
IMPORTS = f"""
for package in {PACKAGES}:
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith(("_triton", "__main__")):
            importlib.import_module(found.name)
"""


@pytest.mark.slow
def test_on_windows_every_module_is_imported_and_a_run_trains_and_resumes(tmp_path):
    words = overrides(tmp_path, "backbone=mamba", "route=1-2", "train.steps=2", "train.save_every=1", "eval=digits")
    encodings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    environment = os.environ | encodings | {"TREAD_NATIVE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS + COMMANDS + IMPORTS, *words],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step 2" in done.stdout
    assert not list(tmp_path.rglob("*.tmp*")), "a temporary file stayed"


class Narrow(TorchDispatchMode):
    """Refuse what MPS refuses: a float64 tensor on the device (here `meta`)."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.is_meta and x.dtype in (torch.float64, torch.complex128):
                raise TypeError(f"{function} makes a float64 tensor")
        return made


@pytest.mark.parametrize(
    ("family", "objective"), [*((family, "edm") for family in backbones.names()), ("dit", "flow"), ("dit", "ddpm")]
)
def test_no_float64_reaches_a_device_that_has_none(family, objective, tmp_path, monkeypatch):
    monkeypatch.setattr(rng, "WITHOUT_FLOAT64", ("meta",))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # it knows no meta
    config = small(tmp_path, f"backbone={family}", f"objective={objective}", "backbone.depth=4", "route=1-2")
    step = build_step(config, SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0))
    model, index = step.model.to("meta"), torch.arange(2)
    model.stack.fp32_after = False
    batch = Batch(torch.zeros(2, 1, 8, 8, device="meta"), torch.zeros(2, dtype=torch.long, device="meta"))
    draws = rng.Draws(0, 0, index, device="meta")
    with Narrow():
        Tally(torch.device("meta"))
        loss = step.loss(MicroBatch(batch, draws, Routing(Route.parse("1-2"), draws=draws)))
        loss.backward()
    assert loss.is_meta and all(p.dtype == torch.float32 for p in model.parameters())


def test_a_python_without_the_packages_is_told_in_one_sentence():
    commands = [["-m", "analysis", "tables", "runs"], ["-m", "sweeps", "list"]]
    for name in ("run", "prepare", "sample", "evaluate", "export", "bench"):
        commands.append([f"experiments/{name}.py"])
    for words in commands:
        # -S: no site-packages, as before `make env` or with another Python than the environment's.
        ran = subprocess.run([sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
        assert ran.stderr.startswith(f"error: {sys.executable} has no package '")
