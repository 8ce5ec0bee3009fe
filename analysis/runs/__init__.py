"""Run folders as data frames, and which of them may be compared."""

from analysis.runs.run_records import (
    MARKS,
    PROTOCOL,
    AnalysisError,
    Damaged,
    check_path,
    find,
    flatten,
    load,
    own_scores,
    read_lines,
    read_run,
    shown,
)

__all__ = [
    "AnalysisError",
    "Damaged",
    "MARKS",
    "PROTOCOL",
    "check_path",
    "find",
    "flatten",
    "load",
    "own_scores",
    "read_lines",
    "read_run",
    "shown",
]
