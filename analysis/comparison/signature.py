"""Does a route act like guidance? Scores under guidance, routed against dense, paired by seed."""

import pandas as pd

from analysis.comparison.aggregation import DENSE, interval
from analysis.comparison.final_scores import METRICS, scores_after
from analysis.comparison.guidance_settings import ROUTED_PASS, UNGUIDED, setting, setting_order
from analysis.runs.grouping import short_labels
from analysis.runs.loading import Runs, runs_of, scores

# How samples were made besides their guidance.
_PROTOCOL = ["n", "weights", "sample_seed", "sampler"]
_COLUMNS = ["Model", "Steps", "Samples", "Difference", "Pairs", *METRICS]


def signature_table(source: Runs) -> list[list[str]]:
    """Return how dense and routed scores differ, and how much guidance changes either.

    Args:
        source: What `analysis.load` returned, or a folder of run folders.

    Runs are compared with the dense run of the same group and seed, after each number of steps at
    which samples were scored under CFG, SG, or routed inference (the routed pass alone). *Change*
    is the score under a setting minus that without guidance. A value is the mean over pairs with
    the half-width of its 95 % t-interval, in the features of the data set's own classifier.

    Raises:
        AnalysisError: Several runs, or scores of one run, that differ in nothing else.
    """
    rows = [_COLUMNS]
    runs = runs_of(source)
    every_score = scores(runs)
    every_score["setting"] = every_score["guidance"].map(setting, na_action="ignore")
    numbers = every_score.groupby("step")["setting"].nunique()
    for step in numbers[numbers > 1].index:
        frame = scores_after(runs, int(step), ["group", "variant", "guidance", *_PROTOCOL[:-1]])
        frame = frame.assign(setting=frame["guidance"].map(setting)).dropna(subset="setting")
        models = short_labels(frame["group"].unique())
        for (group, n, *_), part in frame.groupby(["group", *_PROTOCOL], dropna=False):
            if part["setting"].nunique() < 2:
                continue  # such as the scores that training makes on the way
            for name, values in _differences(part):
                texts = [models[str(group)], f"{step:,.0f}", f"{n:,.0f}", name, str(len(values))]
                for metric, decimals in METRICS.items():
                    estimate = interval(values[metric])
                    texts.append(estimate.half_width_text(f"+.{decimals}f") if estimate else "")
                rows.append(texts)
    return rows


def _differences(part: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the differences within one model, each with its values by seed."""
    samples: dict[str, dict[str, pd.DataFrame]] = {}  # by setting, then by variant
    for (name, variant), rows in part.groupby(["setting", "variant"]):
        scores_by_seed = rows.set_index("seed")[list(METRICS)]
        samples.setdefault(str(name), {})[str(variant)] = scores_by_seed
    names = sorted(samples, key=setting_order)
    differences = []
    for name in names:
        under = "" if name == UNGUIDED else f" under {_title(name)}"
        for label, values in _minus_dense(samples[name]).items():
            differences.append((f"{label}{under}", values))
    for name in names:
        if name == UNGUIDED:
            continue
        changes = {}
        for variant, guided in samples[name].items():
            if variant in samples.get(UNGUIDED, {}):
                changes[variant] = _paired(guided, samples[UNGUIDED][variant])
        for label, values in {**changes, **_minus_dense(changes)}.items():
            differences.append((f"change by {_title(name)}, {label}", values))
    return [(label, values) for label, values in differences if len(values)]


def _minus_dense(frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return every routed variant minus dense."""
    differences = {}
    for variant in frames:
        if variant != DENSE and DENSE in frames:
            differences[f"{variant} - {DENSE}"] = _paired(frames[variant], frames[DENSE])
    return differences


def _paired(values: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Return the difference over the seeds that both have."""
    common = values.index.intersection(baseline.index)
    return values.loc[common] - baseline.loc[common]


def _title(name: str) -> str:
    return "routed inference" if name == ROUTED_PASS else name
