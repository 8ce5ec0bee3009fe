"""`python -m analysis`: the commands that turn run folders into tables, figures and pages."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.runtime.command import run_command
from routing.errors import Parser

_EXAMPLES = """\
examples:
  python -m analysis report runs                    runs/report.html: one page, opens from disk
  python -m analysis tables runs --out results      every table as .md .tex .csv .html
  python -m analysis tables runs --only main --columns Dense "+ TREAD" 3 --width 5.5
  python -m analysis figures runs --only route_placement  pictures as .pdf .png .csv
  python -m analysis compare RUN_A RUN_B            what differs in config and scores
  python -m analysis similarity runs --routed       layer similarity of every run, beside its
  weights
  python -m analysis guidance-scale DENSE_s0 DENSE_s1 ROUTED_s0  w_eff by noise level, beside the
  weights; a dense run of another seed is the instrument
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = Parser(
        prog="python -m analysis",
        description="Turn run folders into tables, figures and one report page.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="one self-contained HTML page")
    _source(report)
    report.add_argument("--out", type=Path, help="the HTML file (default: RUNS/report.html)")
    report.add_argument("--title", help="heading of the page")
    for name, text in (
        ("tables", "tables in four formats"),
        ("figures", "figures as PDF, PNG and CSV"),
    ):
        command = commands.add_parser(name, help=text)
        _source(command)
        command.add_argument("--out", type=Path, help=f"folder to write (default: RUNS/{name})")
        command.add_argument("--only", nargs="+", metavar="NAME", help="some of them, by name")
    table = commands.choices["tables"]
    table.add_argument(
        "--all", action="store_true", help="also tables and rows without a number of ours"
    )
    table.add_argument(
        "--columns", nargs="+", metavar="NAME", help="some columns, by heading or number from 0"
    )
    table.add_argument(
        "--width", type=float, default=6.8, choices=(3.3, 5.5, 6.8),
        help="inches of text in a line of your page: wider tables continue below (6.8)",
    )  # fmt: skip
    table.add_argument("--print", action="store_true", help="print Markdown instead of writing")
    publish = commands.add_parser(
        "publish", help="a folder of tables, figures and records, and the pages that show them"
    )
    _source(publish)
    publish.add_argument("--out", type=Path, required=True, help="folder to write, such as results")
    publish.add_argument(
        "--pages", type=Path, nargs="+", default=[], metavar="FILE",
        help="Markdown files whose <!-- table NAME --> blocks to fill in, beside OUT/README.md",
    )  # fmt: skip
    compare = commands.add_parser("compare", help="what differs between two runs")
    compare.add_argument("first", type=Path, metavar="RUN_A")
    compare.add_argument("second", type=Path, metavar="RUN_B")
    _similarity(commands.add_parser)
    _guidance_scale(commands.add_parser)
    notebooks = commands.add_parser(
        "notebooks", help="execute the notebooks and write them as .ipynb"
    )
    notebooks.add_argument(
        "--runs", type=Path, help="runs to read (default: the published ones of results/)"
    )
    notebooks.add_argument("--out", type=Path, help="folder to write (default: analysis/notebooks)")
    notebooks.add_argument("--only", nargs="+", metavar="NAME", help="some of them, by name")
    listing = commands.add_parser(
        "list", help="runs found, unfinished and damaged ones with the reason"
    )
    listing.add_argument("runs", type=Path, metavar="RUNS")
    return top


def _source(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", type=Path, metavar="RUNS", help="folder with run folders")
    command.add_argument(
        "--metric", help="full name of the metric (default: each base's Frechet distance)"
    )


def _similarity(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add("similarity", help="layer similarity of runs, stored beside them")
    command.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run folders, or folders of them"
    )
    command.add_argument("--samples", type=int, default=64, help="held-out samples (64)")
    command.add_argument("--batch", type=int, default=16, help="samples per pass (16)")
    command.add_argument(
        "--levels", type=float, nargs="+", help="noise levels sigma/alpha over the data's std"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the noise (0)")
    command.add_argument("--weights", choices=("ema", "raw"), default="ema")
    command.add_argument("--centred", action="store_true", help="also centred cosine and CKA")
    command.add_argument("--per-level", action="store_true", help="also one map per noise level")
    command.add_argument("--routed", action="store_true", help="also routed against staying tokens")


def _guidance_scale(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add("guidance-scale", help="effective guidance scale of runs, stored beside them")
    command.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN",
        help="run folders, folders of them, or exported .safetensors: measured together",
    )  # fmt: skip
    command.add_argument("--against", metavar="RUN[@STEP]", help="also every run over this one")
    command.add_argument("--samples", type=int, default=2000, help="held-out samples (2000)")
    command.add_argument("--batch", type=int, default=64, help="samples per pass (64)")
    command.add_argument(
        "--levels", type=float, nargs="+", help="noise levels sigma/alpha over the data's std"
    )
    command.add_argument("--out", type=Path, help="folder for a figure and a table of all runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2 for a user's mistake)."""
    return run_command(_dispatch, arguments)


def _dispatch(words: list[str]) -> int:
    options = parser().parse_args(words)
    # Figures and similarity need torch, a list of runs does not: only what is asked for is loaded.
    return int(importlib.import_module(_MODULES[options.command]).command(options))


_MODULES = {
    "report": "analysis.report",
    "tables": "analysis.tables",
    "figures": "analysis.figures",
    "publish": "analysis.publish",
    "compare": "analysis.runs.compare",
    "similarity": "analysis.similarity",
    "guidance-scale": "analysis.guidance_scale",
    "notebooks": "analysis.notebook_files",
    "list": "analysis.runs.run_records",
}
