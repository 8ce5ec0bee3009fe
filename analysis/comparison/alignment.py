"""Does alignment to features (REPA, SRA) help? Runs with it against runs without it."""

import numpy as np

from analysis.comparison.aggregation import interval
from analysis.comparison.arms import percent_change
from analysis.comparison.final_scores import METRICS, PROTOCOL, scores_after
from analysis.runs.grouping import short_labels, variant_of
from analysis.runs.loading import Runs, runs_of, scores

_ENCODER = "config.train.encoder"  # `none`, or missing in older records, without alignment
_COLUMNS = ["Model", "Arm", "Compared with", "MACs ratio", "Pairs", *METRICS]


def alignment_table(source: Runs, steps: int) -> list[list[str]]:
    """Return what alignment changes in dense and routed runs after equal steps.

    Args:
        source: What `analysis.load` returned, or a folder of run folders.
        steps: Training steps; a run that goes on counts with its scores at this step.

    An aligned run is compared with the run of the same group and seed that routes tokens in the
    same way without alignment. Only scores that were made during training count, in the features of
    the data set's own classifier. A change is aligned minus not aligned, the mean over pairs with
    the half-width of its 95 % t-interval; that of the held-out loss is in per cent. *MACs ratio* is
    the ratio of forward multiply-adds, with the pass of SRA's teacher, without REPA's encoder.
    """
    rows = [[*_COLUMNS, "held-out loss (95 %)"]]
    runs = runs_of(source)
    if _ENCODER not in runs:
        return rows
    is_aligned = runs[_ENCODER].fillna("none").ne("none").astype(bool)
    if not is_aligned.any():
        return rows
    unaligned_variants = []
    for run in runs.to_dict("records"):
        routing_method, _, _ = str(run["method"]).partition(" + ")
        unaligned_variants.append(variant_of({**run, "method": routing_method}))
    runs = runs.assign(is_aligned=is_aligned, unaligned=unaligned_variants)
    keys = ["group", "unaligned", *PROTOCOL]
    frame = scores_after(scores(runs), steps, [*keys, "is_aligned", "variant", "own"])
    frame = frame[frame["own"].astype(bool)]
    is_aligned = frame["is_aligned"].astype(bool)
    baselines = frame[~is_aligned & (frame["variant"] == frame["unaligned"])]
    pairs = frame[is_aligned].merge(baselines, on=[*keys, "seed"], suffixes=("", "_baseline"))
    models = short_labels(pairs["group"].unique())
    for names, part in pairs.groupby(["group", "variant", "unaligned"]):
        group, variant, unaligned = map(str, names)
        ratio = (part["macs"] / part["macs_baseline"]).mean()
        texts = [models[group], variant, unaligned, f"{ratio:.2f}x", str(len(part))]
        for metric, decimals in METRICS.items():
            change = interval(part[metric] - part[f"{metric}_baseline"])
            texts.append(change.half_width_text(f"+.{decimals}f") if change else "")
        loss = interval(np.log(part["loss"] / part["loss_baseline"]))
        rows.append([*texts, percent_change(loss) if loss else ""])
    return rows
