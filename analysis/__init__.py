"""From run folders to tables, figures and one report page. It reads files; it trains nothing.

    runs = analysis.load("runs")             a row per run, its configuration in typed columns
    analysis.problems("runs")                damaged and unfinished runs
    analysis.curves(runs)                    a row per run and logged step
    scores = analysis.scores(runs)           a row per run, step and metric, with what it had cost
    analysis.aggregate(scores)               mean, spread and interval over seeds
    analysis.plot(scores, x="macs", y="fd")  any score against any cost, with seed bands
    analysis.paired_difference(scores)       every variant minus the dense runs, paired by seed
    python -m analysis report runs           one self-contained HTML page

Names are resolved on first use, so that `import analysis` costs nothing and never imports torch.
"""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "errors": ("AnalysisError",),
        "runs.loading": ("curves", "load", "problems", "scores"),
        "comparison.aggregation": ("aggregate", "paired_difference"),
        "comparison.compare": ("compare",),
        "measurements.similarity": ("similarity",),
        "tables": ("tables",),
        "tables.paper": ("paper",),
        "figures": ("figures",),
        "figures.plotting": ("plot",),
        "reports.report": ("report",),
    },
)
