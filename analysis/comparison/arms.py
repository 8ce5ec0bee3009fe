"""Arms of a study (what was trained, apart from seed and steps): losses, step penalties, endpoints.

An arm is a group and variant of `analysis.runs.grouping`; the records of a run that was continued
are merged.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis.comparison.aggregation import DENSE, Estimate, holm, interval, p_text, two_sided_p
from analysis.comparison.step_penalty import (
    has_loss_at,
    log_ratio_at_equal_macs,
    loss_curves,
    paired_penalty,
)
from analysis.errors import AnalysisError
from analysis.runs.grouping import short_labels
from analysis.runs.loading import Runs, runs_of

# Of the experiment `evidence`; a label mentions only other values.
_USUAL_BATCH, _USUAL_DEPTH, _USUAL_OBJECTIVE = 16, 12, "edm"
DECLARED_BACKBONES = 3  # of `study_equal_macs`: the family of Holm's correction
Curves = dict[int, pd.DataFrame]  # by seed


@dataclass(frozen=True, order=True)
class Arm:
    """What was trained, apart from the seed and the number of steps.

    `group` and `variant` identify it (`analysis.runs.grouping.assign_groups`). The other fields are
    what its label and its baseline depend on; `detail` names the group where the others do not.
    """

    data: str
    backbone: str
    objective: str
    width: int
    depth: int
    batch: int
    variant: str
    lr: float
    group: str
    detail: str = ""

    @property
    def label(self) -> str:
        """How it differs from the dense model of the same backbone."""
        name = f"route {self.variant}" if self.variant[0].isdigit() else self.variant
        return ", ".join([name, *self.options])

    @property
    def options(self) -> list[str]:
        """Depth, batch, objective and width where they are not the usual ones, and the detail."""
        parts = []
        if self.depth != _USUAL_DEPTH:
            parts.append(f"{self.depth} blocks")
        if self.batch != _USUAL_BATCH:
            parts.append(f"batch {self.batch}")
        if self.detail:
            parts.append(self.detail)
        if self.objective != _USUAL_OBJECTIVE:
            parts.append(self.objective)
        if self.width:
            parts.append(f"width {self.width}")
        return parts

    @property
    def is_dense_baseline(self) -> bool:
        """Whether it is the dense model of usual depth and batch."""
        usual = self.depth == _USUAL_DEPTH and self.batch == _USUAL_BATCH
        return self.variant == DENSE and usual

    @property
    def is_routed(self) -> bool:
        """Whether tokens were routed; otherwise it is dense, from scratch or fine-tuned."""
        return not self.variant.startswith(DENSE)

    @property
    def setting(self) -> tuple[str, str, str, int]:
        """What two arms must share to be compared."""
        return (self.data, self.backbone, self.objective, self.width)


def arms(source: Runs) -> dict[Arm, Curves]:
    """Return the curves of held-out loss of every arm by seed.

    Args:
        source: What `analysis.load` returned, or a folder of run folders.

    Records of one run at several lengths (a run that was continued: the same hash) are merged by
    step. Of two runs of one arm and seed the one that was trained longer counts.
    """
    runs = runs_of(source)
    curves = loss_curves(runs)
    parts: dict[tuple[Arm, int, str], list[pd.DataFrame]] = {}
    for row, arm in rows_with_arms(runs, curves):
        key = (arm, int(row["seed"]), str(row["hash"]))
        parts.setdefault(key, []).append(curves[row["run"]])
    result: dict[Arm, Curves] = {}
    for arm, seed, name_hash in sorted(parts):
        joined = pd.concat(parts[arm, seed, name_hash]).drop_duplicates("step", keep="last")
        joined = joined.sort_values("step").astype(float).reset_index(drop=True)
        by_seed = result.setdefault(arm, {})
        if seed not in by_seed or joined["step"].max() > by_seed[seed]["step"].max():
            by_seed[seed] = joined
    return result


def rows_with_arms(runs: pd.DataFrame, names: Collection[str]) -> list[tuple[dict[Any, Any], Arm]]:
    """Return the rows of the named runs of `analysis.runs.loading.load`, each with its arm."""
    rows = [row for row in runs.to_dict("records") if row["run"] in names]
    return list(zip(rows, with_details([_arm(row) for row in rows]), strict=True))


def _arm(row: Mapping[Any, Any]) -> Arm:
    width, depth = row["config.backbone.width"], row["config.backbone.depth"]
    return Arm(
        data=str(row["data"]),
        backbone=str(row["backbone"]),
        objective=str(row["objective"]),
        width=0 if pd.isna(width) else int(width),
        depth=_USUAL_DEPTH if pd.isna(depth) else int(depth),
        batch=int(row["config.train.batch"]),
        variant=str(row["variant"]),
        lr=float(row["config.train.lr"]),
        group=str(row["group"]),
    )


def with_details(unnamed: Sequence[Arm]) -> list[Arm]:
    """Return the arms, with a `detail` where several differ only in their group."""
    groups: dict[Arm, set[str]] = {}
    for arm in unnamed:
        groups.setdefault(_shown_fields(arm), set()).add(arm.group)
    result = []
    for arm in unnamed:
        names = short_labels(sorted(groups[_shown_fields(arm)]))
        detail = names[arm.group] if len(names) > 1 else ""
        models = {name.split(", ")[0] for name in names.values()}
        if len(models) == 1:
            _, _, detail = detail.partition(", ")
        result.append(replace(arm, detail=detail))
    return result


def _shown_fields(arm: Arm) -> Arm:
    """Return what tables show of an arm's group; several groups that agree in it need a detail."""
    return replace(arm, group="", variant="")


def baseline_arm(arm: Arm, candidates: Iterable[Arm]) -> Arm | None:
    """Return the dense arm, one of the candidates, that an arm is compared with.

    That of its own group if there is one. Dense arms of another depth, batch or rate have none:
    they are compared with the dense arm at their learning rate, or with the only one there is.
    """
    similar = []
    for dense in candidates:
        if dense.variant == DENSE and dense.group == arm.group and dense != arm:
            return dense
        if not dense.is_dense_baseline:
            continue
        if dense == arm:
            return dense
        if dense.setting == arm.setting and dense.detail == arm.detail:
            similar.append(dense)
    for dense in similar:
        if dense.lr == arm.lr:
            return dense
    return similar[0] if len(similar) == 1 else None


def penalty_table(table: Mapping[Arm, Curves], steps: int) -> list[list[str]]:
    """Return the step penalty of routed arms at N = `steps` dense steps, a row per arm.

    The column of learning rates is left out where all arms have the same one.
    """
    head = ["Backbone", "Route", "Learning rate", "m", "s by seed", "s*m by seed"]
    rows = [[*head, "s*m (95 % interval)"]]
    for arm, curves in table.items():
        baseline = baseline_arm(arm, table)
        if baseline is None or not arm.is_routed:
            continue
        pairs = {}
        for seed, curve in curves.items():
            # Only a routed run that was trained for longer can reach the target.
            if seed in table[baseline] and curve["step"].max() > steps:
                pairs[seed] = curve
        if not pairs:
            continue
        penalty = paired_penalty(table[baseline], pairs, steps)
        if penalty.sm is None:
            verdict = penalty.censored_text
        else:
            verdict = f"{penalty.sm.text('.2f')} (n = {len(penalty.seeds)})"
        s_texts, sm_texts = [], []
        for row in penalty.seeds.to_dict("records"):
            s_texts.append("not reached" if row["censored"] else f"{row['s']:.2f}")
            sm_texts.append("not reached" if row["censored"] else f"{row['sm']:.2f}")
        m = f"{penalty.seeds['m'].mean():.2f}"
        texts = [f"{arm.lr:g}", m, ", ".join(s_texts), ", ".join(sm_texts), verdict]
        rows.append([arm.backbone, ", ".join([arm.variant, *arm.options]), *texts])
    if len({row[2] for row in rows[1:]}) <= 1:
        rows = [[*row[:2], *row[3:]] for row in rows]
    return rows


def arms_table(table: Mapping[Arm, Curves]) -> list[list[str]]:
    """Return every arm's held-out loss at its end, with its multiply-adds and its gap."""
    rows = [["Backbone", "Arm", "Learning rate", "Steps", "MACs", "Seeds", "Held-out loss", "Gap"]]
    for arm, curves in table.items():
        # The shortest seed: some may have been continued.
        step = min(curve["step"].max() for curve in curves.values())
        losses = []
        for curve in curves.values():
            last = curve[curve["step"] <= step].iloc[-1]
            losses.append(float(last["loss"]))
            macs = float(last["macs"])
        loss = interval(losses)
        if loss is None:
            continue
        cost = f"{macs / 1e12:.2f}T"
        seeds = ", ".join(str(seed) for seed in curves)
        name = [arm.backbone, arm.label]
        text = loss.half_width_text(".4f")
        gap = gap_text(curves, curves, step)
        rows.append([*name, f"{arm.lr:g}", f"{step:.0f}", cost, seeds, text, gap])
    return rows


def gap_text(curves: Curves, seeds: Iterable[int], step: float) -> str:
    """Return the mean gap at the last score up to `step`; empty unless all curves span it."""
    gaps = []
    for seed in seeds:
        logged = curves[seed]["step"]
        if not logged.min() <= step <= logged.max():
            return ""
        last = curves[seed][logged <= step].iloc[-1]
        gaps.append(float(last["routed_loss"] / last["loss"] - 1))
    return "" if math.isnan(gaps[0]) else f"{100 * sum(gaps) / len(gaps):.2f} %"


@dataclass(frozen=True)
class Comparison:
    """Two arms at equal multiply-adds: the log ratio of held-out loss by seed."""

    arm: Arm
    baseline: Arm
    log_ratios: dict[int, float]

    @property
    def compared_with(self) -> str:
        """Name of the baseline in tables."""
        return DENSE if self.baseline.is_dense_baseline else self.baseline.label

    @property
    def is_primary(self) -> bool:
        """Whether it is a routed arm against dense, the primary endpoint of `study_equal_macs`."""
        return self.arm.is_routed and self.is_against_baseline

    @property
    def is_against_baseline(self) -> bool:
        """Whether it is against the arm's dense baseline, and no other dense model."""
        return self.baseline.is_dense_baseline or self.baseline.group == self.arm.group


def comparisons(table: Mapping[Arm, Curves], steps: int) -> list[Comparison]:
    """Return the arms compared at the multiply-adds of `steps` dense steps.

    The first ones compare each arm with the dense baseline, the last ones the routed arm with the
    dense model of fewer blocks (the gate of `study_equal_macs`).
    """
    with_dense, with_shallow = [], []
    for arm, curves in table.items():
        baseline = baseline_arm(arm, table)
        if baseline is None or arm == baseline:
            continue
        last = next(iter(table[baseline].values())).iloc[-1]
        macs = float(last["macs"] / last["step"] * steps)
        _check_scored(table, (baseline, arm), macs, steps)
        ratios = log_ratio_at_equal_macs(table[baseline], curves, macs)
        with_dense.append(Comparison(arm, baseline, ratios))
        for other in table:
            is_shallow = not other.is_routed and other.depth < _USUAL_DEPTH
            is_gate = arm.is_routed and is_shallow and other != baseline
            if is_gate and other.setting == arm.setting:
                _check_scored(table, (arm, other), macs, steps)
                ratios = log_ratio_at_equal_macs(table[other], curves, macs)
                with_shallow.append(Comparison(arm, other, ratios))
    return [pair for pair in with_dense + with_shallow if pair.log_ratios]


def _check_scored(
    table: Mapping[Arm, Curves], compared: tuple[Arm, Arm], macs: float, steps: int
) -> None:
    """Raise `AnalysisError` if a run of the pairs was not scored on both sides of `macs`."""
    first, second = (table[arm] for arm in compared)
    for arm, seed in itertools.product(compared, sorted(set(first) & set(second))):
        curve = table[arm][seed]
        if has_loss_at(curve, "macs", macs):
            continue
        ends = dict.fromkeys(f"{curve['macs'].agg(end) / 1e12:.4g}T" for end in ("min", "max"))
        hint = "train it for more steps"
        if arm.is_dense_baseline:
            hint = f"try --steps N with N up to {curve['step'].max():.0f}"
        elif arm.is_routed:
            hint += f": python -m sweeps launch ... train.steps={steps} --compare-at flops"
        raise AnalysisError(
            f"{steps} dense steps cost {macs / 1e12:.4g}T MACs, but {arm.backbone} {arm.label}, "
            f"seed {seed}, was scored only at {' to '.join(ends)}; {hint}"
        )


def endpoints_table(
    table: Mapping[Arm, Curves], steps: int, declared_pairs: int = 2
) -> list[list[str]]:
    """Return the mean of each comparison at equal multiply-adds, as a change of loss, and s * m.

    A routed arm has a p-value once its declared pairs have finished (no interim test); the p-values
    are corrected (Holm) once all declared backbones have one.
    """
    rows: list[list[str]] = []
    p_values: dict[int, float] = {}
    pairs = comparisons(table, steps)
    for pair, label in zip(pairs, _arm_labels(pairs), strict=True):
        estimate = interval(pair.log_ratios.values())
        assert estimate is not None
        if pair.is_primary and estimate.n >= declared_pairs:
            p_values[len(rows)] = two_sided_p(estimate)
        saving = ""
        if pair.is_against_baseline:
            penalty = paired_penalty(table[pair.baseline], table[pair.arm], steps)
            saving = f"loss not reached by {penalty.censored} of {len(penalty.seeds)}"
            if penalty.sm is not None:
                saving = penalty.sm.text(".2f")
        row = [pair.arm.backbone, label, pair.compared_with, str(estimate.n)]
        rows.append([*row, percent_change(estimate), "", saving])
    is_complete = len(p_values) == DECLARED_BACKBONES
    shown = holm(p_values) if is_complete else p_values
    for index, p in shown.items():
        rows[index][5] = p_text(p)
    p_head = "p (Holm)" if is_complete else "p (uncorrected)"
    head = ["Backbone", "Arm", "Compared with", "Pairs", "Loss change at equal MACs (95 %)", p_head]
    head.append("s*m (95 %)")
    if not p_values:
        return [[*row[:5], *row[6:]] for row in (head, *rows)]
    return [head, *rows]


def seeds_table(table: Mapping[Arm, Curves], steps: int) -> list[list[str]]:
    """Return the change of loss at equal multiply-adds in per cent: by seed, and the median."""
    pairs = comparisons(table, steps)
    seeds = sorted({seed for pair in pairs for seed in pair.log_ratios})
    rows = [["Backbone", "Arm", "Compared with", *(f"seed {seed}" for seed in seeds), "median"]]
    for pair, label in zip(pairs, _arm_labels(pairs), strict=True):
        row = [pair.arm.backbone, label, pair.compared_with]
        for seed in seeds:
            ratio = pair.log_ratios.get(seed)
            row.append("" if ratio is None else _change(ratio))
        rows.append([*row, _change(statistics.median(pair.log_ratios.values()))])
    return rows


def _arm_labels(pairs: Sequence[Comparison]) -> list[str]:
    """Return the labels of the compared arms, with the learning rate if it differs among them."""
    labels = [pair.arm.label for pair in pairs]
    if len({pair.arm.lr for pair in pairs}) > 1:
        for index, pair in enumerate(pairs):
            labels[index] += f", learning rate {pair.arm.lr:g}"
    return labels


def _change(log_ratio: float) -> str:
    """Return a log ratio as a change in per cent, without the sign `%`."""
    return f"{100 * math.expm1(log_ratio):+.2f}"


def percent_change(estimate: Estimate) -> str:
    """Return a mean of log ratios as a change in per cent, with its interval."""
    text = f"{_change(estimate.mean)} %"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{_change(estimate.low)}, {_change(estimate.high)}]"
