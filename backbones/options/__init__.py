"""Options of a model and of each family, and what one block of a family costs (no torch here).

A family is a dataclass of options and a function that counts one block, in a file of its name here,
and a block class in a file of its name in `backbones`. The counts of parameters are exact and are
checked when a model is built; those of saved activations were measured and hold within 15 %.
"""

from backbones.options import dit, lightningdit, mamba, rwkv, rwkv7
from backbones.options.family import KERNELS, BlockCost, Spec
from backbones.options.model import ModelConfig

FAMILIES = (dit.FAMILY, lightningdit.FAMILY, mamba.FAMILY, rwkv.FAMILY, rwkv7.FAMILY)

__all__ = ["FAMILIES", "KERNELS", "BlockCost", "ModelConfig", "Spec"]
