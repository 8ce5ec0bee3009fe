"""Options of data=digits (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.data.data_options import SplitOptions


@dataclass(frozen=True)
class DigitsOptions(SplitOptions):
    """scikit-learn's 1797 handwritten digits, 8x8 grey.

    Args:
        name: Always `digits`.
    """

    name: str = "digits"

    sample_shape = (1, 8, 8)
    class_count = 10
    dataset = "experiments.data.digits.Digits"
    evaluation = "digits"
    patch = 1
