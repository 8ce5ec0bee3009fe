"""The precision of a run: what `train.precision=auto` means here, kept when the run is resumed."""

from __future__ import annotations

import json

import torch

from experiments.config.schema import Config
from experiments.runtime import run_folder
from experiments.runtime.environment import cpu_info
from experiments.runtime.files import atomic_write

FILE = "precision.json"
# CPU features, as Linux names them, that multiply bf16 in hardware.
CPU_FEATURES = {"avx512_bf16", "amx_bf16"}


def has_bf16(device: torch.device) -> bool:
    """Whether this device multiplies bf16 in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and not CPU_FEATURES.isdisjoint(cpu_info("flags").split())


def resolve_precision(config: Config, device: torch.device) -> str:
    """Return fp32 or bf16: as configured, as the run's first start chose, or as fits the device."""
    if config.train.precision != "auto":
        return config.train.precision
    recorded = run_folder.read(config.folder / FILE).get("precision")
    if recorded in ("fp32", "bf16"):
        return str(recorded)
    return "bf16" if has_bf16(device) else "fp32"


def record_precision(config: Config, precision: str) -> None:
    """Write down what `auto` became, so that every later start of the run does the same."""
    path = config.folder / FILE
    if config.train.precision == "auto" and run_folder.read(path).get("precision") != precision:
        atomic_write(path, json.dumps({"asked": "auto", "precision": precision}))


def slow_bf16(config: Config, device: torch.device) -> str | None:
    """Return a warning if the run trains in bf16 on a CPU that only emulates it, else None."""
    if config.train.precision == "bf16" and device.type == "cpu" and not has_bf16(device):
        return (
            "train.precision=bf16: this CPU has neither AVX512-BF16 nor AMX, so a step takes "
            "several times as long as with train.precision=fp32"
        )
    return None
