"""Choose runs: `backbone=dit,mamba`, `where="lr < 3e-3"`, or the name of a launched grid.

A key is a column of `analysis.load` (`backbone`, `method`, `step`) or a key of the configuration
(`train.lr`); the end of a key (`lr`) will do where only one key ends so. Values are separated by
commas, and `null` is an unset value, as on the command line of a run. `where` takes comparisons of
keys with numbers, texts in quotes or lists, joined by `and`, `or` and `not`.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.errors import AnalysisError
from analysis.runs import run_files
from routing.errors import suggest


class UnknownGrid(AnalysisError):
    """A word of the command line names no grid that was launched into the runs."""


_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def parse_arguments(words: Iterable[str]) -> dict[str, str]:
    """Return filters by key from the words of a command line; a word without `=` names a grid.

    Raises:
        AnalysisError: if a key or a second grid repeats.
    """
    filters: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            key, value = "grid", word
        if key in filters:
            raise AnalysisError(
                f"{key} is given twice ({filters[key]} and {value}); give it once, with commas "
                f"between values: {key}={filters[key]},{value}"
            )
        filters[key] = value
    return filters


def select(runs: pd.DataFrame, filters: Mapping[str, Any]) -> pd.DataFrame:
    """Return the runs that meet every filter.

    Args:
        runs: What `analysis.load` returned.
        filters: A value, a list of values or text with commas by key; `where` is an expression and
            `grid` the name of a launched grid.

    Raises:
        AnalysisError: for an unknown key or grid, a value of another type, or an expression that
            cannot be read.
    """
    for key, value in filters.items():
        if key == "where":
            chosen = _evaluate(runs, str(value))
        elif key == "grid":
            chosen = runs["run"].isin(_grid_runs(runs, str(value)))
        else:
            chosen = _is_one_of(key, runs[_column(runs, key)], _values(value))
        runs = runs[chosen.astype(bool)]
    return runs.reset_index(drop=True)


def _column(runs: pd.DataFrame, key: str) -> str:
    """Return the column that a key names."""
    columns = list(map(str, runs.columns))
    for column in (key, f"config.{key}", f"config.{key}.name"):
        if column in columns:
            return column
    ends = [column for column in columns if column.endswith(f".{key}")]
    if len(ends) == 1:
        return ends[0]
    names = [column.removeprefix("config.") for column in columns]
    if ends:
        options = ", ".join(column.removeprefix("config.") for column in ends)
        raise AnalysisError(f"{key} may be {options}; give the whole key")
    raise AnalysisError(
        f"no run has the key {key!r}; expected a column such as backbone or method, or a key of "
        f"the configuration such as train.lr{suggest(key, names)}"
    )


def _values(value: Any) -> list[Any]:
    if isinstance(value, str):
        return value.split(",")
    return list(value) if isinstance(value, Sequence) else [value]


def _is_one_of(key: str, column: pd.Series, values: Sequence[Any]) -> pd.Series:
    """Return which rows have one of the values; None and `null` are a missing one."""
    chosen = pd.Series(False, index=column.index)
    for value in values:
        if value is None or value == "null":
            chosen |= column.isna()
        else:
            chosen |= _compare(key, column, operator.eq, value)
    return chosen


def _compare(
    key: str, column: pd.Series, compare: Callable[[Any, Any], Any], value: Any
) -> pd.Series:
    """Compare a column with a value of its type; a missing value meets no comparison."""
    if isinstance(column.dtype, pd.BooleanDtype):
        column = column.astype("Float64")
        value = {"true": 1, "false": 0}.get(str(value).lower(), value)
    if pd.api.types.is_numeric_dtype(column):
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise AnalysisError(f"{key}={value}: expected a number, as the runs have") from None
        result = compare(column.astype("Float64"), number)
    elif compare in (operator.eq, operator.ne):
        result = compare(column.astype("string"), str(value))
    else:
        raise AnalysisError(f"{key} is a text in these runs; compare it with ==, != or in")
    return result.fillna(False).astype(bool)


# --- where ----------------------------------------------------------------------------------------


def _evaluate(runs: pd.DataFrame, expression: str) -> pd.Series:
    """Return which runs meet an expression such as `lr < 3e-3 and backbone == "dit"`."""
    try:
        return _condition(runs, ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError) as error:
        if isinstance(error, AnalysisError):
            raise
        raise AnalysisError(
            f"where={expression!r} cannot be read; expected comparisons such as "
            "\"lr < 3e-3 and backbone == 'dit'\""
        ) from None


def _condition(runs: pd.DataFrame, node: ast.expr) -> pd.Series:
    if isinstance(node, ast.BoolOp):
        conditions = [_condition(runs, value) for value in node.values]
        result = conditions[0]
        for condition in conditions[1:]:
            result = result & condition if isinstance(node.op, ast.And) else result | condition
        return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_condition(runs, node.operand)
    if not isinstance(node, ast.Compare):
        raise ValueError("no comparison")
    result = pd.Series(True, index=runs.index)
    operands = [node.left, *node.comparators]
    for left, comparison, right in zip(operands, node.ops, operands[1:], strict=False):
        result &= _comparison(runs, left, comparison, right)
    return result


def _comparison(
    runs: pd.DataFrame, left: ast.expr, comparison: ast.cmpop, right: ast.expr
) -> pd.Series:
    """Return which runs meet one comparison of a key with a constant, in either order."""
    if not isinstance(left, ast.Name | ast.Attribute):
        mirrored = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
        left, right = right, left
        comparison = mirrored.get(type(comparison), type(comparison))()
    key = _key(left)
    value = _constant(key, right)
    column = runs[_column(runs, key)]
    if isinstance(comparison, ast.In | ast.NotIn):
        if not isinstance(value, list | tuple | set):
            raise AnalysisError(f'{key} in {value!r}: expected a list, such as {key} in ["a", "b"]')
        chosen = _is_one_of(key, column, list(value))
        return ~chosen if isinstance(comparison, ast.NotIn) else chosen
    if value is None:
        return column.isna() if isinstance(comparison, ast.Eq | ast.Is) else column.notna()
    return _compare(key, column, _OPERATORS[type(comparison)], value)


def _constant(key: str, node: ast.expr) -> Any:
    """Return the constant that a key is compared with."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        text = ast.unparse(node)
        raise AnalysisError(
            f"where: {key} is compared with {text}; expected a number, a text in quotes "
            f'({key} == "{text}") or a list'
        ) from None


def _key(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_key(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no key")


# --- grids ----------------------------------------------------------------------------------------


def sweeps(runs: pd.DataFrame) -> dict[str, Path]:
    """Return the folders of the sweeps that were launched into the folders of runs, by grid."""
    folders = {}
    for root in runs["root"].unique() if "root" in runs else ():
        for record in sorted(Path(str(root)).glob(".sweeps/*/sweep.json")):
            folders[record.parent.name] = record.parent
    return folders


def _grid_runs(runs: pd.DataFrame, grid: str) -> set[str]:
    """Return the names of the run folders of a launched grid."""
    launched = sweeps(runs)
    if grid not in launched:
        names = ", ".join(launched) or "none"
        raise UnknownGrid(
            f"no grid called {grid!r} was launched into these runs; there are {names}"
            f"{suggest(grid, launched)}"
        )
    return set(sweep_runs(launched[grid]))


def sweep_runs(sweep: Path) -> dict[str, set[str]]:
    """Return the run folders in the record of a sweep, by name, with the keys that it varies.

    A record that cannot be read has none: `python -m sweeps status` reports it.
    """
    runs: dict[str, set[str]] = {}
    for run in run_files.json_or_nothing(sweep / "sweep.json").get("runs", {}).values():
        if isinstance(run, dict) and run.get("folder"):
            runs[Path(str(run["folder"])).name] = set(run.get("varies") or ())
    return runs


def exploratory(runs: pd.DataFrame) -> pd.Series:
    """Return which runs belong to searches and learning-rate sweeps and to no other grid.

    They look for settings: the best of many trials is no result.
    """
    trials: set[str] = set()
    others: set[str] = set()
    for sweep in sweeps(runs).values():
        for name, varying in sweep_runs(sweep).items():
            is_trial = (sweep / "search").is_dir() or "train.lr" in varying
            (trials if is_trial else others).add(name)
    return runs["run"].isin(trials - others).astype(bool)
