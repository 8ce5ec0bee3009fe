"""Held-out rows with a share of every class, without scikit-learn."""

from __future__ import annotations

import math

import numpy as np


def stratified_rows(labels: np.ndarray, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split rows into training and held-out ones, a share of every class, both ascending.

    The same rows as scikit-learn's `train_test_split(stratify=labels)`, whose import takes 2 s.
    """
    random = np.random.RandomState(seed)
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    test_count = math.ceil(fraction * len(labels))
    train_counts = _largest_remainders(counts, len(labels) - test_count, random)
    test_counts = _largest_remainders(counts - train_counts, test_count, random)
    train_rows: list[int] = []
    test_rows: list[int] = []
    for number, (of_train, of_test) in enumerate(zip(train_counts, test_counts, strict=True)):
        rows = np.flatnonzero(classes == number)
        shuffled = rows[random.permutation(len(rows))]
        train_rows += shuffled[:of_train].tolist()
        test_rows += shuffled[of_train : of_train + of_test].tolist()
    return sorted(train_rows), sorted(test_rows)


def _largest_remainders(
    counts: np.ndarray, total: int, random: np.random.RandomState
) -> np.ndarray:
    """Share out `total` rows in proportion to `counts`; ties of the last ones are drawn."""
    shares = counts / counts.sum() * total
    rounded = np.floor(shares)
    missing = int(total - rounded.sum())
    remainders = shares - rounded
    for value in sorted(set(remainders.tolist()), reverse=True):
        if missing <= 0:
            break
        (tied,) = np.where(remainders == value)
        chosen = random.choice(tied, size=min(len(tied), missing), replace=False)
        rounded[chosen] += 1
        missing -= len(chosen)
    return rounded.astype(int)
