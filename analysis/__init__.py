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
        "loading": ("curves", "load", "problems", "scores"),
        "aggregation": ("aggregate", "paired_difference"),
        "tables.paper": ("paper",),
        "tables": ("tables",),
        "figures": ("figures",),
        "similarity": ("similarity",),
        "compare": ("compare",),
        "plotting": ("plot",),
        "report": ("report",),
    },
)
