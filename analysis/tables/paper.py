"""The published numbers, from `paper.yaml`: each with its table, version and metric.

They stand beside this suite's own numbers where data and metric are the same (`matches`) and are
never mixed with them: every table of the paper is a data frame whose `attrs` say where it stands,
on which metric and data, and how the numbers were obtained (`basis`: seen in the paper, a secondary
source, or derived by arithmetic that the note states).
"""

import functools
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis.comparison.groups import Group
from analysis.errors import pick

PAPER = Path(__file__).with_name("paper.yaml")


@functools.cache
def _document() -> dict[str, Any]:
    return yaml.load(PAPER.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def tables() -> list[str]:
    """Return the names of the paper's tables, in the order of the file."""
    return list(_document()["tables"])


def table(name: str) -> pd.DataFrame:
    """Return one published table of `tables()`, a row per published row, columns as published.

    `attrs` holds source, where, version, metric, data, basis and note. `AnalysisError` if there is
    no such table.
    """
    entry = pick("published table", name, _document()["tables"])
    frame = pd.DataFrame(entry["rows"])
    frame.attrs = {key: value for key, value in entry.items() if key != "rows"}
    return frame


def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a published table as dicts."""
    return [{str(k): v for k, v in row.items()} for row in table(name).to_dict("records")]


def citation(name: str) -> str:
    """Return where a table was published, in one line (for notes under our tables)."""
    entry = table(name).attrs
    source = _document()["sources"].get(entry["source"] or "")
    origin = source["title"] if source else "independent measurements"
    identifier = f" (arXiv {source['arxiv']})" if source and source["arxiv"] else ""
    where = f"{entry['where']}, {entry['version']}"
    return f"{origin}{identifier}, {where}: {entry['metric']}, {entry['data']}"


def matches(group: Group, name: str, data: str = "ImageNet-256") -> bool:
    """Return whether a group's score is that of a published table: its metric, on its data.

    The data are known by the name of the reference, as ADM's `VIRTUAL_imagenet256_labeled.npz`.
    """
    metric = table(name).attrs["metric"]
    data_name = data.removeprefix("MS-").replace("-", "").lower()
    reference = str(group.first("reference", "")).replace("-", "").lower()
    return group.metric == f"{metric} (inception-adm)" and data_name in reference


def main_row(family: str, objective: str, size: str) -> dict[str, Any] | None:
    """Return the main-table row of a backbone, or None where the paper has none.

    Only the DiT rows differ by objective and size: the other backbones have one row each.
    """
    for row in rows("main"):
        same = family != "dit" or (row["objective"], row["size"]) == (objective, size)
        if row["family"] == family and same:
            return row
    return None
