"""`summary.json` of a finished run: read by the next start, shown at the end."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backbones.parsing import is_number
from experiments.evaluation.headline import features_of, headline
from experiments.runtime import console as log
from experiments.runtime import records, run_folder

# Pictures of a finished run, with a label for each, and its other files.
_PICTURES = {"samples": "samples/final.png", "progress": "progress.gif", "loss curve": "loss.png"}
_SCORES, _WEIGHTS = "scores.jsonl", "model.safetensors"


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run; None if it is not finished or the file is damaged."""
    summary = run_folder.read(folder / "summary.json")
    scores, wall_s = summary.get("scores"), summary.get("wall_s")
    is_valid = (
        summary.get("status") == "done"
        and isinstance(summary.get("name"), str)
        and type(summary.get("step")) is int
        and is_number(wall_s)
        and wall_s >= 0
        and isinstance(scores, dict)
        and all(map(is_number, scores.values()))
        and is_number(summary.get("loss") or 0)
        and is_number(summary.get("images_per_s") or 0)
    )
    return summary if is_valid else None


def show_results(console: log.Console, folder: Path) -> None:
    """Print the scores of a finished run and the paths of its results."""
    summary = read_summary(folder)
    assert summary is not None, "a finished run"
    console.say()
    entries = records.read_scores(folder, summary["step"])
    scores = headline(entries)
    if scores:
        rows = [[score.name, score.value, score.meaning] for score in scores]
        features = features_of(entries)
        title = f"scores at step {summary['step']}: {entries[0].get('n')} samples of the EMA"
        guidance = str(entries[0].get("guidance") or "none")
        for part in ("unguided" if guidance.startswith("none") else guidance, features):
            if part:
                title += f", {part}"
        console.table(title, rows, ["score", "value", "meaning"], texts=["meaning"])
    loss, images_per_s = summary.get("loss"), summary.get("images_per_s")
    training = f"{log.clock(summary['wall_s'])} for {summary['step']} steps"
    if images_per_s is not None:
        training += f", {images_per_s:.4g} images/s"
    if loss is not None:
        training += f", last training loss {loss:.4g}"
    console.say(f"training    {training}")
    for label, name in _PICTURES.items():
        if (folder / name).exists():
            console.say(f"{label:<12}{folder / name}")
    if (folder / _WEIGHTS).exists():
        console.say(f"weights     {folder / _WEIGHTS}")
    if entries:
        count = len(entries)
        console.say(f"scores      {folder / _SCORES}   (all {count})")
    console.say("next        sample from it, or follow docs/tutorial.md:")
    # Named after the step: other samples in the same folder would be refused.
    out = folder / f"samples-{summary['step']}"
    command = [*_script("sample"), str(folder), "--out", str(out)]
    console.say(_shell_command(command), wrap=False)


def _script(name: str) -> list[str]:
    """Return how to call a script of `experiments` from the current folder."""
    path = f"experiments/{name}.py"
    return [_python(), path] if Path(path).exists() else [_python(), "-m", f"experiments.{name}"]


def _python() -> str:
    """Return `python`; after `make demo`, where no environment is active, its path."""
    python, active = Path(sys.executable), shutil.which("python")
    is_active = active is not None and Path(active).parent == python.parent
    if not is_active and python.is_relative_to(Path.cwd()):
        return str(python.relative_to(Path.cwd()))
    return "python"


def _shell_command(words: Sequence[str]) -> str:
    """Return a command for a shell, indented, and continued below where 80 columns are full."""
    lines = [" "]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > 76 and lines[-1].strip():
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)
