"""`python -m analysis`: the commands that turn run folders into tables, figures and pages."""

import argparse
import importlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.errors import AnalysisError
from analysis.runs.archives import PUBLISHED, is_archive, unpack
from experiments.runtime.command import run_command
from experiments.runtime.parser import Parser

_EXAMPLES = """\
examples:
  python -m analysis report runs             runs/report.html: one page
  python -m analysis report runs backbone=dit,mamba data=fashion
  python -m analysis tables runs             every table: .md .tex .csv .html
  python -m analysis tables runs main_table where="lr < 3e-3"
  python -m analysis tables runs --only main --columns Dense "+ TREAD" 3
  python -m analysis tables results/scan_order.tar.gz --print   records in an archive
  python -m analysis figures runs --only route_placement
  python -m analysis compare RUN_A RUN_B     what differs in keys and scores
  python -m analysis similarity runs         how alike the blocks of a run are
  python -m analysis guidance-scale DENSE_s0 DENSE_s1 ROUTED_s0
      w_eff by noise level; a dense run of another seed is the instrument
"""
# The module of each command, and what it does.
_COMMANDS = {
    "report": ("reports.report", "one self-contained HTML page"),
    "tables": ("tables", "tables in four formats"),
    "figures": ("figures", "figures as PDF, PNG and CSV"),
    "pages": ("reports.pages", "fill the generated blocks of README.md and results/*.md"),
    "compare": ("comparison.compare", "what differs between two runs"),
    "similarity": (
        "similarity_command",
        "layer similarity of runs or exported weights, and its map",
    ),
    "guidance-scale": (
        "guidance_scale_command",
        "effective guidance scale of runs or exported weights",
    ),
    "notebooks": ("reports.notebook_files", "execute the notebooks and write them as .ipynb"),
    "list": ("runs.loading", "runs found, unfinished and damaged ones with the reason"),
}
_SEVERAL: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
_FLAG: dict[str, Any] = {"action": "store_true"}


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    description = "Turn run folders into tables, figures and one report page."
    formatter = argparse.RawDescriptionHelpFormatter
    top = Parser(
        "python -m analysis", description=description, epilog=_EXAMPLES, formatter_class=formatter
    )
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    for name, (_, text) in _COMMANDS.items():
        commands[name] = subparsers.add_parser(name, help=text)
    _add_reading(commands)
    _add_measuring(commands)
    compare, notebooks = commands["compare"], commands["notebooks"]
    compare.add_argument("first", metavar="RUN_A", type=Path)
    compare.add_argument("second", metavar="RUN_B", type=Path)
    compare.add_argument("more", help=argparse.SUPPRESS, nargs="*")  # refused in one sentence
    text = "runs to read (default: the published ones of results/)"
    notebooks.add_argument("--runs", help=text, type=Path)
    notebooks.add_argument("--out", help="folder to write (analysis/notebooks)", type=Path)
    notebooks.add_argument("--only", help="some of them, by name", **_SEVERAL)
    commands["list"].add_argument("runs", metavar="RUNS", type=Path)
    return top


def _add_reading(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the options of commands that read finished runs."""
    for name in ("report", "tables", "figures"):
        text = "full name of the metric (default: each group's Frechet distance)"
        commands[name].add_argument(
            "runs", help="folder of runs, or a .tar.gz of records", metavar="RUNS", type=Path
        )
        commands[name].add_argument("--metric", help=text)
        text = "which runs: backbone=dit,mamba, where='lr < 3e-3' or the name of a launched grid"
        commands[name].add_argument("filters", help=text, nargs="*", metavar="FILTER")
        if name != "tables":
            text = "also searches, learning-rate sweeps, and groups without a pair"
            commands[name].add_argument("--all", help=text, **_FLAG)
    report, tables = commands["report"], commands["tables"]
    report.add_argument("--out", help="the HTML file (default: RUNS/report.html)", type=Path)
    report.add_argument("--title", help="heading of the page")
    for name in ("tables", "figures"):
        commands[name].add_argument(
            "--out", help=f"folder to write (default: RUNS/{name})", type=Path
        )
        commands[name].add_argument("--only", help="some of them, by name", **_SEVERAL)
    tables.add_argument(
        "--all",
        help="also searches, groups without a pair, tables and rows without a number of ours",
        **_FLAG,
    )
    tables.add_argument("--columns", help="some, by heading or number from 0", **_SEVERAL)
    tables.add_argument("--print", help="print Markdown instead of writing", **_FLAG)


def _add_measuring(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the options of commands that read trained models."""
    similarity, scale = commands["similarity"], commands["guidance-scale"]
    text = "run folders, folders of them, or exported .safetensors (written to the current folder)"
    similarity.add_argument("runs", help=text, nargs="+", metavar="RUN", type=Path)
    text = "run folders, folders of them, or exported .safetensors: measured together"
    scale.add_argument("runs", help=text, nargs="+", metavar="RUN", type=Path)
    scale.add_argument("--against", help="also every run over this one", metavar="RUN[@STEP]")
    for command, samples, batch in ((similarity, 64, 16), (scale, 2000, 64)):
        text = f"held-out samples ({samples})"
        command.add_argument("--samples", help=text, type=int, default=samples)
        command.add_argument("--batch", help=f"samples per pass ({batch})", type=int, default=batch)
        text = "noise levels sigma/alpha over the data's std"
        command.add_argument("--levels", help=text, type=float, nargs="+")
    similarity.add_argument("--seed", help="seed of the noise (0)", type=int, default=0)
    similarity.add_argument("--weights", choices=("ema", "raw"), default="ema")
    scale.add_argument("--out", help="folder for a figure and a table of all runs", type=Path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2 for a user's mistake)."""
    return run_command(_dispatch, arguments)


def _dispatch(words: list[str]) -> int:
    options = parser().parse_args(words)
    if options.command in ("report", "tables", "figures", "list"):
        _unpack_archive(options)
    # Figures and similarity need torch, a list of runs does not: only one module is imported.
    module, _ = _COMMANDS[options.command]
    usual_format = warnings.formatwarning
    # Warnings are one line, without the source line that issued them.
    warnings.formatwarning = _one_line
    try:
        return int(importlib.import_module(f"analysis.{module}").command(options))
    finally:
        warnings.formatwarning = usual_format


def _unpack_archive(options: argparse.Namespace) -> None:
    """Where the runs are an archive of records, unpack it and read that folder.

    Nothing can be written into a file, so the command line has to say where.
    """
    archive: Path = options.runs
    kind = "a CSV file" if archive.suffix == ".csv" else "an archive"
    if kind == "an archive" and not is_archive(archive):
        return
    writes = options.command != "list" and not getattr(options, "print", False)
    if writes and options.out is None:
        also = ", or --print" if options.command == "tables" else ""
        raise AnalysisError(f"{options.command} {archive}: {kind} needs --out PATH{also}")
    if kind == "a CSV file":
        return
    if options.command == "report" and options.title is None:
        options.title = f"Runs in {archive.name}"
    options.runs = unpack(archive, PUBLISHED)


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"warning: {message}\n"
