"""`launch` of a grid with a `search` section: its checks before the first trial."""

from collections.abc import Callable

from routing.errors import one_of, require
from sweeps import SweepError
from sweeps.commands.arguments import Arguments
from sweeps.plan.grid import Grid
from sweeps.plan.plan import Plan
from sweeps.store.folder import Sweep
from sweeps.submission.optuna_study import distributions
from sweeps.submission.search import Search


def prepare_search(
    chosen: Grid, planner: Callable[[Grid], Plan], arguments: Arguments,
    trials: int | None,
) -> Search:  # fmt: skip
    """Check a grid's search at one corner of its space.

    Raises:
        SweepError: A trial is not one run, its metric is not computed, or a name is typed too.
    """
    section = chosen.search
    assert section is not None
    prefix = f"grid {chosen.name}: search"
    count = section.trials if trials is None else trials
    require(count >= 1, f"--trials {count}: expected a number of at least 1", SweepError)
    space = distributions(section.over)
    for name in sorted(section.over.keys() & arguments.overrides.keys()):
        raise SweepError(f"{prefix}: {name} is searched over; leave the argument out")
    plan = planner(chosen)
    require(
        len(plan.configs) == 1 and len(plan.runs) == 1,
        f"{prefix}: a trial is one run; expected one seed, no axes and no stages",
        SweepError,
    )
    (config,) = plan.configs.values()
    one_of(f"{prefix}: metric", section.metric, tuple(config.eval.get("metrics", ())), SweepError)
    sweep = Sweep(plan.root, chosen.name)
    return Search(chosen, lambda point: planner(point).runs, space, section.metric, count, sweep)
