"""Does a route act like guidance? Scores under guidance, routed against dense, paired by seed."""

import pandas as pd

from analysis.comparison.aggregation import DENSE, interval
from analysis.comparison.final_scores import METRICS, PROTOCOL, scores_after
from analysis.comparison.guidance_settings import ROUTED_PASS, UNGUIDED, setting, setting_order
from analysis.errors import AnalysisError
from analysis.runs.grouping import short_labels
from analysis.runs.loading import Runs, runs_of, scores

# How samples were made besides their guidance; samples that differ in it are not compared.
_SAMPLING = [column for column in PROTOCOL if column != "guidance"]
_COLUMNS = ["Model", "Steps", "Samples", "Difference", "Pairs", *METRICS]


def signature_table(source: Runs) -> list[list[str]]:
    """Return how dense and routed scores differ, and how much guidance changes either.

    Args:
        source: What `analysis.load` returned, or a folder of run folders.

    Runs are compared with the dense run of the same group and seed, after each number of steps at
    which samples were scored under CFG, SG, or routed inference (the routed pass alone, at rate
    0.5). *Change* is the score under a setting minus that without guidance. A value is the mean
    over pairs with the half-width of its 95 % t-interval, in the features of the data set's own
    classifier; `(n=2)` marks a score that fewer pairs have.

    Raises:
        AnalysisError: Scores that cannot be told apart: several runs of one seed, a run that was
            scored twice under one setting, or several versions of the classifier.
    """
    rows = [_COLUMNS]
    every_score = scores(runs_of(source))
    every_score["setting"] = every_score["guidance"].map(setting, na_action="ignore")
    settings_per_step = every_score.groupby("step")["setting"].nunique()
    models = short_labels(every_score["group"].unique())
    for step in settings_per_step[settings_per_step > 1].index:
        frame = scores_after(every_score, int(step), ["group", "variant", "setting", *PROTOCOL])
        frame = frame.dropna(subset="setting")
        several = [name for name in _SAMPLING if name != "n" and frame[name].nunique() > 1]
        for (group, *_), part in frame.groupby(["group", *_SAMPLING], dropna=False):
            if part["setting"].nunique() < 2:
                continue  # such as the scores that training makes on the way
            first = part.iloc[0]
            samples = ", ".join([f"{first['n']:,.0f}", *map(str, first[several])])
            for label, values in _differences(part):
                texts = [models[str(group)], f"{step:,.0f}", samples, label, str(len(values))]
                rows.append([*texts, *_estimates(values)])
    return rows


def _estimates(values: pd.DataFrame) -> list[str]:
    texts = []
    for metric, decimals in METRICS.items():
        estimate = interval(values[metric])
        text = estimate.half_width_text(f"+.{decimals}f") if estimate else ""
        if estimate and estimate.n < len(values):
            text += f" (n={estimate.n})"
        texts.append(text)
    return texts


def _differences(part: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the differences within one model, each with its values by seed."""
    by_setting: dict[str, dict[str, pd.DataFrame]] = {}  # then by variant
    for (name, variant), rows in part.groupby(["setting", "variant"]):
        if rows["seed"].duplicated().any():  # such as `none` and `cfg scale=1.0`
            raise AnalysisError(f"{variant}: several scores of one seed under {name}; expected one")
        by_setting.setdefault(str(name), {})[str(variant)] = rows.set_index("seed")[list(METRICS)]
    names = sorted(by_setting, key=setting_order)
    differences = []
    for name in names:
        under = "" if name == UNGUIDED else f" under {_title(name)}"
        for label, values in _minus_dense(by_setting[name]).items():
            differences.append((f"{label}{under}", values))
    unguided = by_setting.get(UNGUIDED, {})
    for name in names:
        changes = {}
        for variant, values in by_setting[name].items():
            if name != UNGUIDED and variant in unguided:
                changes[variant] = _paired(values, unguided[variant])
        for label, values in {**changes, **_minus_dense(changes)}.items():
            differences.append((f"{label}, change by {_title(name)}", values))
    return [(label, values) for label, values in differences if len(values)]


def _minus_dense(frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return every other variant minus dense."""
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
