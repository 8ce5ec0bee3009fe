"""Does alignment to features (REPA, SRA) help? Runs with it against the same route without it."""

import numpy as np

from analysis.comparison.aggregation import DENSE, interval
from analysis.comparison.arms import percent_change
from analysis.comparison.final_scores import METRICS, scores_after
from analysis.runs.loading import Runs, runs_of

_SETTING = ["backbone", "objective", "route"]
_ENCODER = "config.train.encoder"  # `none` without alignment


def alignment_table(source: Runs, steps: int) -> list[list[str]]:
    """Return the changes that alignment makes to dense and routed runs after equal steps.

    Args:
        source: What `analysis.load` returned, or a folder of run folders.
        steps: Training steps; a run that goes on counts with its scores at this step.

    An aligned run is compared with the run of the same backbone, objective, route and seed that
    differs in nothing else. There are means over pairs, with the half-width of the 95 % t-interval.
    *MACs* is the ratio of training multiply-adds, with the pass of SRA's teacher but not of REPA's
    encoder.

    Raises:
        AnalysisError: Several runs that agree in all this, such as with two learning rates.
    """
    head = ["Backbone", "Arm", "Compared with", "MACs", "Pairs", *METRICS, "held-out loss (95 %)"]
    runs = runs_of(source)
    if _ENCODER not in runs or (runs[_ENCODER] == "none").all():
        return [head]
    frame = scores_after(runs, steps, [*_SETTING, _ENCODER, "variant"])
    is_plain = frame["variant"].eq(DENSE) | frame["variant"].eq(frame["route"])
    aligned = frame[frame[_ENCODER] != "none"]
    keys = [*_SETTING, "sampler", "seed"]
    pairs = aligned.merge(frame[is_plain], on=keys, suffixes=("", "_baseline"))
    rows = [head]
    for names, part in pairs.groupby(["backbone", "variant", "variant_baseline"]):
        ratio = (part["macs"] / part["macs_baseline"]).mean()
        texts = [*map(str, names), f"{ratio:.2f}x", str(len(part))]
        for metric, decimals in METRICS.items():
            change = interval(part[metric] - part[f"{metric}_baseline"])
            texts.append(change.half_width_text(f"+.{decimals}f") if change else "")
        loss = interval(np.log(part["loss"] / part["loss_baseline"]))
        rows.append([*texts, percent_change(loss) if loss else ""])
    return rows
