"""`python -m analysis`: report, tables, figures, publish, compare, similarity, notebooks, list."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from routing.errors import Parser, UserError

_EXAMPLES = """\
examples:
  python -m analysis report runs                    runs/report.html: one page, opens from disk
  python -m analysis tables runs --out results      every table as .md .tex .csv .html
  python -m analysis figures runs --only route_placement  pictures as .pdf .png .csv
  python -m analysis compare RUN_A RUN_B            what differs in config and scores
  python -m analysis similarity runs --routed       layer similarity of every run, beside its
  weights
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
    commands.choices["tables"].add_argument(
        "--all", action="store_true", help="also tables without a number of ours"
    )
    commands.choices["tables"].add_argument(
        "--print", action="store_true", help="print Markdown instead of writing"
    )
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
    _similarity(
        commands.add_parser("similarity", help="layer similarity of runs, stored beside them")
    )
    notebooks = commands.add_parser(
        "notebooks", help="execute the notebooks and write them as .ipynb"
    )
    notebooks.add_argument(
        "--runs", type=Path, help="runs to read (default: small ones, trained on the spot)"
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


def _similarity(command: argparse.ArgumentParser) -> None:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2 for a user's mistake)."""
    from experiments.runtime.command import run_command

    return run_command(_dispatch, arguments)


def _dispatch(words: list[str]) -> int:
    options = parser().parse_args(words)
    return _COMMANDS[options.command](options)


def _load(options: argparse.Namespace) -> object:
    from analysis.runs.cells import Study

    study = Study.of(options.runs, getattr(options, "metric", None))
    attrs = study.runs.attrs
    for item in attrs["damaged"]:
        print(f"damaged: {item['run']}: {item['reason']}", file=sys.stderr)
    if attrs["unfinished"]:
        print(
            f"unfinished: {len(attrs['unfinished'])} (python -m analysis list {options.runs})",
            file=sys.stderr,
        )
    return study


def _report(options: argparse.Namespace) -> int:
    from analysis import report

    study = _load(options)
    if study.runs.empty:  # type: ignore[attr-defined]
        from analysis.runs.run_records import AnalysisError

        raise AnalysisError(
            f"no finished run below {options.runs}; python -m analysis list {options.runs} says why"
        )
    path = report.write(study, options.out or options.runs / "report.html", options.title)  # type: ignore[arg-type]
    print(f"{path}  {path.stat().st_size / 1e6:.1f} MB, {len(study.runs)} runs")  # type: ignore[attr-defined]
    return 0


def _tables(options: argparse.Namespace) -> int:
    from analysis import tables
    from analysis.tables.render import markdown

    study = _load(options)
    made = [tables.make(name, study) for name in options.only or tables.TABLES]  # type: ignore[arg-type]
    chosen = made if options.all or options.only else [table for table in made if table.covered]
    if options.print:
        print("\n".join(markdown(table) for table in chosen), end="")
        return 0
    folder = options.out or options.runs / "tables"
    tables.save(chosen, folder)
    print(f"{folder}  {', '.join(table.name for table in chosen) or 'no table: no finished run'}")
    left = [table.name for table in made if table not in chosen]
    if left:
        print(f"not covered by these runs (--all writes them too): {', '.join(left)}")
    return 0


def _figures(options: argparse.Namespace) -> int:
    from analysis import figures

    study = _load(options)
    names = options.only or list(figures.FIGURES)
    drawn = {name: figures.make(name, study) for name in names}  # type: ignore[arg-type]
    plots = [plot for plot in drawn.values() if plot is not None]
    folder = options.out or options.runs / "figures"
    figures.save(plots, folder)
    print(f"{folder}  {', '.join(plot.name for plot in plots)}")
    left = [name for name, plot in drawn.items() if plot is None]
    if left:
        print(f"not given by these runs: {', '.join(left)}")
    return 0


def _publish(options: argparse.Namespace) -> int:
    from analysis.publish import publish

    given = publish(_load(options), options.out, options.pages)  # type: ignore[arg-type]
    print(f"{options.out}  {', '.join(given)}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from analysis.runs import compare

    print(compare.text(options.first, options.second))
    return 0


def _measure(options: argparse.Namespace) -> int:
    from analysis.runs.run_records import AnalysisError, Damaged, check_path, find, shown
    from analysis.similarity import LEVELS, Protocol, measure

    folders = [folder for root in options.runs for folder in find(root)]
    finished = [folder for folder in folders if (folder / "model.safetensors").is_file()]
    if not finished:
        raise AnalysisError(
            f"no run with weights below {options.runs[0]}; give a folder with model.safetensors in "
            "it"
        )
    failed: list[Path] = []
    for folder in finished:
        protocol = Protocol(
            tuple(options.levels or LEVELS),
            options.samples,
            options.batch,
            options.seed,
            options.weights,
            options.centred,
            options.per_level,
            options.routed and "_none_" not in folder.name,
        )
        try:
            check_path(folder)
            result = measure(folder, protocol)
        except (UserError, Damaged) as error:
            # One damaged file is no reason to leave the others out.
            if len(finished) == 1:
                raise AnalysisError(str(error)) from None
            print(f"damaged: {shown(folder.name)}: {error}", file=sys.stderr)
            failed.append(folder)
            continue
        result.save(folder / "similarity.npz")
        print(
            f"{folder / 'similarity.npz'}  {result.label}, "
            f"lowest {result.arrays['cosine'].min():.3f}"
        )
    if failed:
        raise AnalysisError(f"{len(failed)} of {len(finished)} runs could not be measured")
    return 0


def _notebooks(options: argparse.Namespace) -> int:
    import os

    from analysis import notebook_files, quick_runs
    from analysis.runs.run_records import AnalysisError, find

    if options.runs is not None:
        if not (options.runs.is_dir() and find(options.runs)):
            raise AnalysisError(
                f"{options.runs} holds no runs; give a folder of them, or leave --runs out to "
                "train small ones"
            )
        os.environ[quick_runs.VARIABLE] = str(options.runs.resolve())
    for path in notebook_files.build(options.only, options.out or notebook_files.FOLDER):
        print(path)
    return 0


def _list(options: argparse.Namespace) -> int:
    from analysis.runs.run_records import load

    frame = load(options.runs)
    for row in frame.to_dict("records"):
        print(f"done        {row['run']}  step {row['step']}")
    for item in frame.attrs["unfinished"]:
        step = f"  step {item['step']}" if item.get("step") is not None else ""
        print(f"{item['status']:<11} {item['run']}{step}")
    for item in frame.attrs["damaged"]:
        print(f"damaged     {item['run']}  {item['reason']}")
    unfinished, damaged = len(frame.attrs["unfinished"]), len(frame.attrs["damaged"])
    print(f"{len(frame)} done, {unfinished} unfinished, {damaged} damaged")
    return 0


_COMMANDS = {
    "report": _report,
    "tables": _tables,
    "figures": _figures,
    "publish": _publish,
    "compare": _compare,
    "similarity": _measure,
    "notebooks": _notebooks,
    "list": _list,
}
