"""Options of data=digits (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.data.data_options import DataOptions, require


@dataclass(frozen=True)
class DigitsOptions(DataOptions):
    """scikit-learn's 1797 handwritten digits, 8x8 grey.

    Args:
        name: Always `digits`.
        sigma_data: Standard deviation of the scaled data.
        test_fraction: Share of every class that is held out from training.
        split_seed: Which samples are held out.
    """

    name: str = "digits"
    test_fraction: float = 0.2
    split_seed: int = 0

    sample_shape = (1, 8, 8)
    class_count = 10
    dataset = "experiments.data.digits.Digits"
    evaluation = "digits"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0.01 <= self.test_fraction <= 0.9,
            f"data.test_fraction={self.test_fraction}: must lie in 0.01..0.9; try "
            "data.test_fraction=0.2",
        )
