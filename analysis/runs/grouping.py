"""Which runs may stand in one table: what they share, and what was done to their tokens.

`base` is everything that must be equal before two runs are compared (backbone, size, data,
objective, optimiser, scoring protocol, ...) except the seed, the number of steps and how tokens
were routed. `treatment` is the routing: route, rate, selection, what happens to removed tokens. A
table's cell is the set of seeds of one base and one treatment.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import pandas as pd

from experiments.config.schema import role
from experiments.data.data_options import places
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
    """Return runs with the columns base, recipe, setting (the label of base) and treatment."""
    attrs, frame = frame.attrs, frame.copy(deep=False)
    frame.attrs = {}  # pandas copies them, however large, with every column
    versions = [set(keys) for keys in attrs.get("config_keys", [])]
    for data in frame["data"].unique():
        for column in (f"config.data.{key}" for key in places(str(data))):
            if column in frame:  # where the files lay, on whichever machine
                frame[column] = frame[column].mask(frame["data"] == data)
    if "config.init" in frame:
        # Seeds fine-tune their own parents; what they share is the parents' kind.
        frame = frame.assign(**{"config.init": frame["config.init"].map(parent)})
    frame = _filled(frame, [part for _, part in frame.groupby("backbone")], versions)
    columns = [*_HEAD, *_PROTOCOL, *_columns(frame)]
    shared = [c for c in columns if not c.startswith(("backbone", "config.backbone."))]
    frame = frame.assign(
        base=_keys(frame, columns),
        recipe=_keys(_filled(frame, [frame], versions), shared),
        treatment=[treatment(row) for row in frame.to_dict("records")],
    )
    apart = [*_PROTOCOL, *(c for c in _columns(frame) if c not in _IN_HEAD)]
    settings = frame["base"].map(labelled(frame, apart))
    frame = frame.assign(setting=settings, treatment=_told_apart(frame))
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


def _told_apart(frame: pd.DataFrame) -> pd.Series:
    """Return treatments, those of one base and name with the keys in which they still differ."""
    found = frame["treatment"].copy()
    for (_, name), part in frame.groupby(["base", "treatment"], sort=False):
        keys = tuple(f"config.{k}" for w, more in _FURTHER.items() if w in str(name) for k in more)
        own = _keys(part, [column for column in map(str, frame) if column.startswith(keys)])
        for place, text in zip(part.index, own, strict=True):
            found[place] = f"{name}, {text}".removesuffix(", ").replace("config.", "")
    return found


def parent(init: object) -> str | None:
    """Return `RUN@STEP` of a run's `init` without seed and hash; None for one from scratch."""
    if pd.isna(init):  # type: ignore[call-overload]
        return None
    name = re.split(r"[/\\\\]", str(init).rstrip("/\\"))[-1]
    return re.sub(r"_s\d+-[0-9a-f]{8}(?=@|$)", "", name)


def _columns(frame: pd.DataFrame) -> list[str]:
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
    for column in _columns(frame):
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


def labelled(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    """Return the label of every value of the column `base`; `columns` tell equal heads apart."""
    text = "{backbone}-{size}, {data}, {objective}, scale {scale}"
    heads = {
        str(row["base"]): text.format_map(row)
        for row in frame.drop_duplicates("base")[["base", *_HEAD]].to_dict("records")
    }
    labels = {}
    for key, head in heads.items():
        rivals = [other for other, text in heads.items() if text == head]
        apart = _difference(frame, key, rivals, columns) if len(rivals) > 1 else ""
        labels[key] = f"{head} ({apart})" if apart else head
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


def _difference(frame: pd.DataFrame, key: str, rivals: list[str], columns: Sequence[str]) -> str:
    among = frame[frame["base"].isin(rivals)]
    if "config.experiment" in among:
        # A named recipe says at once what a dozen keys would.
        recipes = among.assign(recipe=among["config.experiment"].fillna("none").map(str))
        own = recipes.groupby("base")["recipe"].unique()
        if own.map(len).eq(1).all() and own.map(lambda names: names[0]).is_unique:
            name = own[key][0]
            return "scale's own recipe" if name == "none" else f"experiment={name}"
    varying = [c for c in columns if c in among and among[c].map(str).nunique() > 1]
    # What a run leaves unset is told by what the others name.
    row = among[among["base"] == key].iloc[0]
    known = [c for c in varying if not pd.isna(row[c])]
    return ", ".join(f"{c.removeprefix('config.')}={row[c]}" for c in known)
