"""What processes tokens: one block file per family, one model around them, one size table.

    model = backbones.create("mamba", size="S/2", num_classes=1000)

No block knows that routing exists (`routing.Stack` does); nothing here trains.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "BackboneError": "sizes",
    "SIZES": "sizes",
    "Size": "sizes",
    "parse_size": "sizes",
    "create": "backbone",
    "names": "registry",
    "register": "registry",
    "Backbone": "backbone",
    "Output": "backbone",
    "Cost": "cost",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): a typo in a size must not wait for torch.
    if name in _WHERE:
        return getattr(importlib.import_module(f"backbones.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'backbones' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
