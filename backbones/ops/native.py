"""CPU kernels in C++ (`native.cpp`), built on first use by the compiler that is there.

Next to the matmuls, a block on a CPU spends its time streaming activations through memory: every
element-wise operation reads and writes all of them. Here a chain of them is one pass over memory,
forward and backward, that saves one tensor where autograd would save several; a scan order is
entered and left in such a pass too. Elsewhere, under `torch.compile` and in float64 the functions
are their plain formula (`biwkv`, `conv` and `ssd` are chosen by `dispatch`).

A library's name is the hash of its source, its compiler and its CPU, so that another of either is
another file. It is built under a lock, into a file of its own, and renamed when it is whole: what
lies under the name can be loaded, whatever was killed. Without a compiler, or with
`TREAD_NATIVE=0`, the torch path runs.

Tokens are float32 or bfloat16; sums, parameters and statistics are float32. Results do not depend
on the number of threads.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from backbones.ops.shift import grid_shift
from routing.layout import Order, permute

SWITCH = "TREAD_NATIVE"
SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("c++", "g++", "clang++")
# Neither errno nor floating-point traps are read; all else is IEEE: infinities and NaNs count.
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# The first that the compiler takes; ARM's call it -mcpu.
TUNING = (("-march=native",), ("-mcpu=native",), ())
PATIENCE = 120.0  # Seconds to wait for another process's build before building as well.
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
TAPS = 8  # As in the source: the widest convolution.
EPS = 1e-6  # Added to the variance or the mean square by every norm.

_LOADED: list[tuple[ctypes.CDLL | None, str]] = []
_FUNCTIONS: dict[tuple[str, torch.dtype], Any] = {}


def library() -> tuple[ctypes.CDLL | None, str]:
    """Return the library (None where there is none) and what it was built by, or what is wrong.

    The first call builds it where it is not there yet: some seconds.
    """
    if not _LOADED:
        _LOADED.append(_load())
    return _LOADED[0]


def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get(SWITCH, "1") == "0":
        return None, f"{SWITCH}=0"
    if os.name != "posix":
        return _without(f"no build on {platform.system()}")
    given = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [given] if given else COMPILERS)), None)
    if compiler is None:
        return _without(f"no C++ compiler found ({given or ', '.join(COMPILERS)})")
    try:
        version = _output(compiler, "--version").partition("\n")[0]
        path = _built(compiler, version)
        return ctypes.CDLL(str(path)), f"built by {version}"
    # A user without an entry and without $HOME has no home: a RuntimeError.
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        failed = isinstance(error, subprocess.CalledProcessError) and error.stderr
        said = str(failed or error).strip().splitlines()
        line = next((line for line in said if "error" in line), said[0])
        return _without(f"{compiler} cannot build them: {line[:200]}")


def _without(reason: str) -> tuple[None, str]:
    logging.getLogger(__name__).warning(
        "%s: CPU kernels run as plain torch operations, about half as fast", reason
    )
    return None, reason


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, stdin=subprocess.DEVNULL
    ).stdout


def _cpu() -> str:
    """What decides on the instructions that -march=native takes."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        keys = ("flags", "Features", "model name", "CPU part", "model\t", "stepping")
        return "\n".join(line for line in lines if line.startswith(keys))
    return platform.processor()


def _built(compiler: str, version: str) -> Path:
    """Return the library's file, after building it if need be."""
    source = SOURCE.read_bytes()
    facts = (compiler, version, *FLAGS, str(TUNING), platform.platform(), _cpu())
    name = hashlib.sha256(source + "\0".join(facts).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "tread-suite" / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{name}.so"
    if path.is_file():
        return path
    # A file system without locks is no hindrance: the rename alone keeps files whole.
    lock = FileLock(folder / f"{name}.lock", timeout=PATIENCE, fallback_to_soft=False)
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        if path.is_file():
            return path
        if lock.is_locked:  # What a killed build left behind.
            for left in folder.glob(f"{name}.*.tmp"):
                left.unlink(missing_ok=True)
        handle, building = tempfile.mkstemp(".tmp", f"{name}.", folder)
        try:
            _compile(compiler, building)
            os.fsync(handle)
            os.replace(building, path)
        finally:
            os.close(handle)
            Path(building).unlink(missing_ok=True)
    finally:
        lock.release()
    return path


def _compile(compiler: str, out: str) -> None:
    for tuning in TUNING:
        try:
            _output(compiler, *FLAGS, *tuning, str(SOURCE), "-o", out)
            return
        except subprocess.CalledProcessError:
            if not tuning:
                raise


def bypassed() -> bool:
    """Whether somebody looks at single operations: a compiler, or a mode that counts or traces."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def takes(*tensors: Tensor) -> bool:
    """Say whether the kernels run for these token tensors, which have to be of one type."""
    first = tensors[0]
    return (
        first.device.type == "cpu"
        and not bypassed()
        and first.dtype in TYPES
        and all(t.dtype == first.dtype for t in tensors)
        and first.numel() > 0
        and library()[0] is not None
    )


def _argument(value: Tensor | list[Tensor] | float | None) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, list):
        return (ctypes.c_void_p * len(value))(*(t.data_ptr() for t in value))
    if isinstance(value, float):
        return ctypes.c_float(value)
    return value if value is None else ctypes.c_int64(value)


def _call(name: str, dtype: torch.dtype, *values: Tensor | list[Tensor] | float | None) -> None:
    """Call a kernel; its last argument is the number of threads. Tensors must be contiguous."""
    function = _FUNCTIONS.get((name, dtype))
    if function is None:
        found, why = library()
        if found is None:
            raise RuntimeError(f"no CPU kernels: {why}")
        address = ctypes.c_void_p.in_dll(found, f"{name}_{TYPES[dtype]}").value
        function = _FUNCTIONS[name, dtype] = ctypes.CFUNCTYPE(None)(address or 0)
    function(*map(_argument, values), ctypes.c_int64(torch.get_num_threads()))


def _table(table: Tensor | None, dims: int) -> tuple[Tensor | None, int]:
    """Make an index table contiguous int64 with `dims` axes; say whether each sample has a row."""
    if table is None:
        return None, 0
    table = (table if table.dim() == dims else table[None]).to(torch.int64).contiguous()
    return table, int(len(table) > 1)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        dtype: torch.dtype,
        given: tuple[Any, ...],
        results: tuple[Tensor | list[Tensor]],
        kept: tuple[Tensor | None, ...],
        stream: Tensor | None,
        *inputs: Tensor | None,
    ) -> Any:
        (out,) = results  # a tensor that is an argument itself would come back as a view
        first = () if stream is None else (stream,)
        _call(f"{name}_forward", dtype, *first, *inputs, *given, out, *kept)
        ctx.save_for_backward(*inputs, *kept)
        ctx.name, ctx.dtype, ctx.given = name, dtype, given
        ctx.count, ctx.stream, ctx.several = len(inputs), stream is not None, type(out) is list
        return tuple(out) if ctx.several else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, result = ctx.saved_tensors, [g.contiguous() for g in grads]
        ours = [None if m is None else torch.empty_like(m) for m in saved[: ctx.count]]
        grad = result if ctx.several else result[0]
        _call(f"{ctx.name}_backward", ctx.dtype, grad, *saved, *ctx.given, *ours)
        return None, None, None, None, None, result[0] if ctx.stream else None, *ours


def _run(
    name: str,
    *inputs: Tensor | None,
    given: tuple[Any, ...],
    out: Tensor | list[Tensor],
    kept: tuple[Tensor | None, ...] = (),
    stream: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Run a pair of kernels with their arguments in the order of the source; return `out`, filled.

    Args:
        name: The pair.
        inputs: What gets a gradient from the kernel.
        given: Tables and sizes.
        out: The result, several in a list.
        kept: What else the forward pass fills for the backward pass.
        stream: An input, the first one, that the result is a sum with: it gets the same gradient.
        dtype: Which kernel; by default that of the result's type.
    """
    dtype = dtype or (out[0] if isinstance(out, list) else out).dtype
    return _Kernel.apply(name, dtype, given, (out,), kept, stream, *inputs)


def _pointwise(name: str, *inputs: Tensor) -> Tensor:
    inputs = tuple(x.contiguous() for x in inputs)
    return _run(name, *inputs, given=(inputs[0].numel(),), out=torch.empty_like(inputs[0]))


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, of any shape."""
    return _pointwise("gelu", x) if takes(x) else F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, of any shape."""
    return _pointwise("squared_relu", x) if takes(x) else torch.relu(x).square()


def sigmoid_gate(x: Tensor, y: Tensor) -> Tensor:
    """sigmoid(x) y, both of one shape."""
    return _pointwise("sigmoid_gate", x, y) if takes(x, y) else torch.sigmoid(x) * y


def _takes_stream(x: Tensor, *rows: Tensor) -> bool:
    """Say whether the kernels run for a stream (B, T, D) and its rows (B, 1, D), all float32."""
    shape = (x.shape[0], 1, x.shape[-1])
    return x.dtype == torch.float32 and takes(x, *rows) and all(r.shape == shape for r in rows)


def _rows(*rows: Tensor) -> tuple[list[Tensor], int]:
    """Return rows (B, 1, D), which may be slices of one tensor, and how far apart they are."""
    if len({row.stride(0) for row in rows}) > 1 or any(row.stride(-1) != 1 for row in rows):
        rows = tuple(row.contiguous() for row in rows)
    return [*rows], rows[0].stride(0)


def _order(order: Order | None, tokens: int) -> tuple[Tensor | None, int]:
    """Return the table of a scan order, and whether each sample has its own."""
    perm = None if order is None else order.perm
    return perm, int(perm is not None and perm.numel() != tokens)


def adaln(
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    order: Order | None = None,
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Normalise tokens (B, T, D), then scale and shift them per sample: (B, 1, D) each.

    The result is in this `order`; `norm` takes the place of a LayerNorm without weights. Where a
    kernel runs, the result has the type that autocast gives to matmuls.
    """
    if norm is None and _takes_stream(x, shift, scale):
        half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") in TYPES
        dtype = torch.get_autocast_dtype("cpu") if half else x.dtype
        x, ((shift, scale), stride) = x.contiguous(), _rows(shift, scale)
        given = (stride, EPS, *_order(order, x.shape[1]), *x.shape)
        kept, out = tuple(x.new_empty(2, *x.shape[:2])), x.new_empty(x.shape, dtype=dtype)
        return _run("adaln", x, shift, scale, given=given, out=out, kept=kept)
    unit = F.layer_norm(x, x.shape[-1:], eps=EPS) if norm is None else norm(x)
    return permute(torch.addcmul(shift, unit, scale + 1), order)


def gated_sum(x: Tensor, gate: Tensor, y: Tensor, order: Order | None = None) -> Tensor:
    """Return x + gate y for tokens (B, T, D) and a gate per sample (B, 1, D), in the type of x.

    A branch's output y is in this `order`, and of another type than the stream x under autocast.
    """
    if y.dtype in TYPES and y.shape == x.shape and _takes_stream(x, gate):
        x, y, ((gate,), stride) = x.contiguous(), y.contiguous(), _rows(gate)
        given, out = (stride, *_order(order, x.shape[1]), *x.shape), torch.empty_like(x)
        return _run("gated_sum", gate, y, given=given, out=out, stream=x, dtype=y.dtype)
    y = permute(y, order and order.inverse()).to(x.dtype)
    return torch.addcmul(x, gate.to(x.dtype), y)


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm(y silu(z)) weight over the channels of (B, T, C): Mamba-2 before its output."""
    if not takes(y, z):
        return F.rms_norm(y * F.silu(z), weight.shape, weight.to(y.dtype), EPS)
    y, z, weight = y.contiguous(), z.contiguous(), weight.float().contiguous()
    rows, out = y.numel() // y.shape[-1], torch.empty_like(y)
    given = (EPS, rows, y.shape[-1])
    return _run("gated_rms", y, z, weight, given=given, out=out, kept=(torch.empty(rows),))


def conv(x: Tensor, rows: Tensor, bias: Tensor | None, table: Tensor | None, silu: bool) -> Tensor:
    """Convolve tokens (B, T, C) with rows (W, C), row j for distance j; `table` as `conv.taps`."""
    x, rows = x.contiguous(), rows.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    given = (*_table(table, 3), int(silu), *x.shape, len(rows))
    return _run("conv", x, rows, bias, given=given, out=torch.empty_like(x))


def shift_mix(x: Tensor, neighbours: Tensor, mix: Tensor) -> list[Tensor]:
    """Return x mix + shifted (1 - mix) for rows of `mix` (M, C); the rest as for `grid_shift`."""
    if not takes(x):
        other = grid_shift(x, neighbours)
        return [torch.lerp(other, x, row) for row in mix.to(x.dtype)]
    x, mix = x.contiguous(), mix.float().contiguous()
    given = (*_table(neighbours, 3), *x.shape, len(mix))
    return list(_run("shift_mix", x, mix, given=given, out=[torch.empty_like(x) for _ in mix]))


def biwkv(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, position: Tensor | None, length: int
) -> Tensor:
    """`biwkv.biwkv` on decay w / length and bonus exp(u / length), both float32 (C,)."""
    k, v, decay, bonus = (m.contiguous() for m in (k, v, decay, bonus))
    out = torch.empty_like(v)
    kept: tuple[Tensor | None, ...] = (None,) * 4
    if torch.is_grad_enabled():
        exact = out if out.dtype == torch.float32 else torch.empty(v.shape)
        kept = (exact, torch.empty(v.shape), torch.empty(v.shape), torch.empty(len(k), k.shape[2]))
    given = (*_table(position, 2), length, *k.shape)
    return _run("biwkv", k, v, decay, bonus, given=given, out=out, kept=kept)


def ssd(packed: Tensor, dt: Tensor, log_decay: Tensor, D: Tensor | None, width: int) -> Tensor:
    """Run SSD on (B, T, H width + 2 N), N a multiple of 8; all else is float32.

    `dt` and `log_decay` are (B, T, H); the result is (B, T, H, width).
    """
    packed, dt, log_decay = (m.contiguous() for m in (packed, dt, log_decay))
    D = None if D is None else D.contiguous()
    given = (*dt.shape, width, (packed.shape[2] - dt.shape[2] * width) // 2)
    out = packed.new_empty(*dt.shape, width)
    exact = out if out.dtype == torch.float32 else torch.empty(out.shape)
    return _run("ssd", packed, dt, log_decay, D, given=given, out=out, kept=(exact,))
