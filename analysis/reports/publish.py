"""One folder that shows what runs gave: tables, figures, the runs as CSV, their records, a page.

`python -m analysis publish RUNS --out results` writes everything but the sentences: the blocks of
Markdown pages are filled in (`analysis.reports.pages`).
"""

import argparse
import gzip
import io
import os
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis import figures, tables
from analysis.comparison.results import Results, results_for_command
from analysis.errors import AnalysisError
from analysis.reports.pages import fill, read_pages
from analysis.tables.cost import benchmarks
from analysis.tables.render import frame_csv
from experiments.runtime.files import atomic_write

# Files of a run without its weights: enough for every table.
RECORDS = (
    "config.yaml", "env.json", "status.json", "summary.json", "scores.jsonl", "metrics.jsonl",
    "guidance_scale.json",
)  # fmt: skip
# Of the lowest seed alone: they are most of the bytes and say the same for each seed.
PICTURES = ("similarity.npz", "samples/final.png")
ARCHIVE = "runs.tar.gz"
# Columns of the runs that have no meaning on another machine.
_LOCAL = ("path", "root", "config_keys", "shared_config")


def publish(results: Results, folder: Path, pages: Sequence[Path] = ()) -> list[str]:
    """Write tables, figures, `runs.csv` and `runs.tar.gz`; return the tables' and figures' names.

    The blocks of the Markdown files in the folder and of `pages` are filled in. Without a finished
    run, or where a page asks for what does not exist, nothing is written: `AnalysisError`.
    """
    if results.runs.empty:
        raise AnalysisError("no finished run to publish; python -m analysis list RUNS says why")
    filled = {}
    for page, text in read_pages(folder, pages).items():
        filled[page] = fill(text, results)
    covered = []
    for table in tables.make_all(results):
        if table.covered:
            covered.append(table.only(ours=True))
    tables.save(covered, folder / "tables")
    plots = figures.make_all(results)
    figures.save(plots, folder / "figures")
    runs = results.runs.drop(columns=list(_LOCAL), errors="ignore").dropna(axis=1, how="all")
    atomic_write(folder / "runs.csv", without_paths(frame_csv(runs).encode(), results))
    files = {}
    for name, path in records(results).items():
        content = path.read_bytes()
        # A picture or an array is kept byte by byte.
        is_binary = name.endswith((".png", ".npz"))
        files[name] = content if is_binary else without_paths(content, results)
    atomic_write(folder / ARCHIVE, archive(files))
    for page, text in filled.items():
        atomic_write(page, text)
    return [table.name for table in covered] + [plot.name for plot in plots]


def _root(results: Results) -> Path:
    return results.roots[0] if results.roots else Path("runs")


def records(results: Results) -> dict[str, Path]:
    """Return what goes into the archive: name in it to file."""
    root = _root(results)
    files = {}
    for path in benchmarks(results):
        files[f"runs/{path.relative_to(root)}"] = path
    lowest_seed = results.runs["seed"].dropna().min()
    names = Counter(results.runs["run"])
    for path, seed in zip(results.runs["path"], results.runs["seed"], strict=True):
        run = Path(str(path))
        # One configuration that was trained twice has two folders of one name.
        name = run.name if names[run.name] == 1 else os.path.relpath(run, root)
        for record in RECORDS + (PICTURES if str(seed) == str(lowest_seed) else ()):
            if (run / record).is_file():
                files[f"runs/{name}/{record}"] = run / record
        for evaluation in sorted((run / "evaluations").glob("*.json")):
            files[f"runs/{name}/evaluations/{evaluation.name}"] = evaluation
    return files


def without_paths(content: bytes, results: Results) -> bytes:
    """Return a file's content with the folder of the runs, which is one machine's, as `runs`."""
    return content.replace(str(_root(results).absolute()).encode(), b"runs")


def archive(files: Mapping[str, bytes]) -> bytes:
    """Pack contents under the names given; the same bytes for the same contents."""
    stream = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=stream, mode="wb", mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def command(options: argparse.Namespace) -> int:
    """Publish a folder of runs."""
    names = publish(results_for_command(options), options.out, options.pages)
    print(f"{options.out}  {', '.join(names)}")
    return 0
