"""Token mixers as functions: a plain float64 reference, a fast torch path, a kernel if any.

    ops.ssd             Mamba-2's state space dual, chunked
    ops.selective_scan  Mamba-1's scan
    ops.biwkv           RWKV's bidirectional weighted sum
    ops.conv            causal depthwise convolution along a path
    ops.shift           token shift: quarters of the channels from the four grid neighbours
    ops.dispatch        which implementation runs, and why

Every op takes `kernel="auto"`: the kernel where it is installed and fits the inputs, torch
otherwise. A name asks for that implementation and is an error where it cannot run. Nothing is
imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("biwkv", "conv", "dispatch", "selective_scan", "shift", "ssd")
_NAMES = {"Choice": "dispatch", "KernelError": "dispatch", "resolve": "dispatch"}

__all__ = [*_MODULES, *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
