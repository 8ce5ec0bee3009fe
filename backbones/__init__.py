"""What processes tokens: one block file per family, one model around them, one size table.

    model = backbones.create("mamba", size="S/2", num_classes=1000)

No block knows that routing exists (`routing.Stack` does); nothing here trains.
"""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "sizes": ("BackboneError", "SIZES", "Size", "parse_size"),
        "model": ("Backbone", "Output", "create"),
        "registry": ("names", "register"),
        "cost": ("Cost",),
    },
)
