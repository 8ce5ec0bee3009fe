"""Fused operations: C++ on CPUs (`native.cpp`, compiled on first use), torch formulas elsewhere.

Besides matmuls, a block on a CPU spends its time streaming activations through memory: every
element-wise operation reads and writes all of them. Here a chain of them is one pass over memory,
forward and backward, which saves one tensor for the backward pass where autograd would save
several, and which also applies a scan order or undoes it. `OPERATIONS[x.device.type]` holds
these operations, with the same names and signatures on every device. On CPUs they are torch
operators (`native_operators.cpp`) that accept any tensors: under `torch.compile` and in float64
they evaluate their formulas. Operators that mix tokens (`conv`, `ssd`, ...) run only where `takes`
allows it; their torch path is in `ops.conv`, `ops.ssd`, ...

The file name of the library is a hash of its sources, the compiler, the CPU and torch. It is built
under a lock in a temporary folder and renamed when complete, next to a file with its size and
SHA-256. Both are checked before loading, because loading a truncated library (after a full disk,
say) would crash the process; a library that differs is rebuilt, and so is one that somebody else
owns or may write to. Without a compiler or a cache folder of this user's own, or with
`TREAD_NATIVE=0`, the torch path runs.

Tokens are float32 or bfloat16; sums, parameters and statistics are float32. Results do not depend
on the number of threads.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from backbones.parsing import is_own
from routing.errors import UserError
from routing.grid import transforming
from routing.layout import Order, permute

SWITCH = "TREAD_NATIVE"
KERNELS, OPERATORS = (Path(__file__).with_name(f"native{s}.cpp") for s in ("", "_operators"))
COMPILERS = ("c++", "g++", "clang++")
# No errno, no floating-point traps; otherwise IEEE arithmetic: infinities and NaNs matter.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# The first option that the compiler accepts is used; on ARM it is called -mcpu.
TUNING = (("-march=native",), ("-mcpu=native",), ())
# GCC collects garbage while it parses torch's headers, a sixth of the build, unless it may keep a
# gigabyte; clang does not collect any.
NO_COLLECTION = ("--param", "ggc-min-heapsize=1048576", "--param", "ggc-min-expand=100")
PATIENCE = 120.0  # Seconds to wait for another process's build before building as well.
TYPES = (torch.float32, torch.bfloat16)
REQUESTS = ("auto", "native", "kernel")  # Values of `kernel=` with which a native kernel may run.
TAPS = 8  # The widest convolution, as in native.cpp.
EPS = 1e-6  # Added to the variance or the mean square by every norm.


class Plain:
    """The element-wise operations as formulas, in torch's own operations."""

    @staticmethod
    def takes(tensors: list[Tensor]) -> bool:
        """Whether the native operators that mix tokens take these inputs; here there are none."""
        return False

    @staticmethod
    def gelu(x: Tensor) -> Tensor:
        """GELU in its tanh form, of any shape."""
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def squared_relu(x: Tensor) -> Tensor:
        """relu(x)^2, of any shape."""
        return torch.relu(x).square()

    @staticmethod
    def sigmoid_gate(x: Tensor, y: Tensor) -> Tensor:
        """sigmoid(x) y, both of one shape."""
        return torch.sigmoid(x) * y

    @staticmethod
    def adaln(x: Tensor, shift: Tensor, scale: Tensor, order: Order | None = None) -> Tensor:
        """Normalise tokens (B, T, D), then scale and shift them per sample: (B, 1, D) each.

        The result is in this `order`. From a native kernel it has autocast's type of matmuls.
        """
        return modulate(F.layer_norm(x, x.shape[-1:], eps=EPS), shift, scale, order)

    @staticmethod
    def gated_sum(x: Tensor, gate: Tensor, y: Tensor, order: Order | None = None) -> Tensor:
        """Return x + gate y for tokens (B, T, D) and a gate per sample (B, 1, D), typed as x.

        A branch's output y is in this `order`; under autocast it has another type than the stream.
        """
        y = permute(y, order and order.inverse()).to(x.dtype)
        return torch.addcmul(x, gate.to(x.dtype), y)

    @staticmethod
    def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm(y silu(z)) weight over the channels of (B, T, C): Mamba-2 before its output."""
        return F.rms_norm(y * F.silu(z), weight.shape, weight.to(y.dtype), EPS)


# The operations of each device type: `torch.ops.tread` for CPUs once the library is loaded, else
# `Plain`. Filled, so that a compiled block can trace through it without adding entries.
OPERATIONS: defaultdict[str, Any] = defaultdict(
    lambda: Plain, dict.fromkeys(("cpu", "cuda", "mps", "xpu"), Plain)
)


class Implementations:
    """Available implementations, determined on first use; `dispatch.without_native` swaps them.

    Attributes:
        library: Whether `torch.ops.tread` is loaded, and the compiler that built it or the reason
            why it is not; None before the first call of `library()`.
        kernels: By operation and kernel: its function and origin, or None and the reason why it is
            unavailable.
        choices: By operation, requested kernel and device type: what `dispatch.resolve` chose.
    """

    def __init__(self) -> None:
        self.reset(None)

    def reset(self, library: tuple[bool, str] | None) -> None:
        """Clear all caches, with this status of the library."""
        self.library = library
        self.kernels: dict[tuple[str, str], tuple[Any, str]] = {}
        self.choices: dict[tuple[str, str, str], Any] = {}


ACTIVE = Implementations()
BUILDING = threading.RLock()  # Held while the library is built and loaded.


def _silent(text: str) -> None:
    """Discard a progress message."""


REPORT: Callable[[str], None] = _silent  # Where a build reports its progress.


def modulate(unit: Tensor, shift: Tensor, scale: Tensor, order: Order | None = None) -> Tensor:
    """Scale and shift normalised tokens (B, T, D) per sample, (B, 1, D) each, into this order."""
    return permute(torch.addcmul(shift, unit, scale + 1), order)


def bypassed() -> bool:
    """Whether single operations are traced: by a compiler, a dispatch mode or torch.func."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or transforming()


# --- the build ------------------------------------------------------------------------------------


def library() -> tuple[bool, str]:
    """Return whether `torch.ops.tread` is loaded, and its compiler or the reason why it is not.

    The first call loads it, after building it if necessary (some seconds). During a build that
    `start_build` began, it waits for the end of that.
    """
    with BUILDING:
        if ACTIVE.library is None:
            status = _load()
            # Set before the status, which other threads read without the lock.
            if status[0]:
                OPERATIONS["cpu"] = torch.ops.tread
            ACTIVE.library = status
        return ACTIVE.library


def start_build(report: Callable[[str], None]) -> threading.Thread | None:
    """Load the library in the background, building it if necessary; None if that has been done.

    `report` receives a line at the start of a build, every two seconds, and at its end.
    """
    if ACTIVE.library is not None:
        return None

    def load() -> None:
        global REPORT
        REPORT = report
        with contextlib.suppress(UserError):  # `library` raises it again where it is needed
            library()

    thread = threading.Thread(target=load, name="native build", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def _elapsed_time(every: float = 2.0) -> Iterator[None]:
    """Report regularly how long the build has taken so far."""
    start, finished = time.monotonic(), threading.Event()
    task = "building the CPU kernels, once for this machine"

    def repeat() -> None:
        while not finished.wait(every):
            REPORT(f"{task}: {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=repeat, daemon=True)
    REPORT(f"{task} ...")
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
    REPORT(f"built the CPU kernels in {time.monotonic() - start:.0f} s")


def _load() -> tuple[bool, str]:
    switch = os.environ.get(SWITCH) or "1"
    if switch not in ("0", "1"):  # off or false would have switched nothing off
        raise UserError(f"{SWITCH}={switch} in the environment: expected 0 or 1")
    if switch == "0":
        return False, f"{SWITCH}=0"
    if os.name != "posix":
        return _without(f"no build on {platform.system()}")
    requested = os.environ.get("CXX")
    candidates = (requested,) if requested else COMPILERS
    compiler = next(filter(None, map(shutil.which, candidates)), None)
    if compiler is None:
        return _without(f"no C++ compiler found ({', '.join(candidates)})")
    try:
        version = _output(compiler, "--version").partition("\n")[0]
        path = _built(compiler, version)
    # RuntimeError: a user without a home. ValueError: compiler output in another encoding.
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return _without(f"{compiler} cannot build them: {_first_error(error)[:200]}")
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        return _without(f"{path} does not load: {str(error).splitlines()[0][:200]}")
    return True, f"built by {version}"


def _first_error(error: Exception) -> str:
    """Return the first line with an error in a compiler's output, or the error's own first line."""
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = str(output or error).strip().splitlines()
    for line in lines:
        if "error" in line:
            return line
    return lines[0]


def _without(reason: str) -> tuple[bool, str]:
    logging.getLogger(__name__).warning(
        "%s: CPU kernels run as plain torch operations, 0.3 to 0.9 as fast", reason
    )
    return False, reason


def _output(*command: str | Path) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, stdin=subprocess.DEVNULL
    ).stdout


def _cpu() -> str:
    """Describe the CPU by what determines the instructions that -march=native uses."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        keys = ("flags", "Features", "model name", "CPU part", "model\t", "stepping")
        return "\n".join(line for line in lines if line.startswith(keys))
    return platform.processor()


def _built(compiler: str, version: str) -> Path:
    """Return the library's file, after building it if necessary."""
    sources = KERNELS.read_bytes() + OPERATORS.read_bytes()
    built_for = (platform.platform(), _cpu(), str(torch.__version__), str(torch.__file__))
    facts = (compiler, version, *FLAGS, str(TUNING), *built_for)
    name = hashlib.sha256(sources + "\0".join(facts).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "tread-suite" / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not is_own(folder):
        raise OSError(
            f"{folder} belongs to somebody else, or others may write to it: chmod go-w it, or set "
            "XDG_CACHE_HOME"
        )
    path = folder / f"{name}.so"
    record = path.with_suffix(".json")
    if _matches(path, record):
        return path
    # Without file locks (some network file systems) it still works: the rename is atomic.
    lock = FileLock(folder / f"{name}.lock", timeout=PATIENCE, fallback_to_soft=False)
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        if _matches(path, record):  # another process has built it meanwhile
            return path
        if lock.is_locked:  # Remove what a killed build left behind.
            for leftover in folder.glob(f"{name}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(".tmp", f"{name}.", folder) as building:
            with _elapsed_time():
                built = _compile(compiler, Path(building))
            with built.open("rb") as file:
                os.fsync(file.fileno())
            built.chmod(0o700)  # whatever the umask is
            written = Path(building) / record.name
            written.write_text(json.dumps(_size_and_hash(built)), encoding="utf-8")
            os.replace(written, record)
            os.replace(built, path)
    finally:
        lock.release()
    return path


def _size_and_hash(path: Path) -> dict[str, int | str]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _matches(library: Path, record: Path) -> bool:
    """Whether a library is this user's, with the size and hash stored when it was built."""
    try:
        if not is_own(library):
            return False
        expected = json.loads(record.read_text(encoding="utf-8"))
        return bool(expected == _size_and_hash(library))
    except (FileNotFoundError, ValueError):
        return False


def _compile(compiler: str, folder: Path) -> Path:
    """Compile both sources in parallel and link them; only the kernels are tuned for the CPU."""
    root, out = Path(torch.__file__).parent, folder / "library.so"
    include = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    # Without this macro one header includes every operator of torch.
    lean = "-DAT_PER_OPERATOR_HEADERS"
    headers = ("-std=c++20", "-O1", "-fPIC", lean, *(f"-I{path}" for path in include))
    if "clang" not in _output(compiler, "--version"):
        headers = (*headers, *NO_COLLECTION)
    objects = folder / "kernels.o", folder / "operators.o"
    with ThreadPoolExecutor() as pool:
        operators = pool.submit(_output, compiler, *headers, "-c", OPERATORS, "-o", objects[1])
        for tuning in TUNING:
            try:
                _output(compiler, *FLAGS, *tuning, "-c", KERNELS, "-o", objects[0])
                break
            except subprocess.CalledProcessError:
                if not tuning:
                    raise
        operators.result()
    linked = (f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10")
    loose = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    _output(compiler, "-shared", *objects, *linked, *loose, "-o", out)
    return out
