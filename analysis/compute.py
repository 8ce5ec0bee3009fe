"""Loss and FD against multiply-adds: the tables and the figure of the results page.

    python -m analysis.compute               fill the blocks of the pages, draw the figure
    python -m analysis.compute RECORDS       print what a folder of runs or an archive gives

The pages are README.md and results/*.md. Between `<!-- KIND of=results/NAME.tar.gz KEY=VALUE -->`
and `<!-- end of KIND -->` is a table generated from the archive, or a line that says it is missing.
Kinds: `penalty` (step penalty s and s * m of routed runs), `arms` (every arm of a study),
`endpoints` (declared paired endpoints; `pairs` is the declared number), `seeds` (their values by
seed), `scores` (scores on samples after the last step), `lengths` and `slopes` (s * m against the
number of dense steps), `objectives` and `contrasts` (dense and routed scores of several objectives
after `steps` steps). An arm is a group and variant (`analysis.comparison.arms`).
"""

import argparse
import functools
import re
import sys
from pathlib import Path

import pandas as pd

from analysis.comparison.study_tables import KINDS, Records
from analysis.errors import AnalysisError
from analysis.figures import against_macs
from analysis.runs.archives import PUBLISHED, unpack, unpacked
from analysis.runs.loading import Runs, load, scores
from analysis.tables.table import markdown_rows
from experiments.runtime.command import ROOT, run_command
from experiments.runtime.files import atomic_write
from experiments.runtime.parser import Parser

RESULTS = ROOT / "results"
_OPENING = rf"<!-- ({'|'.join(KINDS)}) "
_BLOCK = re.compile(rf"({_OPENING}([^>]*?) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
_OF_OBJECTIVES = ("objectives", "contrasts")  # printed where there are several
_HALF = "\u00b1 half-width of the 95 % t-interval"
_NOTES = {
    "arms": f"Held-out loss: mean {_HALF}. MACs: forward multiply-adds; training FLOPs = 6 x.",
    "scores": f"In brackets: difference from dense, paired by seed, {_HALF}.",
}
_NOT_YET = "No finished run of this study is published yet ({})."
# Dense steps, and routed steps of about the same multiply-adds, in the exploratory records.
FIGURE_STEPS = (3000, 4200)


@functools.lru_cache(maxsize=8)
def archived(archive: Path) -> Records:
    """Return the records of an archive."""
    return Records(load(unpack(archive, ROOT / PUBLISHED)))


def fill(text: str) -> str:
    """Return a page with its blocks filled in from the archives that they name.

    Raises:
        AnalysisError: A block without its end, or with an unknown key.
    """
    if len(re.findall(_OPENING, text)) != len(_BLOCK.findall(text)):
        raise AnalysisError("a page opens a block of analysis.compute without its <!-- end of -->")
    return _BLOCK.sub(lambda match: f"{match[1]}\n{_body(match[2], match[3])}\n{match[4]}", text)


def _body(kind: str, request: str) -> str:
    options = {}
    for word in request.split():
        key, _, value = word.partition("=")
        options[key] = value
    if "of" not in options or set(options) - {"of", "steps", "data", "pairs"}:
        raise AnalysisError(f"{kind} {request}: expected of=ARCHIVE, steps=N, data=NAME, pairs=N")
    archive = ROOT / options["of"]
    if not archive.is_file():
        return _NOT_YET.format(f"`{options['of']}` does not exist") + "\n"
    records = archived(archive)
    if "data" in options:
        records = records.on(options["data"])
    steps, pairs = int(options.get("steps", 3000)), int(options.get("pairs", 2))
    head, *rows = KINDS[kind](records, steps, pairs)
    return markdown_rows(head, rows)


def _command(words: list[str]) -> int:
    parser = Parser("python -m analysis.compute", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", nargs="?", type=Path, help="folder of runs, or .tar.gz")
    parser.add_argument("--steps", type=int, default=3000, help="dense steps of the target (3000)")
    options = parser.parse_args(words)
    if options.records is not None:
        return _print(options)
    for page in (ROOT / "README.md", *sorted(RESULTS.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            atomic_write(page, filled)
            print(f"{page}  filled in")
    records = archived(RESULTS / "runs.tar.gz")
    plot = against_macs.draw(score_points(records.runs), *FIGURE_STEPS)
    for path in plot.save(RESULTS / "figures"):
        print(path)
    return 0


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


def _print(options: argparse.Namespace) -> int:
    records = Records(load(unpacked(options.records, ROOT / PUBLISHED)))
    for kind, make in KINDS.items():
        if kind in _OF_OBJECTIVES and records.runs["objective"].nunique() < 2:
            continue
        try:
            head, *rows = make(records, options.steps, 2)
            if rows:
                print(markdown_rows(head, rows))
                if kind in _NOTES:
                    print(f"{_NOTES[kind]}\n")
        except AnalysisError as error:  # such as runs that end before the compared MACs
            print(f"No table of {kind}: {error}\n")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code (2 for a user's mistake)."""
    return run_command(_command, arguments)


if __name__ == "__main__":
    sys.exit(main())
