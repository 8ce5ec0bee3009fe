"""One run of a sweep: the facts that are stored, and what is planned to run (no configuration)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from experiments.runtime import run_folder
from sweeps.store.overrides import KEY

# In arguments: the run folder of the parent.
PARENT = "{parent}"


@dataclass(frozen=True)
class RunRecord:
    """What `sweep.json` stores of a run: facts to show and compare, none of which is executed.

    Attributes:
        name: Name of the run folder; of the cell, for a run that starts from the weights of its
            parent; or of the call of another command.
        stage: Stage of the grid that it belongs to.
        label: What distinguishes it from the others, for messages.
        trains: Whether it trains; other commands read the folder of a trained run.
        folder: Run folder; of another command that of its parent, or "" without one.
        steps: Training steps, None for other commands.
        varies: Overrides that differ between the cells of the grid.
        values: Overrides by key, including those that a command takes in its own arguments.
        parent: Name of the run that has to be done before it starts; "" for none.
        after: Names of runs that have to end before it starts, however they end.
        deferred: Whether its job fills in `{parent}`, and works out the run folder, as it starts.
        has_output: Whether it writes a file in its sweep's folder, as no job of another sweep does.
    """

    name: str
    stage: str
    label: str
    trains: bool
    folder: str
    steps: int | None
    varies: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    parent: str = ""
    after: list[str] = field(default_factory=list)
    deferred: bool = False
    has_output: bool = False

    @property
    def needs(self) -> list[str]:
        """Names of all runs that it waits for."""
        return [self.parent, *self.after] if self.parent else list(self.after)

    @property
    def is_named_after_cell(self) -> bool:
        """Whether its name is not that of its run folder, which depends on its parent's weights."""
        return self.deferred or Path(self.folder).name != self.name

    @property
    def finished(self) -> bool:
        """Whether the run folder holds a finished run of at least `steps` steps."""
        return run_folder.finished(self.folder, self.steps)

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint; 0 for commands that save none."""
        return run_folder.saved_step(self.folder) if self.trains else 0

    @property
    def parent_step(self) -> int | None:
        """Step at which the run in `folder` ended; None if it has not, or there is no folder."""
        if not self.folder:
            return None
        step = run_folder.read(Path(self.folder) / "summary.json").get("step")
        return step if isinstance(step, int) else None

    def facts(self) -> dict[str, Any]:
        """Return the stored fields, also of a planned run; of its folder the name alone."""
        values = {field.name: getattr(self, field.name) for field in fields(RunRecord)}
        return {**values, "folder": Path(self.folder).name}


@dataclass(frozen=True, kw_only=True)
class PlannedRun(RunRecord):
    """One run as planned from its grid, and as its job has it; plain values only.

    Attributes:
        entry: What it runs, `module:function`.
        args: Arguments of that function.
        cluster: Keys of the cluster file that its stage or cell of the grid changes.
    """

    entry: str
    args: list[str]
    cluster: dict[str, Any] = field(default_factory=dict)


def values_of(arguments: Iterable[str]) -> dict[str, str]:
    """Return the overrides among the arguments of a run, by key."""
    values = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and KEY.match(key):
            values[key] = value
    return values
