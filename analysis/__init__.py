"""From run folders to tables, figures and one report page. It reads files; it trains nothing.

    df = analysis.load("runs")         one row per run, config and scores as typed columns
    analysis.curves(df)                training curves, one row per logged step
    analysis.scores(df)                every score of every run, with what it had cost
    python -m analysis report runs     one self-contained HTML page

Names are resolved on first use, so that `import analysis` costs nothing and never imports torch.
"""

import importlib
from typing import Any

# Where a public name is: a module of that name, or one that has it.
_LAZY = {
    "load": "analysis.runs.run_records",
    "curves": "analysis.runs.history",
    "scores": "analysis.runs.history",
    "AnalysisError": "analysis.runs.run_records",
    "paper": "analysis.tables.paper",
    "tables": "analysis.tables",
    "figures": "analysis.figures",
    "similarity": "analysis.similarity",
    "compare": "analysis.runs.compare",
    "report": "analysis.report",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'analysis' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return module if _LAZY[name].endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
