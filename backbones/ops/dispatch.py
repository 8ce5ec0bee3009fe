"""Chooses the implementation of each operation, and says why.

Packages are probed for the function that is used rather than by name: `import mamba_ssm` fails
without its CUDA module, although its Mamba-2 kernels are Triton and need none. Results are cached
in `native.ACTIVE`; `without_native` replaces the cache while it is active.
"""

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backbones.ops import native
from backbones.options.family import KERNELS, kernel_words
from routing.errors import UserError, one_of

_BUILT = 'pip install --no-build-isolation -e ".[kernels]" (after torch; needs nvcc)'
INSTALL = {
    "mamba-ssm": _BUILT,
    "causal-conv1d": _BUILT,
    "fla": 'pip install "fla-core>=0.4" triton',
    "triton": "pip install triton",
}
# Where a package implements an op, as "module:function"; {0} is the op.
_WHERE = {
    ("ssd", "mamba-ssm"): "mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined",
    ("ssd", "fla"): "fla.ops.simple_gla:chunk_simple_gla",
    ("selective_scan", "mamba-ssm"): "mamba_ssm.ops.selective_scan_interface:selective_scan_fn",
    ("conv", "causal-conv1d"): "causal_conv1d:causal_conv1d_fn",
    "fla": "fla.ops.{0}:chunk_{0}",
    "triton": "backbones.ops.{0}_triton:{0}_triton",
}


class KernelError(UserError):
    """A requested kernel does not exist or cannot run here."""


@dataclass(frozen=True)
class Choice:
    """The implementation of an op: `name` is torch, reference or a kernel; `why` is for the banner.

    `fallbacks` are kernels of ours for inputs that the first does not accept.
    """

    op: str
    name: str
    why: str
    fallbacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.op}: {self.name} ({self.why})"
        if self.fallbacks:
            text += f", {' or '.join(self.fallbacks)} for inputs that it does not take"
        return text


# A kernel's function and where it comes from; or None and the reason why it is unavailable.
Probed = tuple[Any, str]


def _import(where: str) -> Callable[..., Any]:
    """Import a function from a submodule, also of a package whose own `__init__` fails.

    `import a.b` runs a's `__init__` first; mamba-ssm's needs a CUDA module that its Triton files do
    not. If that fails, the package is put into `sys.modules` unexecuted, so that Python finds the
    parent there, and stays if the submodule then loads.
    """
    root, inside, _ = where.partition(".")
    fresh = inside and root not in sys.modules
    # Under -W error, a package's own warning would look like a failed import.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return pkgutil.resolve_name(where)
        except Exception as error:
            spec = importlib.util.find_spec(root) if fresh else None
            if spec is None:
                raise
            sys.modules[root] = importlib.util.module_from_spec(spec)
            try:
                return pkgutil.resolve_name(where)
            except Exception:
                del sys.modules[root]
                raise error from None


def _probe(op: str, kernel: str) -> Probed:
    if kernel == "native":
        is_loaded, reason = native.library()
        operator = {"shift": "shift_mix"}.get(op, op)
        return (getattr(torch.ops.tread, operator) if is_loaded else None), reason
    where = (_WHERE.get((op, kernel)) or _WHERE[kernel]).format(op)
    package = {"fla": "fla-core"}.get(kernel, kernel)
    root = "triton" if kernel == "triton" else re.split("[.:]", where)[0]
    if importlib.util.find_spec(root) is None:
        return None, f"{package} is not installed: {INSTALL[kernel]}"
    if op == "selective_scan" and importlib.util.find_spec("selective_scan_cuda") is None:
        return None, "mamba-ssm was built without its Mamba-1 kernel"
    try:
        function = _import(where)
        if (op, kernel) == ("ssd", "fla") and _fla_is_wrong():
            return None, "fla-core wants tilelang on Hopper with triton 3.4.0 to 3.7.0"
    except Exception as error:  # A broken binary raises anything: ImportError, OSError ...
        # A bare assert has no message.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return None, f"{package} does not load: {reason[:120]}"
    return function, f"{package} found"


def _fla_is_wrong() -> bool:
    """Whether fla-core would raise in the backward pass of its gated kernel (its issue 640)."""
    if importlib.util.find_spec("tilelang"):
        return False
    numbers = map(int, re.findall(r"\d+", importlib.import_module("triton").__version__)[:3])
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return hopper and (3, 4, 0) <= tuple(numbers) < (3, 7, 1)


def probe(op: str, kernel: str) -> Probed:
    """Return the function of `kernel` that computes `op` and its origin, or None and the reason."""
    kernels = native.ACTIVE.kernels
    if (op, kernel) not in kernels:
        kernels[op, kernel] = _probe(op, kernel)
    return kernels[op, kernel]


def kernel_function(op: str, kernel: str) -> Callable[..., Any]:
    """Return the function of a kernel that `resolve` or `choose` returned."""
    return probe(op, kernel)[0]


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """Temporarily use torch's operations instead of the native ones, as without a compiler.

    The library stays loaded; all kernels are probed again inside.
    """
    saved, operations = dict(vars(native.ACTIVE)), native.OPERATIONS["cpu"]
    native.ACTIVE.reset((False, "switched off"))
    native.OPERATIONS["cpu"] = native.Plain
    try:
        yield
    finally:
        vars(native.ACTIVE).update(saved)
        native.OPERATIONS["cpu"] = operations


def _refusal(op: str, kernel: str, device: str) -> str | None:
    """Return why `kernel` cannot compute `op` on `device`, or None if it can."""
    if kernel == "native" and device != "cpu":
        return "native is for CPUs"
    # Triton interprets its kernels on a CPU where this was set before its import.
    interpreted = kernel == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if kernel != "native" and device != "cuda" and not interpreted:
        return f"{kernel} needs a CUDA device and none is here"
    function, reason = probe(op, kernel)
    return None if function else reason


def resolve(op: str, requested: str = "auto", device: str | None = None) -> Choice:
    """Choose the implementation of `op`.

    Args:
        op: One of `registry.KERNELS`.
        requested: auto (the first kernel that can run, else torch), torch, reference, kernel (any
            kernel), or a kernel by name.
        device: "cuda" or "cpu"; by default cuda where there is one.

    Raises:
        KernelError: The requested implementation is unknown or cannot run here. `auto` never
            raises.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    choices = native.ACTIVE.choices
    if (op, requested, device) not in choices:
        choices[op, requested, device] = _resolve(op, requested, device)
    return choices[op, requested, device]


def _resolve(op: str, requested: str, device: str) -> Choice:
    one_of("op", op, tuple(KERNELS), KernelError)
    one_of("kernel", requested, kernel_words(op), KernelError)
    if requested in ("torch", "reference"):
        return Choice(op, requested, "requested")
    # Triton's interpreter is for tests: a thousand times slower, so never chosen here.
    for_device = [kernel for kernel in KERNELS[op] if (kernel == "native") == (device != "cuda")]
    if requested == "auto" and not for_device:
        why = "needs no kernel" if device == "cuda" else "kernels need a CUDA device"
        return Choice(op, "torch", why)
    candidates: Sequence[str] = (requested,)
    if requested in ("auto", "kernel"):
        candidates = for_device or KERNELS[op]
    usable: list[str] = []
    refusals: list[str] = []
    for kernel in candidates:
        # As a fallback, only our own kernel: other packages have the same limits and take seconds
        # to import.
        if usable and kernel != "triton":
            continue
        reason = _refusal(op, kernel, device)
        if reason is None:
            usable.append(kernel)
        else:
            refusals.append(reason)
    if usable:
        return Choice(op, usable[0], probe(op, usable[0])[1], tuple(usable[1:]))
    if requested == "auto":
        return Choice(op, "torch", refusals[0])
    raise KernelError(f"kernel={requested} for {op}: {refusals[0]}; type kernel=auto")


def choose(
    op: str,
    requested: str,
    tensors: list[torch.Tensor],
    fits: Callable[[str], str | None] | None = None,
) -> str:
    """Return the name of the implementation for one call, by device, installation and inputs.

    Args:
        op: One of `registry.KERNELS`.
        requested: As for `resolve`. With `auto`, torch runs if no kernel takes the inputs.
        tensors: The inputs, tokens first; kernels have no float64.
        fits: Given a kernel's name, returns why it does not take these shapes, or None.

    Raises:
        KernelError: A kernel was requested by name and does not take the inputs.
    """
    device = tensors[0].device.type
    if requested in native.REQUESTS and device == "cpu":
        # A compiler fuses torch's operations itself; FLOP counters, torch.func transforms and the
        # like need to see them. `takes` comes first because it is the common case, and cheap.
        if torch.compiler.is_compiling():
            return "torch"
        if "native" in KERNELS[op] and native.OPERATIONS[device].takes(tensors):
            if fits is None or fits("native") is None:
                return "native"
        elif native.bypassed():
            return "torch"
    choice = resolve(op, requested, device)
    if choice.name in ("torch", "reference"):
        return choice.name
    misfit = None
    for kernel in (choice.name, *choice.fallbacks):
        reason = _wrong_dtype(kernel, tensors) or (fits(kernel) if fits else None)
        if reason is None:
            return kernel
        misfit = misfit or reason
    if requested == "auto":
        return "torch"
    raise KernelError(f"kernel={choice.name} for {op}: {misfit}; type kernel=auto (torch) instead")


def _wrong_dtype(kernel: str, tensors: list[torch.Tensor]) -> str | None:
    """Return why a kernel does not take tensors of these types, or None."""
    for tensor in tensors:
        native_lacks = kernel == "native" and tensor.dtype not in native.TYPES
        if tensor.dtype == torch.float64 or native_lacks:
            return f"it has no {str(tensor.dtype).removeprefix('torch.')}"
    return None


def full_precision(x: torch.Tensor) -> torch.autocast:
    """Disable autocast on x's device: a scan's sums and exponents need full precision."""
    return torch.autocast(x.device.type, enabled=False)


def work_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the type that an op computes in: float64 if any input is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
