"""Which runs may be compared (`group`), and what was done to their tokens (`variant`).

Runs of one group are equal in everything that decides what is learned (backbone, size, data,
objective, optimiser, scoring protocol, ...) except the seed, the number of steps and how tokens
were routed. The variant is the routing: route, rate, selection, what happens to removed tokens.
Runs of one group and variant differ in their seed alone and may be averaged.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import pandas as pd

from experiments.config.identity import role
from experiments.data.registry import location_keys
from routing.options import RoutingOptions

_HEAD = ("backbone", "size", "data", "objective", "scale")
_HEAD_KEYS = {f"config.{name}{end}" for name in _HEAD for end in ("", ".name")}
FINE_TUNE = "dense fine-tune (F)"  # the variant of dense runs from another run's weights
_PROTOCOL = ("guidance", "sampler", "reference")
# Routing options that a label names only where they differ from these; the method's name says what
# is learned, and the last two only how it is computed.
USUAL_OPTIONS = {
    option.name: str(option.default)
    for option in fields(RoutingOptions)
    if option.name not in ("route", "learned", "block", "fp32_after", "checkpoint")
}
# Further keys that distinguish variants, by a word of the variant's name.
_FURTHER_KEYS = {
    "REPA": ("train.encoder", "train.align_weight", "backbone.align"),
    "SRA": ("train.align_weight", "train.teacher_", "backbone.align"),
    "MaskDiT": ("train.mae_weight", "backbone.decoder"),
    "TREAD v1": ("train.loss",),
    "selection=blocks": ("routing.block",),
}


def assign_groups(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the columns `group`, `variant` and `shared_config`.

    Args:
        runs: What `analysis.load` returned; columns of these names are replaced. The label of a
            group names what distinguishes it from the other groups of this frame, so call it again
            after concat.
    """
    if runs.empty:
        return runs.assign(group=pd.Series(dtype="string"), variant="", shared_config="")
    frame = _comparable(runs)
    frame = _fill_unknown_keys(frame, [part for _, part in frame.groupby("backbone")])
    columns = [*_HEAD, *_PROTOCOL, *_learned_columns(frame)]
    frame, networks = _with_networks(frame, _keys(frame, columns))
    columns += networks
    frame["key"] = _keys(frame, columns)
    variants = _variants(frame)
    distinguishing = [*_PROTOCOL, *networks]
    shared = []
    for column in columns:
        if not column.startswith(("backbone", "config.backbone.")):
            shared.append(column)
        if column not in (*_HEAD, *_HEAD_KEYS, *distinguishing):
            distinguishing.append(column)
    labels = _labels(frame, distinguishing)
    shared_config = pd.Series(_keys(_fill_unknown_keys(frame, [frame]), shared), frame.index)
    return runs.assign(
        group=frame["key"].map(labels).astype("string"),
        variant=variants.astype("string"),
        shared_config=shared_config.astype("string"),
    )


def _comparable(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs without what depends on the machine or the seed: paths of data and parents."""
    frame = runs.copy(deep=False)
    for data in frame["data"].unique():
        for key in location_keys(str(data)):
            column = f"config.data.{key}"
            if column in frame:
                frame[column] = frame[column].mask(frame["data"] == data)
    if "config.init" in frame:
        # Each seed fine-tunes a parent of its own; what they share is the kind of parent.
        frame["config.init"] = frame["config.init"].map(parent)
    return frame


def _variants(frame: pd.DataFrame) -> pd.Series:
    """Return the variant of every run; runs of one group and variant differ in no routing key."""
    variants = pd.Series([variant_of(row) for row in frame.to_dict("records")], frame.index)
    for (_, name), part in frame.groupby(["key", variants.copy()], sort=False):
        prefixes: tuple[str, ...] = ()
        for pattern, keys in _FURTHER_KEYS.items():
            if pattern in str(name):
                prefixes += tuple(f"config.{key}" for key in keys)
        columns = [column for column in map(str, frame) if column.startswith(prefixes)]
        details = _keys(part, columns if prefixes else [])
        for index, detail in zip(part.index, details, strict=True):
            if detail:
                variants[index] = f"{name}, {detail}".replace("config.", "")
    return variants


def variant_of(row: Mapping[Any, Any]) -> str:
    """Return how tokens were routed: `dense`, `2-8`, `2-8@0.75, selection=rows`."""
    method = str(row["method"])
    if method.startswith("dense"):
        return method if parent(row.get("config.init")) is None else FINE_TUNE
    prefix = "" if method == "TREAD" else f"{method} "
    parts = [f"{prefix}{row['route']}".replace(" none", "")]
    for key, usual in USUAL_OPTIONS.items():
        value = row.get(f"config.routing.{key}")
        # The method's name implies these.
        implied = key == "reinsert" and value == "none"
        implied = implied or (key == "remove" and method.startswith("no removal"))
        if not (implied or pd.isna(value) or str(value) == usual):
            parts.append(f"{key}={value}")
    return ", ".join(parts)


def parent(init: object) -> str | None:
    """Return `RUN@STEP` of a run's `init` without seed and hash; None for one from scratch."""
    if pd.isna(init):  # type: ignore[call-overload]
        return None
    name = re.split(r"[/\\\\]", str(init).rstrip("/\\"))[-1]
    return re.sub(r"_s\d+-[0-9a-f]{8}(?=@|$)", "", name)


def _with_networks(frame: pd.DataFrame, groups: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """Add a column per feature extractor whose network differs between runs of one group.

    Scores in the features of different networks are different quantities, whatever their names.
    Records that name an extractor without its hash form a group of their own; runs without scores
    in features (a held-out loss alone) are split by none.
    """
    if "networks" not in frame:
        return frame, []
    hashes: dict[str, dict[Any, str]] = {}  # extractor -> row -> hash
    for index, text in frame["networks"].fillna("").items():
        # `mnist-classifier@114458aa inception@...`
        for network in text.split():
            extractor, _, weights = network.partition("@")
            hashes.setdefault(extractor, {})[index] = weights
    columns = {}
    for extractor in sorted(hashes):
        weights_of_run = pd.Series(hashes[extractor], dtype=object).reindex(frame.index)
        differ = weights_of_run.groupby(list(groups)).transform("nunique") > 1
        if differ.any():
            columns[f"network.{extractor}"] = weights_of_run.where(differ, None)
    return frame.assign(**columns), list(columns)


def _learned_columns(frame: pd.DataFrame) -> list[str]:
    """Return the columns of keys that decide what is learned, except the seed."""
    columns = []
    for column in map(str, frame.columns):
        key = column.removeprefix("config.")
        if column.startswith("config.") and key != "seed" and role(key) == "learns":
            columns.append(column)
    return columns


def _fill_unknown_keys(frame: pd.DataFrame, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Give runs of an older version the value that all newer runs of their part share.

    A key that was added later and never used must not separate older runs from newer ones; one
    that newer runs set to several values still does.
    """
    versions = {text: set(text.split(",")) for text in frame["config_keys"].unique()}
    if len(versions) < 2:
        return frame
    filled = {}
    for column in _learned_columns(frame):
        has_column = {text: column in keys for text, keys in versions.items()}
        has_key = frame["config_keys"].astype(object).map(has_column).astype(bool)
        if has_key.all():
            continue
        values = frame[column].astype(object)
        for part in parts:
            present = values[part.index][has_key[part.index]]
            if present.map(str).nunique() == 1:
                values[part.index[~has_key[part.index]]] = present.iloc[0]
        filled[column] = values
    return frame.assign(**filled)


def _keys(frame: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Return `column=value; ...` of every row, over the columns that vary."""
    keys = [""] * len(frame)
    for column in columns:
        if column not in frame:
            continue
        texts = frame[column].map(str)
        if texts.nunique() > 1:
            for index, text in enumerate(texts):
                separator = "; " if keys[index] else ""
                keys[index] += f"{separator}{column}={text}"
    return keys


# --- labels ---------------------------------------------------------------------------------------


def _labels(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    """Return the label of every value of the column `key`; `columns` distinguish equal heads."""
    groups = frame.drop_duplicates("key").set_index("key")
    heads: dict[str, str] = {}
    for key, row in groups.iterrows():
        model = f"{row['backbone']}-{row['size']}"
        heads[str(key)] = f"{model}, {row['data']}, {row['objective']}, scale {row['scale']}"
    labels = {}
    for head, count in Counter(heads.values()).items():
        same_head = frame[frame["key"].map(heads) == head]
        if count == 1:
            details = dict.fromkeys(same_head["key"], "")
        else:
            details = _experiments(same_head) or _differences(same_head, columns)
        for key, detail in details.items():
            labels[str(key)] = f"{head} ({detail})" if detail else head
    return _unique(labels)


def _experiments(frame: pd.DataFrame) -> dict[str, str]:
    """Return the experiment's name by key where every key has one of its own; else nothing."""
    if "config.experiment" not in frame:
        return {}
    names = {}
    for key, experiments in frame["config.experiment"].fillna("none").groupby(frame["key"]):
        if experiments.nunique() > 1:
            return {}
        name = str(experiments.iloc[0])
        names[str(key)] = "scale's own recipe" if name == "none" else f"experiment={name}"
    return names if len(set(names.values())) == len(names) else {}


def _differences(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    """Return by key the values of the columns that vary; unset values are not named."""
    varying = []
    for column in columns:
        if column in frame and frame[column].map(str).nunique() > 1:
            varying.append(column)
    texts = {}
    for row in frame.drop_duplicates("key").to_dict("records"):
        parts = []
        for column in varying:
            if not pd.isna(row[column]):
                parts.append(f"{column.removeprefix('config.')}={row[column]}")
        texts[row["key"]] = ", ".join(parts)
    return texts


def _unique(labels: dict[str, str]) -> dict[str, str]:
    """Number labels that several keys share: they must not be averaged."""
    counts: Counter[str] = Counter()
    result = {}
    for key, label in labels.items():
        counts[label] += 1
        result[key] = label if counts[label] == 1 else f"{label} [{counts[label]}]"
    return result


def short_labels(labels: Iterable[str]) -> dict[str, str]:
    """Return every label's short name: the model, and what not all share where models repeat."""
    parts = {label: _parts(label) for label in labels}
    models = {part[0] for part in parts.values()}
    common = set.intersection(*map(set, parts.values())) if parts else set[str]()
    names = {}
    for label, (model, *details) in parts.items():
        if len(models) == len(parts):
            names[label] = model
        else:
            differing = [detail for detail in details if detail not in common]
            names[label] = ", ".join([model, *differing])
    return names


def shared_label(labels: Iterable[str]) -> str:
    """Return what labels share beside the model, `digits, edm, scale tiny`."""
    (_, *first), *remaining = map(_parts, labels)
    for parts in remaining:
        first = [text for text in first if text in parts]
    return ", ".join(first)


def _parts(label: str) -> list[str]:
    head, _, tail = label.partition(" (")
    return [*head.split(", "), *([tail.removesuffix(")")] if tail else [])]
