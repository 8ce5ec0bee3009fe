"""What a dense tail takes back: a few dense steps from a routed run's weights (the paper's F)."""

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.grouping import FINE_TUNE, parent
from analysis.runs.statistics import paired
from analysis.tables.main_table import score_set
from analysis.tables.score_entries import metric_decimals
from analysis.tables.table import Column, Entry, Table, build, head, not_run, ours, words

_PAIRED = "Differences are paired by seed, with Student's 95 % interval."


def tails(study: Study) -> Table:
    """Dense, routed, and routed with a tail, a row per metric, with the tail's differences."""
    cells = ("Dense", "Routed", "+ tail", "\u0394 tail, routed", "\u0394 tail, dense")
    columns = (Column("Metric", numeric=False), *Column.each(*cells))
    rows: list[tuple[str, list[Entry]]] = []
    for base, dense, routed in study.pairs():
        tail = _tail(study, base, routed)
        if tail is None:
            continue
        # What tells the tails' own recipe apart is no news here.
        setting = f"{base.label.partition(' (')[0]}: route {routed.treatment}"
        group = f"{setting}, after {routed.steps:.0f} steps, and {tail.steps:.0f} of tail"
        group += _cost(dense, routed, tail)
        for name, about in score_set(study, base).items():
            column, digits = f"score.{name}", metric_decimals(name)
            each = [ours(cell.estimate(column), digits) for cell in (dense, routed, tail)]
            if not (own := tail.by_seed(column)):
                continue
            changes = [
                ours(paired(other.by_seed(column), own), digits, signed=True)
                for other in (routed, dense)
            ]
            label = head(Column(name, better=about.get("better")))
            rows.append((group, [words(label), *each, *changes]))
    title = "A dense tail on routed runs (the paper's F)"
    return build("tails", title, columns, rows or [not_run(columns)], (_PAIRED,))


def _tail(study: Study, base: Base, routed: Cell) -> Cell | None:
    """Return the fine-tuned cell whose parents are the routed cell's runs, or None."""
    name = parent(routed.first("run"))
    parents, wanted = (name, f"{name}@{routed.steps:.0f}"), routed.first("reference")
    for other in study.bases:
        for cell in other.cells if other.metric == base.metric else ():
            grown = cell.treatment == FINE_TUNE and parent(cell.first("config.init")) in parents
            if grown and cell.first("reference") == wanted:
                return cell
    return None


def _cost(dense: Cell, routed: Cell, tail: Cell) -> str:
    """Return the multiply-adds of route and tail over those of the dense steps, as words."""
    whole, part = routed.first("macs_dense"), routed.first("macs_routed")
    if not (whole and part and dense.steps > 0):
        return ""
    return f": {(routed.steps * part / whole + tail.steps) / dense.steps:.2f}x dense's MACs"
