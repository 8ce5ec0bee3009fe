"""From run folders to tables, figures and one report page. It reads files; it trains nothing.

    df = analysis.load("runs")         one row per run, config and scores as typed columns
    analysis.curves(df)                training curves, one row per logged step
    analysis.scores(df)                every score of every run, with what it had cost
    python -m analysis report runs     one self-contained HTML page

Names are resolved on first use, so that `import analysis` costs nothing and never imports torch.
"""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "runs.run_records": ("AnalysisError", "curves", "load", "scores"),
        "tables.paper": ("paper",),
        "tables": ("tables",),
        "figures": ("figures",),
        "similarity": ("similarity",),
        "runs.compare": ("compare",),
        "report": ("report",),
    },
)
