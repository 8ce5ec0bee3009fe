"""`summary.json` of a finished run: read by the next start, shown at the end."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backbones.parsing import is_number
from experiments.config.model import model_arguments
from experiments.config.schema import Config
from experiments.evaluation.headline import features_of, headline
from experiments.preflight import check_sampling
from experiments.runtime import console as log
from experiments.runtime import records, run_folder
from routing.errors import UserError

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


def show_results(
    console: log.Console,
    config: Config,
    overrides: Sequence[str] = (),
    seconds: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Print the scores of a finished run, the paths of its results and what to do next.

    Args:
        console: Where to print.
        config: The run.
        overrides: The words that gave its configuration, where known.
        seconds: Durations of evaluations since the start of this process, if it trained.
    """
    folder = config.folder
    summary = read_summary(folder)
    assert summary is not None, "a finished run"
    console.say()
    entries = records.read_scores(folder, summary["step"])
    if entries:
        _show_scores(console, config, summary["step"], entries)
    if seconds is not None:
        parts = [f"{name} {log.clock(sum(part))}" for name, part in seconds.items() if part]
        evaluations = f": {', '.join(parts)}" if parts else ""
        console.say(f"total       {log.clock(summary['session_s'])} since start{evaluations}")
    loss, images_per_s = summary.get("loss"), summary.get("images_per_s")
    training = f"{log.clock(summary['wall_s'])} for {summary['step']} steps"
    if images_per_s is not None:
        training += f", {images_per_s:.4g} images/s"
    if loss is not None:
        training += f", last training loss {loss:.4g}"
    console.say(f"training    {training}")
    if run_folder.diverged(folder):
        console.say(
            "diverged    the loss has grown or is not finite: no run of a sweep starts from this "
            "one; try a smaller train.lr"
        )
    for label, name in _PICTURES.items():
        if (folder / name).exists():
            console.say(f"{label:<12}{folder / name}")
    if (folder / _WEIGHTS).exists():
        console.say(f"weights     {folder / _WEIGHTS}")
    if entries:
        console.say(f"scores      {folder / _SCORES}   (all {len(entries)})")
    console.say("next        sample from it, or follow docs/tutorial.md:")
    # Named after the step: other samples in the same folder would be refused.
    out = folder / f"samples-{summary['step']}"
    command = [*_script("sample"), str(folder), f"--out={out}"]
    console.say(_shell_command(command), wrap=False)
    if config.resolved_route != "none":
        _show_comparison(console, config, folder, overrides)


def _what_is_scored(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return how many samples or held-out pictures the scores are of, their guidance, features."""
    count = entries[0].get("n")
    if all(str(entry.get("key")).startswith("heldout_loss") for entry in entries):
        return f"held-out loss of the EMA on {count} pictures"
    guidance, features = str(entries[0].get("guidance") or "none"), features_of(entries)
    text = f"{count} samples of the EMA"
    for part in ("unguided" if guidance.startswith("none") else guidance, features):
        if part:
            text += f", {part}"
    return text


def _show_scores(
    console: log.Console, config: Config, step: int, entries: Sequence[Mapping[str, Any]]
) -> None:
    """Print the table of scores."""
    scores = headline(entries, config.data.class_count)
    if scores:
        rows = [[score.name, score.value, score.meaning] for score in scores]
        title = f"scores at step {step}: {_what_is_scored(entries)}"
        console.table(title, rows, ["score", "value", "meaning"], texts=["meaning"])


def _show_comparison(
    console: log.Console, config: Config, folder: Path, overrides: Sequence[str]
) -> None:
    """Print how to train the dense baseline of a routed run, and how to compare them."""
    try:
        dense = Config.from_dict({**config.to_dict(), "route": "none"})
        check_sampling(dense, model_arguments(dense, dense.data.describe()))
    except UserError:  # for example guidance that needs a route: other keys must change too
        return
    command = ""
    text = "see what routing saves and costs"
    summary = read_summary(dense.folder)
    if summary is None or summary["step"] < config.train.steps:
        text = f"train the {'dense baseline' if overrides else 'same with route=none'}, then {text}"
        words = [word for word in overrides if not word.startswith("route=")]
        if overrides:
            command = _shell_command([*_script("run"), *words, "route=none"]) + "\n"
    pair = [_python(), "-m", "analysis", "compare", str(dense.folder), str(folder)]
    console.say(f"compare     {text}:")
    console.say(command + _shell_command(pair), wrap=False)


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
