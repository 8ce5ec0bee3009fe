"""Routed against dense models at equal multiply-adds (MACs), every cheaper dense model included.

A route makes a step cheaper, and so do fewer blocks, a smaller width or a smaller batch. A routed
model is therefore compared with the dense model of its own network and with each dense model of the
same setting that costs fewer MACs per step. The losses are held-out losses of the dense pass, which
are logged on the way (`eval.metrics=[heldout_loss] eval.every=250`) and interpolated to the exact
MACs, linearly in the logarithm of the MACs. Seeds are paired.

A frame of loss curves has a row per run and scored step:

    setting    what is comparable: data, objective, optimiser, ... but not the network's size
    network    size, depth, width, batch and rate; a routed run is compared first with its own
    variant    how tokens were routed, or `dense`
    model      network and variant as tables show them: what all models share is left out
    dense      whether all blocks saw all tokens
    seed, step, macs, loss
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.comparison.aggregation import DENSE, Estimate, interval
from analysis.comparison.results import Results
from analysis.comparison.step_penalty import curves_by_run, log_ratio_at_equal_macs, paired_penalty
from analysis.errors import AnalysisError
from analysis.runs.grouping import settings
from backbones.sizes import parse_size

# What may differ between a routed model and a dense opponent.
FREE = ("size", "config.backbone.depth", "config.backbone.width", "config.train.batch",
        "config.train.lr", "scale")  # fmt: skip
# Shares of the most MACs that every run of a pair has reached.
SHARES = (0.25, 0.5, 1.0)
_CURVE = ["step", "macs", "loss"]
_COLUMNS = ["setting", "network", "variant", "model", "dense", "seed", *_CURVE]
Curves = dict[int, pd.DataFrame]  # by seed: step, macs, loss


@dataclass(frozen=True)
class Comparison:
    """A routed model against a dense one at equal MACs, paired by seed.

    Attributes:
        steps: Numbers of steps N of the dense opponent at whose MACs the two are compared.
        change: ln(routed loss / dense loss) at each N, over seeds.
        trend: Change of that per doubling of the MACs.
        m: MACs per step, routed over dense.
        penalty: s * m at the last N: MACs to the dense loss, relative to dense; None if a seed does
            not reach it.
        censored: Number of seeds that do not reach it; 0 with `penalty` None: it was reached before
            the first score.
    """

    heading: str
    variant: str
    opponent: str
    own: bool  # whether the opponent is the dense model of the same network
    steps: tuple[float, ...]
    change: tuple[Estimate, ...]
    trend: Estimate | None
    m: float
    penalty: Estimate | None
    censored: int

    @property
    def verdict(self) -> str:
        """What the 95 % interval at the last N says of the runs so far."""
        last = self.change[-1]
        if last.low is None or last.high is None or last.low <= 0 <= last.high:
            return "undecided"
        return "pays so far" if last.high < 0 else "does not pay"


def loss_curves(results: Results) -> pd.DataFrame:
    """Return the loss curves of all runs, or of the CSV file that the results were read from."""
    return curves_of_runs(results) if results.curves is None else results.curves


def curves_of_runs(results: Results) -> pd.DataFrame:
    """Return the loss curves of all runs; of runs of one variant and seed the longest counts."""
    runs = results.runs.dropna(subset=["seed"])
    scores = results.own_scores
    scores = scores[scores["key"] == "heldout_loss"]
    curves = curves_by_run(scores.dropna(subset=["step", "macs"]), "path")
    runs = runs[runs["path"].isin(list(curves))]
    if runs.empty:
        return pd.DataFrame(columns=_COLUMNS)
    runs = runs.assign(setting=_readable(runs), network=_networks(runs))
    keys = ["setting", "network", "variant", "seed"]
    longest = runs.sort_values("step", kind="stable").drop_duplicates(keys, keep="last")
    parts = []
    for row in longest.sort_values(keys).to_dict("records"):
        labels = {key: row[key] for key in keys}
        curve = curves[row["path"]][_CURVE].astype(float)
        parts.append(curve.assign(**labels, dense=str(row["variant"]).startswith(DENSE)))
    return _with_models(pd.concat(parts, ignore_index=True))


def _readable(runs: pd.DataFrame) -> pd.Series:
    """Return each run's setting: backbone, data and objective, then what else distinguishes it."""
    keys = settings(runs, FREE)
    heads = runs["backbone"] + ", " + runs["data"] + ", " + runs["objective"]
    details = {}
    for head, part in keys.groupby(heads):
        texts = [set(key.split("; ")) for key in part.unique()]
        common = set.intersection(*texts)
        for key in part.unique():
            own = [text for text in key.split("; ") if text not in common]
            details[head, key] = ", ".join([head, *own]).replace("config.", "")
    return pd.Series([details[pair] for pair in zip(heads, keys, strict=True)], runs.index)


def _with_models(curves: pd.DataFrame) -> pd.DataFrame:
    """Add the column `model`: variant and network without what all networks of a setting share."""
    names = {}
    for setting, part in curves.groupby("setting", sort=False):
        networks = [network.split(", ") for network in part["network"].unique()]
        common = set.intersection(*map(set, networks))
        for network in part["network"].unique():
            own = [text for text in network.split(", ") if text not in common]
            names[setting, network] = ", ".join(own)
    models = []
    for setting, network, variant in curves[["setting", "network", "variant"]].itertuples(
        index=False
    ):
        name = variant if variant[:1].isalpha() else f"route {variant}"
        models.append(", ".join(filter(None, [name, names[setting, network]])))
    return curves.assign(model=models)


def _networks(runs: pd.DataFrame) -> list[str]:
    """Return the network, batch and learning rate of every run, as text; unset values resolved."""
    texts = []
    for row in runs.to_dict("records"):
        size = parse_size(str(row["size"]))
        depth, width = row.get("config.backbone.depth"), row.get("config.backbone.width")
        depth = size.depth if pd.isna(depth) else int(depth)
        width = size.width if pd.isna(width) else int(width)
        batch, lr = int(row["config.train.batch"]), float(row["config.train.lr"])
        name = f"{row['backbone']} {row['size']}"
        texts.append(f"{name}, {depth} blocks, width {width}, batch {batch}, lr {lr:g}")
    return texts


def comparisons(curves: pd.DataFrame) -> list[Comparison]:
    """Compare every routed model with the dense model of its network, then with each cheaper one.

    A pair without a seed in common that both scored twice or more is left out.
    """
    result = []
    for setting, part in curves.groupby("setting", sort=False):
        models: dict[str, Curves] = {}
        facts = part.drop_duplicates("model").set_index("model")[["network", "dense"]]
        for (model, seed), curve in part.groupby(["model", "seed"], sort=False):
            by_seed = models.setdefault(str(model), {})
            by_seed[int(str(seed))] = curve[_CURVE].reset_index(drop=True)
        for model in facts.index[~facts["dense"].astype(bool)]:
            for opponent in _opponents(models, facts, model):
                pair = _compare(models[model], models[opponent])
                if pair is not None:
                    own = facts["network"][opponent] == facts["network"][model]
                    result.append(Comparison(str(setting), model, opponent, own, **pair))
    return result


def _opponents(models: dict[str, Curves], facts: pd.DataFrame, model: str) -> list[str]:
    """Return the dense models to compare with: the same network, then cheaper ones by cost."""
    dense = sorted(
        facts.index[facts["dense"].astype(bool)], key=lambda m: -macs_per_step(models[m])
    )
    own = [name for name in dense if facts["network"][name] == facts["network"][model]]
    if not own:
        return dense
    limit = macs_per_step(models[own[0]]) * (1 - 1e-6)
    return own + [name for name in dense if name not in own and macs_per_step(models[name]) < limit]


def macs_per_step(curves: Curves) -> float:
    """Return the multiply-adds of a training step, from the last score of one seed."""
    last = next(iter(curves.values())).iloc[-1]
    return float(last["macs"] / last["step"])


def _compare(routed: Curves, dense: Curves) -> dict[str, Any] | None:
    """Return the fields of a `Comparison` that come from the curves; None without a common seed."""
    seeds = []
    for seed in sorted(routed.keys() & dense.keys()):
        if min(len(routed[seed]), len(dense[seed])) > 1:
            seeds.append(seed)
    if not seeds:
        return None
    pairs = [(routed[seed]["macs"], dense[seed]["macs"]) for seed in seeds]
    first = max(max(a.iloc[0], b.iloc[0]) for a, b in pairs)
    last = min(min(a.iloc[-1], b.iloc[-1]) for a, b in pairs)
    points = [last * share for share in SHARES if last * share >= first]
    if not points:
        return None
    by_point = [
        log_ratio_at_equal_macs(dense, {s: routed[s] for s in seeds}, macs) for macs in points
    ]
    trend = None
    if len(points) > 1:
        doublings = math.log2(points[-1] / points[0])
        trend = interval([(by_point[-1][s] - by_point[0][s]) / doublings for s in seeds])
    cost = macs_per_step(dense)
    penalty, censored = None, len(seeds)
    try:
        paired = paired_penalty(dense, {seed: routed[seed] for seed in seeds}, last / cost)
        penalty, censored = paired.sm, paired.censored
    except AnalysisError:  # the routed run's first score is below the target: s is unknown
        censored = 0
    return {
        "steps": tuple(point / cost for point in points),
        "change": tuple(interval(ratios.values()) for ratios in by_point),
        "trend": trend,
        "m": macs_per_step(routed) / cost,
        "penalty": penalty,
        "censored": censored,
    }
