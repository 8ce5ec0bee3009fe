"""Weights: our own files, the Hugging Face hub, and the weights of other projects."""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "files": ("read", "save_tensors", "write"),
        "hub": ("Pretrained", "hub_problem"),
        "published": ("NAMES", "OBJECTIVES", "SOURCES", "convert", "describe", "load"),
    },
)
