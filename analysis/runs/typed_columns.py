"""Rows with values of any type to a data frame whose columns have one type each."""

from __future__ import annotations

from typing import Any

import pandas as pd


def typed(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a data frame whose columns have one type each: boolean, Int64, float64 or text."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    columns = {name: _column([row.get(name) for row in rows]) for name in _ordered(list(names))}
    return pd.DataFrame(columns, index=range(len(rows)))


def _ordered(names: list[str]) -> list[str]:
    plain = [name for name in names if "." not in name]
    scores = [name for name in names if name.startswith("score.")]
    return plain + scores + sorted(name for name in names if name.startswith("config."))


def _column(values: list[Any]) -> pd.Series:
    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    if kinds and kinds <= {bool}:
        return pd.Series(values, dtype="boolean")
    if kinds and kinds <= {int} and max(map(abs, present)) < 2**63:
        return pd.Series(values, dtype="Int64")
    if kinds and kinds <= {int, float}:
        return pd.Series([float("nan") if v is None else float(v) for v in values], dtype="float64")
    return pd.Series([None if value is None else str(value) for value in values], dtype="string")
