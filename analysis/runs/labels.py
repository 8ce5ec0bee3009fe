"""What a group of runs is called, and what tells it from others of the same head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd


def labelled(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    """Return the label of every value of the column `base`.

    Args:
        frame: Runs, with the columns `base`, backbone, size, data, objective and scale.
        columns: What may tell bases of one head apart.
    """
    heads = {}
    for key, part in frame.groupby("base", sort=False):
        row = part.iloc[0]
        scale = f"scale {row['scale']}"
        heads[str(key)] = (
            f"{row['backbone']}-{row['size']}, {row['data']}, {row['objective']}, {scale}"
        )
    labels = {}
    for key, head in heads.items():
        rivals = [other for other, text in heads.items() if text == head]
        more = f" ({_difference(frame, key, rivals, columns)})" if len(rivals) > 1 else ""
        labels[key] = head + more
    return labels


def short(labels: Iterable[str]) -> dict[str, str]:
    """Return every label's shortest name that no other has: the model's, else the whole label."""
    known = list(dict.fromkeys(labels))
    names = [label.split(",")[0] for label in known]
    return {
        label: name if names.count(name) == 1 else label
        for label, name in zip(known, names, strict=True)
    }


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
    row = among[among["base"] == key].iloc[0]
    return ", ".join(f"{c.removeprefix('config.')}={row[c]}" for c in varying)
