"""Which implementation of an op runs here, and why.

The packages are probed for the part that is used, not for their name: `import mamba_ssm` fails
without its CUDA module, although its Mamba-2 kernels are Triton and need none. What a probe found
is remembered, until `without_native` begins or ends.
"""

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from backbones.ops import native
from backbones.registry import KERNELS, check_kernel
from routing.errors import UserError, one_of

INSTALL = {
    "mamba-ssm": 'pip install --no-build-isolation -e ".[kernels]" (after torch; needs nvcc)',
    "causal-conv1d": 'pip install --no-build-isolation -e ".[kernels]" (after torch; needs nvcc)',
    "fla": 'pip install "fla-core>=0.4" triton',
    "triton": "pip install triton",
    "native": "install g++ or clang++",
}


class KernelError(UserError):
    """A kernel was asked for that does not exist or cannot run here."""


@dataclass(frozen=True)
class Choice:
    """What runs for an op: `name` is torch, reference or a kernel; `why` is for the banner.

    `others` are kernels of ours that can run too, for inputs that the first does not take.
    """

    op: str
    name: str
    why: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}: {self.name} ({self.why})"


@dataclass(frozen=True)
class _Probe:
    function: Callable[..., Any] | None
    reason: str


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU (TRITON_INTERPRET=1 before its import)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _import(module: str, name: str, package: str) -> _Probe:
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return _Probe(None, f"{package} is not installed")
    try:
        # Under -W error a warning of the package's own would read as a package that does not load.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = getattr(importlib.import_module(module), name)
        return _Probe(found, f"{package} found")
    except Exception as error:  # A broken binary raises anything: ImportError, OSError ...
        # A bare assert says nothing.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return _Probe(None, f"{package} does not load: {reason[:120]}")


def _import_within(module: str, name: str, package: str) -> _Probe:
    """Import a function from a submodule, also of a package whose own `__init__` fails.

    `import a.b` runs a's `__init__` first, and mamba-ssm's needs its CUDA module, which its Triton
    files do not. So the package is then put into `sys.modules` unexecuted, where Python looks for
    the parent, and stays there if that was enough. Only `probe` calls this, when a CUDA device asks
    for the op for the first time.
    """
    found, root = _import(module, name, package), module.split(".")[0]
    spec = None if found.function or root in sys.modules else importlib.util.find_spec(root)
    if spec is None:
        return found
    sys.modules[root] = importlib.util.module_from_spec(spec)
    found = _import(module, name, package)
    if found.function is None:
        del sys.modules[root]
    return found


# Dictionaries, not functools.cache: a compiled block reads them, and looks through that wrapper.
_PROBED: dict[tuple[str, str], _Probe] = {}
_RESOLVED: dict[tuple[str, str, str], Choice] = {}


def probe(op: str, kernel: str) -> _Probe:
    """Import the function of `kernel` that serves `op`; None where it cannot be had."""
    if (op, kernel) not in _PROBED:
        _PROBED[op, kernel] = _probe(op, kernel)
    return _PROBED[op, kernel]


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """Run torch's operations in place of the native ones, as where there is no compiler.

    The library itself stays loaded; every kernel is probed anew inside, and again afterwards.
    """
    loaded = native._LOADED[:]
    native._LOADED[:] = [(None, "switched off")]
    _PROBED.clear()
    _RESOLVED.clear()
    try:
        yield
    finally:
        native._LOADED[:] = loaded
        _PROBED.clear()
        _RESOLVED.clear()


def kernel_function(op: str, kernel: str) -> Callable[..., Any]:
    """Return the function of a kernel that `resolve` chose."""
    function = probe(op, kernel).function
    assert function is not None
    return function


def _fla_is_wrong() -> bool:
    """Whether fla-core would raise in the backward pass of its gated kernel (its issue 640)."""
    if importlib.util.find_spec("tilelang"):
        return False
    numbers = map(int, re.findall(r"\d+", importlib.import_module("triton").__version__)[:3])
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return hopper and (3, 4, 0) <= tuple(numbers) < (3, 7, 1)


def _probe(op: str, kernel: str) -> _Probe:
    if kernel == "native":
        library, reason = native.library()
        function = {"shift": "shift_mix"}.get(op, op)
        return _Probe(None if library is None else getattr(native, function), reason)
    if kernel == "triton":
        return _import(f"backbones.ops.{op}_triton", f"{op}_triton", "triton")
    if kernel == "causal-conv1d":
        return _import("causal_conv1d", "causal_conv1d_fn", "causal-conv1d")
    if kernel == "fla" and op != "ssd":
        return _import(f"fla.ops.{op}", f"chunk_{op}", "fla-core")
    if kernel == "fla":
        found = _import("fla.ops.simple_gla", "chunk_simple_gla", "fla-core")
        if found.function and _fla_is_wrong():
            return _Probe(None, "fla-core wants tilelang on Hopper with triton 3.4.0 to 3.7.0")
        return found
    if (op, kernel) == ("ssd", "mamba-ssm"):
        module = "mamba_ssm.ops.triton.ssd_combined"
        return _import_within(module, "mamba_chunk_scan_combined", "mamba-ssm")
    if (op, kernel) == ("selective_scan", "mamba-ssm"):
        found = _import("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", "mamba-ssm")
        if found.function and importlib.util.find_spec("selective_scan_cuda") is None:
            return _Probe(None, "mamba-ssm was built without its Mamba-1 kernel")
        return found
    raise KeyError((op, kernel))


def _refusal(op: str, kernel: str, device: str) -> str | None:
    """Why `kernel` cannot serve `op` on `device`, or None if it can."""
    if kernel == "native":
        if device != "cpu":
            return "native is for CPUs"
    elif device != "cuda" and not (kernel == "triton" and interpreted()):
        return f"{kernel} needs a CUDA device"
    found = probe(op, kernel)
    return found.reason if found.function is None else None


def resolve(op: str, requested: str = "auto", device: str | None = None) -> Choice:
    """Say which implementation of `op` runs.

    Args:
        op: One of `registry.KERNELS`.
        requested: auto (the first kernel that can run, else torch), torch, reference, kernel (any
            kernel), or a kernel by name.
        device: "cuda" or "cpu"; by default cuda where there is one.

    Raises:
        KernelError: The implementation asked for is unknown or cannot run here. `auto` never
            raises.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if (op, requested, device) not in _RESOLVED:
        _RESOLVED[op, requested, device] = _resolve(op, requested, device)
    return _RESOLVED[op, requested, device]


def _resolve(op: str, requested: str, device: str) -> Choice:
    one_of("op", op, tuple(KERNELS), KernelError)
    check_kernel(requested, op, KernelError)
    if requested in ("torch", "reference"):
        return Choice(op, requested, "asked for")
    # Triton's interpreter is for tests: a thousand times slower, so never chosen here.
    here = [k for k in KERNELS[op] if (k == "native") == (device != "cuda")]
    if requested == "auto" and not here:
        why = "needs no kernel" if device == "cuda" else "kernels need a CUDA device"
        return Choice(op, "torch", why)
    refusals = []
    candidates = here or KERNELS[op] if requested in ("auto", "kernel") else (requested,)
    for i, kernel in enumerate(candidates):
        reason = _refusal(op, kernel, device)
        if reason is None:
            # Another package has the same limits and takes seconds to import: only ours come after.
            later = (k for k in candidates[i + 1 :] if k == "triton")
            others = tuple(k for k in later if _refusal(op, k, device) is None)
            return Choice(op, kernel, probe(op, kernel).reason, others)
        refusals.append((kernel, reason))
    if requested == "auto":
        kernel, reason = refusals[0]
        return Choice(op, "torch", f"{reason}: {INSTALL[kernel]}")
    raise KernelError(_cannot(op, requested, refusals))


def _cannot(op: str, requested: str, refusals: list[tuple[str, str]]) -> str:
    kernel, reason = refusals[0]
    if reason.endswith("CUDA device"):
        return f"kernel={requested} for {op}: {reason} and none is here; type kernel=auto"
    if reason.endswith("CPUs"):
        return f"kernel={requested} for {op}: {reason}; type kernel=auto"
    return f"kernel={requested} for {op}: {reason}; type {INSTALL[kernel]}, or kernel=auto (torch)"


def choose(
    op: str, requested: str, x: torch.Tensor, fits: Callable[[str], str | None] | None = None
) -> str:
    """Resolve for one call: torch also where `auto` meets inputs that no kernel takes.

    Of the input x, device and dtype count (kernels have no float64); `fits` returns for a kernel's
    name what is wrong with the inputs, or None.

    Raises:
        KernelError: A kernel was asked for by name and the inputs do not fit it.
    """
    anything = requested in ("auto", "kernel", "native")
    if anything and x.device.type == "cpu" and native.bypassed():
        return "torch"
    choice = resolve(op, requested, x.device.type)
    name = choice.name
    if name in ("torch", "reference"):
        return name
    wrong = None
    for kernel in (name, *choice.others):
        if x.dtype == torch.float64 or (kernel == "native" and x.dtype not in native.TYPES):
            reason: str | None = f"it has no {str(x.dtype).removeprefix('torch.')}"
        else:
            reason = fits(kernel) if fits else None
        if reason is None:
            return kernel
        wrong = wrong or reason
    if requested == "auto":
        return "torch"
    raise KernelError(f"kernel={name} for {op}: {wrong}; type kernel=auto (torch) instead")


def full_precision(x: torch.Tensor) -> torch.autocast:
    """Switch autocast off for x's device: half precision ruins the sums and exponents of a scan."""
    return torch.autocast(x.device.type, enabled=False)


def work_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Float64 if any input is float64, else float32: what an op computes in."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
