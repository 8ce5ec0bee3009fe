"""Weights of other projects, under the name that their users import."""

from backbones.weights.published import NAMES, OBJECTIVES, SOURCES, convert, describe, load

__all__ = ["NAMES", "OBJECTIVES", "SOURCES", "convert", "describe", "load"]
