"""`python -m analysis`: the commands that turn run folders into tables, figures and pages."""

import argparse
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.runtime.command import run_command
from routing.errors import Parser

_EXAMPLES = """\
examples:
  python -m analysis report runs             runs/report.html: one page
  python -m analysis tables runs             every table: .md .tex .csv .html
  python -m analysis tables runs --only main --columns Dense "+ TREAD" 3
  python -m analysis figures runs --only route_placement
  python -m analysis compare RUN_A RUN_B     what differs in keys and scores
  python -m analysis similarity runs         how alike the blocks of a run are
  python -m analysis guidance-scale DENSE_s0 DENSE_s1 ROUTED_s0
      w_eff by noise level; a dense run of another seed is the instrument
"""
# The module of each command, and what it does.
_COMMANDS = {
    "report": ("report", "one self-contained HTML page"),
    "tables": ("tables", "tables in four formats"),
    "figures": ("figures", "figures as PDF, PNG and CSV"),
    "publish": ("publish", "a folder of tables, figures and records, and the pages that show them"),
    "compare": ("runs.compare", "what differs between two runs"),
    "similarity": ("similarity", "layer similarity of runs or exported weights, and its map"),
    "guidance-scale": ("guidance_scale", "effective guidance scale of runs or exported weights"),
    "notebooks": ("notebook_files", "execute the notebooks and write them as .ipynb"),
    "list": ("runs.run_records", "runs found, unfinished and damaged ones with the reason"),
}


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    what = "Turn run folders into tables, figures and one report page."
    plain = argparse.RawDescriptionHelpFormatter
    top = Parser("python -m analysis", description=what, epilog=_EXAMPLES, formatter_class=plain)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = {name: commands.add_parser(name, help=text) for name, (_, text) in _COMMANDS.items()}

    def add(names: str, text: str | None, *words: str, **options: Any) -> None:
        for name in names.split():
            made[name].add_argument(*words, help=text, **options)

    path: dict[str, Any] = {"type": Path}
    flag: dict[str, Any] = {"action": "store_true"}
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    reading = "report tables figures publish"
    add(reading, "folder with run folders", "runs", metavar="RUNS", **path)
    add(reading, "full name of the metric (default: each base's Frechet distance)", "--metric")
    add("report", "the HTML file (default: RUNS/report.html)", "--out", **path)
    add("report", "heading of the page", "--title")
    for name in ("tables", "figures"):
        add(name, f"folder to write (default: RUNS/{name})", "--out", **path)
        add(name, "some of them, by name", "--only", **several)
    add("tables", "also tables and rows without a number of ours", "--all", **flag)
    add("tables", "some columns, by heading or number from 0", "--columns", **several)
    text = "inches of text in a line of your page: wider tables continue below (6.8)"
    add("tables", text, "--width", type=float, default=6.8, choices=(3.3, 5.5, 6.8))
    add("tables", "print Markdown instead of writing", "--print", **flag)
    add("publish", "folder to write, such as results", "--out", required=True, **path)
    text = "Markdown files whose <!-- table NAME --> blocks to fill in, beside OUT/README.md"
    add("publish", text, "--pages", nargs="+", default=[], metavar="FILE", **path)
    add("compare", None, "first", metavar="RUN_A", **path)
    add("compare", None, "second", metavar="RUN_B", **path)

    text = "run folders, folders of them, or exported .safetensors (written to the current folder)"
    add("similarity", text, "runs", nargs="+", metavar="RUN", **path)
    text = "run folders, folders of them, or exported .safetensors: measured together"
    add("guidance-scale", text, "runs", nargs="+", metavar="RUN", **path)
    add("guidance-scale", "also every run over this one", "--against", metavar="RUN[@STEP]")
    for name, samples, batch in (("similarity", 64, 16), ("guidance-scale", 2000, 64)):
        add(name, f"held-out samples ({samples})", "--samples", type=int, default=samples)
        add(name, f"samples per pass ({batch})", "--batch", type=int, default=batch)
        add(name, "noise levels sigma/alpha over the data's std", "--levels", type=float, nargs="+")
    add("similarity", "seed of the noise (0)", "--seed", type=int, default=0)
    add("similarity", None, "--weights", choices=("ema", "raw"), default="ema")
    add("similarity", "also centred cosine and CKA", "--centred", **flag)
    add("similarity", "also one map per noise level", "--per-level", **flag)
    add("similarity", "also routed against staying tokens", "--routed", **flag)
    add("guidance-scale", "folder for a figure and a table of all runs", "--out", **path)

    add("notebooks", "runs to read (default: the published ones of results/)", "--runs", **path)
    add("notebooks", "folder to write (default: analysis/notebooks)", "--out", **path)
    add("notebooks", "some of them, by name", "--only", **several)
    add("list", None, "runs", metavar="RUNS", **path)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2 for a user's mistake)."""
    return run_command(_dispatch, arguments)


def _dispatch(words: list[str]) -> int:
    options = parser().parse_args(words)
    # Figures and similarity need torch, a list of runs does not: only what is asked for is loaded.
    module, _ = _COMMANDS[options.command]
    usual = warnings.formatwarning
    # A file that is left out is named in one line, without the line of code that read it.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        return int(importlib.import_module(f"analysis.{module}").command(options))
    finally:
        warnings.formatwarning = usual
