"""Progress of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Called with images done and images in all (over all processes).
Report = Callable[[int, int], None]


class Display:
    """Show progress on a console, through a function, or not at all.

    Args:
        progress: An `experiments.runtime.console.Console`, a function of (done, total), or None.
        total: Images in all.
        notes: Lines to say first.
    """

    def __init__(self, progress: Any, total: int, notes: Sequence[str]) -> None:
        self.bar: Any = None
        self.report: Report = lambda done, total: None
        if progress is None:
            return
        if callable(progress):
            self.report = progress
            return
        for note in notes:
            progress.once(note)
        self.bar = progress.progress("sample", total)
        self.report = lambda done, total: self.bar.update(done)

    def __enter__(self) -> Report:
        if self.bar is not None:
            self.bar.__enter__()
        return self.report

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.__exit__(*error)
