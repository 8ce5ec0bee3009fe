"""Seed pairs whose dense and routed run were last started with different versions of the code.

Each start of a run overwrites env.json, so the version that a continued run began with is unknown.
"""

import functools

from analysis.comparison.aggregation import one_per_seed
from analysis.comparison.groups import Group, Variant
from analysis.comparison.results import Results
from analysis.tables.table import Table

_COMMIT_LENGTH = 7  # without the mark of files that were changed since
# Tables of costs compare no scores, so that versions of the code do not matter.
_UNPAIRED = ("throughput", "benchmark")
# Commit of the run behind each score, by group, variant, metric and step, then by seed.
Commits = dict[tuple[str, str, str, float], dict[int, str]]


def mixed_seeds(results: Results, group: Group, routed: Variant) -> list[int]:
    """Return the seeds of which the commits of a pair's two runs are known and differ.

    The runs are those whose scores by the group's metric are paired after the variant's steps.
    """
    if group.baseline is None:
        return []
    commits = _commits(results)
    key = group.metric, routed.step
    dense_commits = commits.get((group.label, group.baseline.name, *key), {})
    routed_commits = commits.get((group.label, routed.name, *key), {})
    common = sorted(dense_commits.keys() & routed_commits.keys())
    return [seed for seed in common if dense_commits[seed] != routed_commits[seed]]


@functools.lru_cache(maxsize=2)
def _commits(results: Results) -> Commits:
    """Return the commit, from env.json, of the run that each score is of."""
    commits: Commits = {}
    if "commit" not in results.runs:
        return commits
    commit_of = results.runs.set_index("path")["commit"].dropna().to_dict()
    columns = ["group", "variant", "metric", "step", "seed", "path"]
    for *key, step, seed, path in one_per_seed(results.own_scores)[columns].itertuples(index=False):
        if path in commit_of:
            group, variant, metric = map(str, key)
            by_seed = commits.setdefault((group, variant, metric, float(step)), {})
            by_seed[int(seed)] = commit_of[path][:_COMMIT_LENGTH]
    return commits


def code_notes(results: Results, table: Table) -> tuple[str, ...]:
    """Return the note on such pairs in the groups that a table shows; nothing without any."""
    labels: dict[tuple[str, str], list[str]] = {}
    if table.name in _UNPAIRED:
        return ()
    for group in results.groups:
        if not _shows(table, group):
            continue
        for routed in group.routed:
            mixed = mixed_seeds(results, group, routed)
            if mixed:
                labels.setdefault((group.label.partition(", ")[2], routed.name), []).append(
                    f"{group.model} seeds {', '.join(map(str, mixed))}"
                )
    if not labels:
        return ()
    texts = []
    for (shared, variant), models in labels.items():
        texts.append(f"{shared}, {variant}: {'; '.join(models)}")
    note = "Pairs whose runs were last started with two versions of the code"
    return (f"{note} (a continued run may have begun with another): {'. '.join(texts)}.",)


def _shows(table: Table, group: Group) -> bool:
    """Return whether a row of the table is of a group, by its heading or its first entry."""
    model, _, shared = group.label.partition(", ")
    for row in table.rows:
        first = row.entries[0].text if row.entries else ""
        if group.label in row.group or (first == model and shared in row.group):
            return True
    return False
