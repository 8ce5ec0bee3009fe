"""`python -m analysis`: the commands that turn run folders into tables, figures and pages."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
_COMMANDS = {
    "report": "one self-contained HTML page",
    "tables": "tables in four formats",
    "figures": "figures as PDF, PNG and CSV",
    "publish": "a folder of tables, figures and records, and the pages that show them",
    "compare": "what differs between two runs",
    "similarity": "layer similarity of runs, stored beside them",
    "guidance-scale": "effective guidance scale of runs, stored beside them",
    "notebooks": "execute the notebooks and write them as .ipynb",
    "list": "runs found, unfinished and damaged ones with the reason",
}


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = Parser(
        prog="python -m analysis",
        description="Turn run folders into tables, figures and one report page.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = {name: commands.add_parser(name, help=text) for name, text in _COMMANDS.items()}

    def add(names: str, *words: str, **options: Any) -> None:
        for name in names.split():
            made[name].add_argument(*words, **options)

    path: dict[str, Any] = {"type": Path}
    flag: dict[str, Any] = {"action": "store_true"}
    reading = "report tables figures publish"
    add(reading, "runs", metavar="RUNS", help="folder with run folders", **path)
    add(reading, "--metric", help="full name of the metric (default: each base's Frechet distance)")
    add("report", "--out", help="the HTML file (default: RUNS/report.html)", **path)
    add("report", "--title", help="heading of the page")
    for name in ("tables", "figures"):
        add(name, "--out", help=f"folder to write (default: RUNS/{name})", **path)
        add(name, "--only", nargs="+", metavar="NAME", help="some of them, by name")
    add("tables", "--all", help="also tables and rows without a number of ours", **flag)
    text = "some columns, by heading or number from 0"
    add("tables", "--columns", nargs="+", metavar="NAME", help=text)
    text = "inches of text in a line of your page: wider tables continue below (6.8)"
    add("tables", "--width", type=float, default=6.8, choices=(3.3, 5.5, 6.8), help=text)
    add("tables", "--print", help="print Markdown instead of writing", **flag)
    add("publish", "--out", required=True, help="folder to write, such as results", **path)
    text = "Markdown files whose <!-- table NAME --> blocks to fill in, beside OUT/README.md"
    add("publish", "--pages", nargs="+", default=[], metavar="FILE", help=text, **path)
    add("compare", "first", metavar="RUN_A", **path)
    add("compare", "second", metavar="RUN_B", **path)

    text = "run folders, or folders of them"
    add("similarity", "runs", nargs="+", metavar="RUN", help=text, **path)
    text = "run folders, folders of them, or exported .safetensors: measured together"
    add("guidance-scale", "runs", nargs="+", metavar="RUN", help=text, **path)
    text = "also every run over this one"
    add("guidance-scale", "--against", metavar="RUN[@STEP]", help=text)
    for name, samples, batch in (("similarity", 64, 16), ("guidance-scale", 2000, 64)):
        text = f"held-out samples ({samples})"
        add(name, "--samples", type=int, default=samples, help=text)
        add(name, "--batch", type=int, default=batch, help=f"samples per pass ({batch})")
        text = "noise levels sigma/alpha over the data's std"
        add(name, "--levels", type=float, nargs="+", help=text)
    add("similarity", "--seed", type=int, default=0, help="seed of the noise (0)")
    add("similarity", "--weights", choices=("ema", "raw"), default="ema")
    add("similarity", "--centred", help="also centred cosine and CKA", **flag)
    add("similarity", "--per-level", help="also one map per noise level", **flag)
    add("similarity", "--routed", help="also routed against staying tokens", **flag)
    add("guidance-scale", "--out", help="folder for a figure and a table of all runs", **path)

    text = "runs to read (default: the published ones of results/)"
    add("notebooks", "--runs", help=text, **path)
    add("notebooks", "--out", help="folder to write (default: analysis/notebooks)", **path)
    add("notebooks", "--only", nargs="+", metavar="NAME", help="some of them, by name")
    add("list", "runs", metavar="RUNS", **path)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2 for a user's mistake)."""
    return run_command(_dispatch, arguments)


def _dispatch(words: list[str]) -> int:
    options = parser().parse_args(words)
    # Figures and similarity need torch, a list of runs does not: only what is asked for is loaded.
    module = _MODULES.get(options.command, options.command.replace("-", "_"))
    return int(importlib.import_module(f"analysis.{module}").command(options))


_MODULES = {
    "compare": "runs.compare", "list": "runs.run_records", "notebooks": "notebook_files",
}  # fmt: skip
