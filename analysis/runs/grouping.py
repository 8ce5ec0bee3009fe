"""Which runs may be compared (`group`), and what was done to their tokens (`variant`).

Runs of one group are equal in everything that decides what is learned (backbone, size, data,
objective, optimiser, scoring protocol, ...) except the seed, the number of steps and how tokens
were routed. The variant is the routing: route, rate, selection, what happens to removed tokens.
Runs of one group and variant differ in their seed alone and may be averaged.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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
# Data that are a user's own files: what lies at their path decides what is learned.
_OWN_DATA = ("folder", "latents")
# Routing options that a label names only where they differ from these; the method's name says what
# is learned, and the last two only how it is computed.
USUAL_OPTIONS = {
    option.name: str(option.default)
    for option in fields(RoutingOptions)
    if option.name not in ("route", "learned", "block", "fp32_after", "checkpoint")
}
# Further keys that distinguish variants, by method (`run_rows.method`, "TREAD + REPA" is both).
_KEYS_OF_METHOD = {
    "REPA": ("train.encoder", "train.align_weight", "backbone.align"),
    "SRA": ("train.align_weight", "train.teacher_", "backbone.align"),
    "MaskDiT": ("train.mae_weight", "backbone.decoder"),
    "TREAD v1": ("train.loss",),
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
    rows = pd.Series(frame.index, frame.index)
    backbones = [part.index for _, part in rows.groupby(frame["backbone"])]
    frame = _fill_unknown_keys(frame, backbones)
    texts = _varying_texts(
        frame, [*_HEAD, *_PROTOCOL, "data_fingerprint", *_learned_columns(frame)]
    )
    frame, networks = _with_networks(frame, _keys(texts, len(frame)))
    texts |= _varying_texts(frame, networks)
    frame["key"] = _keys(texts, len(frame))
    variants = _variants(frame)
    distinguishing, shared = [*_PROTOCOL, *networks], []
    for column in texts:
        if not column.startswith(("backbone", "config.backbone.")):
            shared.append(column)
        if column not in (*_HEAD, *_HEAD_KEYS, *distinguishing):
            distinguishing.append(column)
    labels = _labels(frame, [column for column in distinguishing if column in texts])
    shared_texts = _varying_texts(_fill_unknown_keys(frame, [frame.index]), shared)
    shared_config = pd.Series(_keys(shared_texts, len(frame)), frame.index)
    return runs.assign(
        group=frame["key"].map(labels).astype("string"),
        variant=variants.astype("string"),
        shared_config=shared_config.astype("string"),
    )


def settings(runs: pd.DataFrame, free: Collection[str]) -> pd.Series:
    """Return what decides what each run learns, as text, apart from its seed, steps and routing.

    `free` are columns that may differ too, such as the depth.
    """
    frame = _fill_unknown_keys(_comparable(runs), [runs.index])
    columns = [
        name for name in (*_HEAD, "data_fingerprint", *_learned_columns(frame)) if name not in free
    ]
    return pd.Series(_keys(_varying_texts(frame, columns), len(frame)), frame.index)


def _comparable(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs without what depends on the machine or the seed: paths of data and parents."""
    frame = runs.copy(deep=False)
    for data in frame["data"].unique():
        rows = frame["data"] == data
        for key in location_keys(str(data)):
            column = f"config.data.{key}"
            if column in frame and data not in _OWN_DATA:
                frame[column] = frame[column].mask(rows)
    for key in ("path", "test", "vae"):
        column = f"config.data.{key}"
        if column in frame and frame["data"].isin(_OWN_DATA).any():
            frame[column] = _first_spelling(frame[column], frame.get("data_fingerprint"))
    if "config.init" in frame:
        # Each seed fine-tunes its own parent: only the kind of parent is compared.
        frame["config.init"] = frame["config.init"].map(parent)
    return frame


def _first_spelling(paths: pd.Series, fingerprints: pd.Series | None) -> pd.Series:
    """Return for each path that of the first run on the same data: `d`, `./d` and a link are one.

    Runs of earlier versions without weights do not say what lay there: their paths are normalized.
    """
    paths = paths.map(os.path.normpath, na_action="ignore")
    if fingerprints is None:
        return paths
    first = paths.groupby(fingerprints).transform("first")
    return first.where(fingerprints.notna(), paths)


def _variants(frame: pd.DataFrame) -> pd.Series:
    """Return the variant of every run; runs of one group and variant differ in no routing key."""
    routing = [column for column in map(str, frame) if column.startswith("config.routing.")]
    needed = frame.columns.intersection(["method", "route", "config.init", *routing])
    names = [variant_of(row) for row in frame[needed].to_dict("records")]
    variants = pd.Series(names, frame.index)
    unset = pd.Series(None, frame.index, dtype=object)
    selections = frame.get("config.routing.selection", unset)
    # Grouping the names alone: a slice of all columns per variant takes longer than the rest.
    for (_, name), part in variants.copy().groupby([frame["key"], variants.copy()], sort=False):
        first = part.index[0]
        prefixes = _further_prefixes(str(frame.at[first, "method"]), selections[first])
        if not prefixes:
            continue
        columns = [column for column in map(str, frame) if column.startswith(prefixes)]
        texts = _varying_texts(frame.loc[part.index, columns], columns)
        details = _keys(texts, len(part))
        for index, detail in zip(part.index, details, strict=True):
            if detail:
                variants[index] = f"{name}, {detail}".replace("config.", "")
    return variants


def _further_prefixes(method: str, selection: object) -> tuple[str, ...]:
    """Return the prefixes of further columns that distinguish variants of a method."""
    keys: list[str] = []
    for part in method.split(" + "):
        keys += _KEYS_OF_METHOD.get(part, ())
    if selection == "blocks" and not method.startswith("dense"):
        keys.append("routing.block")
    return tuple(f"config.{key}" for key in keys)


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


def _fill_unknown_keys(frame: pd.DataFrame, parts: Sequence[pd.Index]) -> pd.DataFrame:
    """Give runs of an older version the value that all newer runs of their part share.

    `parts` are the indices of rows that may fill each other.

    A key that was added later and never used must not separate older runs from newer ones; one
    that newer runs set to several values still does.
    """
    versions = {text: set(text.split(",")) for text in frame["config_keys"].unique()}
    if len(versions) < 2:
        return frame
    known = [versions[text] for text in frame["config_keys"]]
    positions = [frame.index.get_indexer(part).tolist() for part in parts]
    filled = {}
    for column in _learned_columns(frame):
        has_key = [column in keys for keys in known]
        if all(has_key):
            continue
        values = frame[column].astype(object).tolist()
        for rows in positions:
            present = [values[row] for row in rows if has_key[row]]
            if len(set(map(str, present))) == 1:
                for row in rows:
                    values[row] = present[0]
        filled[column] = pd.Series(values, frame.index, dtype=object)
    return frame.assign(**filled)


def _varying_texts(frame: pd.DataFrame, columns: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of the columns that vary, as text."""
    texts = {}
    for column in columns:
        if column in frame:
            values = frame[column].map(str).tolist()
            if len(set(values)) > 1:
                texts[column] = values
    return texts


def _keys(texts: Mapping[str, Sequence[str]], count: int) -> list[str]:
    """Return `column=value; ...` of each of `count` rows."""
    keys = []
    for row in range(count):
        keys.append("; ".join([f"{column}={values[row]}" for column, values in texts.items()]))
    return keys


# --- labels ---------------------------------------------------------------------------------------


def _labels(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    """Return the label of every value of the column `key`; `columns` distinguish equal heads."""
    frame = frame[frame.columns.intersection([*_HEAD, "key", "config.experiment", *columns])]
    heads: dict[str, str] = {}
    for row in frame[[*_HEAD, "key"]].drop_duplicates("key").to_dict("records"):
        model = f"{row['backbone']}-{row['size']}"
        heads[row["key"]] = f"{model}, {row['data']}, {row['objective']}, scale {row['scale']}"
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
        names[str(key)] = "no experiment" if name == "none" else f"experiment={name}"
    return names if len(set(names.values())) == len(names) else {}


def _differences(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    """Return by key the values of the columns that vary; unset values are not named."""
    varying = _varying_texts(frame, columns)
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
    details = re.split(r", (?=[\w.]+=)", tail.removesuffix(")")) if tail else []
    return [*head.split(", "), *details]
