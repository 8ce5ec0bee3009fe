"""What this process runs on: package versions, device, commit of the code."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from experiments.runtime import run_folder
from experiments.runtime.errors import ROOT
from experiments.runtime.files import code_commit

_PACKAGES = (
    "torch", "numpy", "timm", "accelerate", "hydra-core", "mamba-ssm", "causal-conv1d", "fla-core",
    "triton",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Return versions, device and commit of this process."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        device += f", {os.cpu_count()} cores"
    return {
        **process_settings(),
        "system": platform.platform(),
        "device": device,
        "packages": versions,
        "git": code_commit(ROOT),
        # Hash of a sweep's copy of the code; None for a checkout.
        "snapshot": run_folder.read(ROOT / "snapshot.json").get("hash"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def timing_environment(device: torch.device) -> dict[str, Any]:
    """Return what the times that the benchmark measures depend on."""
    return {
        **process_settings(),
        "torch": torch.__version__,
        "device": device.type,
        "device_name": device_name(device.type),
        "cores": os.cpu_count(),
        "load_before": psutil.getloadavg()[0],
    }


def process_settings() -> dict[str, Any]:
    """Return what the speed of this process depends on, beside hardware and packages."""
    return {
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "spins": os.environ.get("GOMP_SPINCOUNT"),
    }


def device_name(device_type: str) -> str:
    """Return the name of the GPU, or of the CPU."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_info(key: str) -> str:
    """Return what Linux lists under a key of the first CPU; nothing on other systems."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""
