"""Loss and FD against multiply-adds: the pages of results, their figure, and a study's tables.

    python -m analysis.compute               fill the blocks of the pages, draw the figure
    python -m analysis.compute RECORDS       print what a folder of runs or an archive gives

The pages are README.md and results/*.md; `analysis.reports.pages` says what a block is, and
`analysis.reports.studies` which tables a study has.
"""

import sys
from pathlib import Path

import pandas as pd

from analysis.errors import AnalysisError
from analysis.figures import against_macs
from analysis.reports import pages, studies
from analysis.runs.archives import PUBLISHED, unpacked
from analysis.runs.loading import Runs, load, scores
from experiments.runtime.command import ROOT, run_command
from experiments.runtime.files import atomic_write
from experiments.runtime.parser import Parser
from routing.errors import require

RESULTS = ROOT / "results"
# Dense steps, and routed steps of about the same multiply-adds, in the exploratory records.
FIGURE_STEPS = (3000, 4200)


def _command(words: list[str]) -> int:
    parser = Parser("python -m analysis.compute", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", nargs="?", type=Path, help="folder of runs, or .tar.gz")
    text = f"dense steps of the target ({studies.STEPS})"
    parser.add_argument("--steps", type=int, default=studies.STEPS, help=text)
    options = parser.parse_args(words)
    require(
        options.steps > 0, f"--steps {options.steps}: expected a positive number", AnalysisError
    )
    if options.records is not None:
        runs = load(unpacked(options.records, ROOT / PUBLISHED))
        print(studies.every_table(runs, options.steps) or "no table: no finished run has scores")
    else:
        _fill_pages()
    return 0


def _fill_pages() -> None:
    """Fill the blocks of the pages from the published records, and draw the figure."""
    results = pages.archived(RESULTS / "runs.tar.gz")
    for page, text in pages.read_pages(RESULTS, [ROOT / "README.md"]).items():
        filled = pages.fill(text, results)
        if filled != text:
            atomic_write(page, filled)
            print(f"{page}  filled in")
    plot = against_macs.draw(score_points(results.runs), *FIGURE_STEPS)
    for path in plot.save(RESULTS / "figures"):
        print(path)


def score_points(source: Runs) -> pd.DataFrame:
    """Return FD and held-out loss of the Fashion-MNIST runs at the figure's lengths.

    Columns are `backbone`, `route`, `seed`, `step`, `macs`, `fd` and `loss`. Only runs of the seeds
    that have both routed lengths count.
    """
    frame = scores(source)
    frame = frame[frame["own"].astype(bool) & (frame["data"] == "fashion")]
    frame = frame[frame["step"].isin(FIGURE_STEPS)]
    columns = {"FD-2K (fashion-classifier)": "fd", "heldout-loss-2K": "loss"}
    frame = frame[frame["metric"].isin(columns)].replace({"metric": columns})
    keys = ["backbone", "route", "seed", "step", "metric"]
    frame = frame.drop_duplicates(keys, keep="last").astype({"seed": int, "macs": float})
    points = frame.pivot_table("value", [*keys[:4], "macs"], "metric").reset_index()
    continued = points[points["step"] == FIGURE_STEPS[1]]
    pairs = set(zip(continued["backbone"], continued["seed"], strict=True))
    is_paired = [pair in pairs for pair in zip(points["backbone"], points["seed"], strict=True)]
    return points[is_paired].reset_index(drop=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code (2 for a user's mistake)."""
    return run_command(_command, arguments)


if __name__ == "__main__":
    sys.exit(main())
