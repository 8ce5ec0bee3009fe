"""Options of a model and of each family, and what one block of a family costs (no torch here).

A family consists of a dataclass of options and a function that counts one block, in a file of its
name here, and of a block class in a file of its name in `backbones`. Parameter counts of these
families are exact (a test), and building a model refuses a count that is off by more than 1 %;
counts of saved activations were measured and hold within 15 %.
"""

import importlib
import pkgutil

from backbones.options.family import KERNELS, BlockCost, Spec
from backbones.options.model import ModelConfig


def _read_families() -> tuple[Spec, ...]:
    """Return the `FAMILY` of every module of this package that has one, by name."""
    families = []
    for module in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if family is not None:
            families.append(family)
    return tuple(families)


FAMILIES = _read_families()

__all__ = ["FAMILIES", "KERNELS", "BlockCost", "ModelConfig", "Spec"]
