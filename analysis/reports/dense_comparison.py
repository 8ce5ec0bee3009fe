"""Routed variants against the dense runs of their group: scores, verdicts and cost, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from analysis.comparison.aggregation import (
    BETTER,
    ENOUGH_SEEDS,
    NOT_SIGNIFICANT,
    Estimate,
    change,
    verdict,
)
from analysis.comparison.groups import Group, Variant
from analysis.comparison.pair_penalty import pair_penalty
from analysis.comparison.results import Results
from analysis.tables.entries import gap, metric_decimals, metric_label


@dataclass(frozen=True)
class DenseComparison:
    """A routed variant against the dense runs of its group, paired by seed."""

    group: Group
    variant: Variant
    difference: Estimate  # of the group's metric, routed minus dense

    @classmethod
    def of(cls, group: Group, variant: Variant) -> DenseComparison | None:
        """Compare a variant; None where it has no common seed and step with dense runs."""
        difference = gap(variant, group.baseline, group.metric)
        return None if difference is None else cls(group, variant, difference)

    @property
    def has_enough_seeds(self) -> bool:
        """Whether there are enough pairs for a verdict."""
        return self.difference.n >= ENOUGH_SEEDS

    @property
    def rate(self) -> float:
        """The share of tokens that skips."""
        return float(self.variant.first("rate"))

    @property
    def verdict(self) -> str:
        """Whether the difference is significant and in which direction, or that seeds are few."""
        return verdict(self.difference, self.group.better)

    def describe(self) -> str:
        """Return both scores, dense and routed, with their difference and its verdict."""
        metric = self.group.metric
        digits = metric_decimals(metric)
        assert self.group.baseline is not None
        dense_scores = self.group.baseline.by_seed(metric, self.variant.step)
        routed_scores = self.variant.by_seed()
        common = sorted(dense_scores.keys() & routed_scores.keys())
        before = sum(dense_scores[seed] for seed in common) / len(common)
        after = sum(routed_scores[seed] for seed in common) / len(common)
        return (
            f"{metric_label(metric)} {before:.{digits}f} and {after:.{digits}f}, "
            f"{change(self.difference, digits)} (n={len(common)}, {self.verdict})"
        )


def relative_cost(results: Results, group: Group) -> str | None:
    """Return s * m of a group's main pair; None without enough seeds or where it is not measured.

    s * m is the multiply-adds that routed runs need for the held-out loss of dense ones, relative
    to dense (`analysis.comparison.pair_penalty`).
    """
    dense, routed = group.pair()
    if dense is None or routed is None:
        return None
    pair = pair_penalty(results, group, dense, routed)
    if pair is None or len(pair.last_steps) < ENOUGH_SEEDS:
        return None
    estimate = pair.penalty.sm
    if estimate is None or estimate.low is None or estimate.high is None:
        return pair.penalty.censored_text
    return f"{estimate.text('.2f')} at {pair.step:.0f} dense steps"


def tally(comparisons: Iterable[DenseComparison]) -> str:
    """Return how many comparisons with enough seeds are significant, in which direction."""
    verdicts: Counter[str] = Counter()
    few = 0
    for comparison in comparisons:
        if comparison.has_enough_seeds:
            verdicts[comparison.verdict] += 1
        else:
            few += 1
    total = sum(verdicts.values())
    text = f"no comparison with dense runs has {ENOUGH_SEEDS} paired seeds"
    if total:
        text = (
            f"of {total} comparisons with dense runs after equal steps, routed models are "
            f"significantly better in {verdicts[BETTER]}, significantly worse in "
            f"{verdicts['significantly worse']}, and not significantly different in "
            f"{verdicts[NOT_SIGNIFICANT]}"
        )
    if few and total:
        text += f" ({few} more have fewer than {ENOUGH_SEEDS} paired seeds)"
    return text
