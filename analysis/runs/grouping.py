"""Which runs may stand in one table: what they share, and what was done to their tokens.

`base` is everything that must be equal before two runs are compared (backbone, size, data,
objective, optimiser, scoring protocol, ...) except the seed, the number of steps and how tokens
were routed. `treatment` is the routing: route, rate, selection, what happens to removed tokens. A
table's cell is the set of seeds of one base and one treatment.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import pandas as pd

from analysis.runs.run_records import check_attrs
from experiments.config.schema import role
from experiments.data.data_options import location_keys
from routing.options import RoutingOptions

_HEAD = ("backbone", "size", "data", "objective", "scale")
_IN_HEAD = {f"config.{name}{end}" for name in _HEAD for end in ("", ".name")}
FINE_TUNE = "dense fine-tune (F)"  # the treatment of dense runs from another run's weights
_PROTOCOL = ("guidance", "sampler", "reference")
# Routing options that a label names only where they differ from these; the variant's name says what
# is learned, and the last two only how it is computed.
USUAL_OPTIONS = {
    option.name: str(option.default)
    for option in fields(RoutingOptions)
    if option.name not in ("route", "learned", "block", "fp32_after", "checkpoint")
}
# Keys that decide the rest, by a word of the treatment's name: named where they differ.
_FURTHER = {
    "REPA": ("train.encoder", "train.align_weight", "backbone.align"),
    "MaskDiT": ("train.mae_weight", "backbone.decoder"),
    "TREAD v1": ("train.loss",),
    "selection=blocks": ("routing.block",),
}


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the columns base, recipe, setting (the label of base) and treatment.

    `AnalysisError` for a frame without the `attrs` of `analysis.load`.
    """
    attrs, frame = check_attrs(frame).attrs, frame.copy(deep=False)
    frame.attrs = {}  # pandas copies them, however large, with every column
    versions = [set(keys) for keys in attrs.get("config_keys", [])]
    for data in frame["data"].unique():
        own = [f"config.data.{key}" for key in location_keys(str(data))]
        for column in frame.columns.intersection(own):
            # Where the files lay, on whichever machine.
            frame[column] = frame[column].mask(frame["data"] == data)
    if "config.init" in frame:
        # Seeds fine-tune their own parents; what they share is the parents' kind.
        frame["config.init"] = frame["config.init"].map(parent)
    frame = _filled(frame, [part for _, part in frame.groupby("backbone")], versions)
    columns = [*_HEAD, *_PROTOCOL, *_learned(frame)]
    frame, networks = _with_networks(frame, _keys(frame, columns))
    columns += networks
    shared = [c for c in columns if not c.startswith(("backbone", "config.backbone."))]
    frame = frame.assign(
        base=_keys(frame, columns),
        recipe=_keys(_filled(frame, [frame], versions), shared),
        treatment=[treatment(row) for row in frame.to_dict("records")],
    )
    for (_, name), part in frame.groupby(["base", "treatment"], sort=False):
        # Those of one base and name, with the keys in which they still differ.
        keys = tuple(f"config.{k}" for w, more in _FURTHER.items() if w in str(name) for k in more)
        own = _keys(part, [column for column in map(str, frame) if column.startswith(keys)])
        texts = [f"{name}, {text}".removesuffix(", ").replace("config.", "") for text in own]
        frame.loc[part.index, "treatment"] = texts
    apart = [*_PROTOCOL, *networks, *(c for c in _learned(frame) if c not in _IN_HEAD)]
    frame["setting"] = frame["base"].map(_labels(frame, apart))
    frame.attrs = attrs
    return frame


def treatment(row: Mapping[Any, Any]) -> str:
    """Return how tokens were routed: `dense`, `2-8`, `2-8@0.75, selection=rows`."""
    variant = str(row["variant"])
    if variant.startswith("dense"):
        return variant if parent(row.get("config.init")) is None else FINE_TUNE
    name = "" if variant == "TREAD" else f"{variant} "
    options = [f"{name}{row['route']}".replace(" none", "")]
    for key, usual in USUAL_OPTIONS.items():
        value = row.get(f"config.routing.{key}")
        # The variant's name says these already.
        said = key == "reinsert" and value == "none"
        said = said or (key == "remove" and variant.startswith("no removal"))
        if not (said or pd.isna(value) or str(value) == usual):
            options.append(f"{key}={value}")
    return ", ".join(options)


def parent(init: object) -> str | None:
    """Return `RUN@STEP` of a run's `init` without seed and hash; None for one from scratch."""
    if pd.isna(init):  # type: ignore[call-overload]
        return None
    name = re.split(r"[/\\\\]", str(init).rstrip("/\\"))[-1]
    return re.sub(r"_s\d+-[0-9a-f]{8}(?=@|$)", "", name)


def _with_networks(frame: pd.DataFrame, groups: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """Add a column per feature extractor whose network differs between runs of one group.

    A score in the features of another network is another quantity, whatever its name says. Records
    that name an extractor without its hash form a group of their own. Runs without scores in
    features (a held-out loss alone) are split from nothing by that.
    """
    if "networks" not in frame:
        return frame, []
    of_run = [dict(_name_and_hash(text)) for text in frame["networks"].fillna("")]
    columns = {}
    for extractor in sorted({name for networks in of_run for name in networks}):
        weights = pd.Series([networks.get(extractor) for networks in of_run], frame.index, object)
        differ = weights.groupby(list(groups)).transform("nunique") > 1
        if differ.any():
            columns[f"network.{extractor}"] = weights.where(differ, None)
    return frame.assign(**columns), list(columns)


def _name_and_hash(text: str) -> list[tuple[str, str]]:
    """Return extractors and the starts of their hashes, of `mnist-classifier@114458aa ...`."""
    pairs = [network.partition("@") for network in text.split()]
    return [(name, weights) for name, _, weights in pairs]


def _learned(frame: pd.DataFrame) -> list[str]:
    """Columns of the keys that decide what is learnt, but for the seed that replicates it."""
    keys = {c: c.removeprefix("config.") for c in frame.columns if c.startswith("config.")}
    return [c for c, key in keys.items() if key != "seed" and role(key) == "learns"]


def _filled(
    frame: pd.DataFrame, parts: Sequence[pd.DataFrame], versions: Sequence[set[str]]
) -> pd.DataFrame:
    """Give runs of an older version the value that all newer runs of their part share.

    A key that was added later and never used must not part the runs before it from those after; one
    that newer runs set differently still does.
    """
    if len(versions) < 2:
        return frame
    filled = {}
    for column in _learned(frame):
        has = frame["config_keys"].map(lambda place, c=column: c in versions[int(place)])
        if has.all():
            continue
        values = frame[column].astype(object)
        for part in parts:
            present = values[part.index][has[part.index]]
            if present.map(str).nunique() == 1:
                values[part.index[~has[part.index]]] = present.iloc[0]
        filled[column] = values
    return frame.assign(**filled)


def _keys(frame: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    present = [column for column in columns if column in frame]
    # Only what varies can tell runs apart; the rest would make keys long for nothing.
    varying = [column for column in present if frame[column].map(str).nunique() > 1]
    rows = frame[varying].map(str).to_numpy().tolist() if varying else [[]] * len(frame)
    return ["; ".join(f"{c}={v}" for c, v in zip(varying, row, strict=True)) for row in rows]


def _labels(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    """Return the label of every value of the column `base`; `columns` tell equal heads apart."""
    text = "{backbone}-{size}, {data}, {objective}, scale {scale}"
    heads = {
        str(row["base"]): text.format_map(row)
        for row in frame.drop_duplicates("base")[["base", *_HEAD]].to_dict("records")
    }
    labels = dict(heads)
    for head, count in Counter(heads.values()).items():
        among = frame[frame["base"].map(heads) == head]
        if count > 1 and "config.experiment" in among:
            # A named recipe says at once what a dozen keys would.
            recipes = among["config.experiment"].fillna("none").map(str)
            own = recipes.groupby(among["base"]).unique()
            if own.map(len).eq(1).all() and own.map(lambda names: names[0]).is_unique:
                for key, (name,) in own.items():
                    said = "scale's own recipe" if name == "none" else f"experiment={name}"
                    labels[str(key)] = f"{head} ({said})"
                continue
        varying = [c for c in columns if c in among and among[c].map(str).nunique() > 1]
        for _, row in among.drop_duplicates("base").iterrows() if count > 1 else ():
            # What a run leaves unset is told by what the others name.
            known = [c for c in varying if not pd.isna(row[c])]
            apart = ", ".join(f"{c.removeprefix('config.')}={row[c]}" for c in known)
            labels[row["base"]] = f"{head} ({apart})" if apart else head
    return labels


def short(labels: Iterable[str]) -> dict[str, str]:
    """Return every label's short name: the model's, and what not all share where it takes that."""
    parts = {label: _parts(label) for label in labels}
    models = {part[0] for part in parts.values()}
    return {
        label: model
        if len(models) == len(parts)
        else ", ".join([model, *(t for t in rest if not all(t in p for p in parts.values()))])
        for label, (model, *rest) in parts.items()
    }


def shared(labels: Iterable[str]) -> str:
    """Return what labels share beside the model, `digits, edm, scale tiny`."""
    (_, *first), *others = map(_parts, labels)
    return ", ".join(text for text in first if all(text in other for other in others))


def _parts(label: str) -> list[str]:
    head, _, tail = label.partition(" (")
    return [*head.split(", "), *([tail.removesuffix(")")] if tail else [])]
