"""Read the files of one run folder: JSON, JSON lines, YAML and the metadata of weights.

The files may be broken or hostile: any fault raises `Damaged`, so that one folder is reported and
the others are read. Nothing is unpickled, and nothing here needs torch.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError, safe_open

from backbones.parsing import Malformed, bytes_of, is_number, json_of, yaml_of
from experiments.runtime.nested import flatten

_NAME, _WHOLE, _NUMBER = "a name", "a whole number", "a number"
# What is read from summary.json, and what each must be.
SUMMARY = {
    "name": _NAME, "hash": _NAME, "backbone": _NAME, "size": _NAME, "data": _NAME, "scale": _NAME,
    "seed": _WHOLE, "route": _NAME, "step": _WHOLE, "params": _NUMBER, "macs_dense": _NUMBER,
    "macs_routed": _NUMBER, "macs_dense_no_attention": _NUMBER,
    "macs_routed_no_attention": _NUMBER, "wall_s": _NUMBER, "images_per_s": _NUMBER,
}  # fmt: skip
_NEEDED = ("backbone", "size", "data")


class Damaged(Exception):
    """A run folder whose files cannot be read; the text is the reason."""


def check_path(folder: Path) -> None:
    """Raise `Damaged` for a folder whose name no table, page or terminal can show: not UTF-8."""
    if not is_text(str(folder)):
        raise Damaged("its name has bytes that are not UTF-8; rename the folder")


def shown(path: str | Path) -> str:
    """Return a path as text that can be written, with escapes for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _read(path: Path) -> bytes:
    """Return a file's bytes; `Damaged` where it is missing, a pipe or unreadable."""
    try:
        return bytes_of(path)
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({type(error).__name__})") from None


def _mapping(content: bytes, name: str, parse: Callable[..., Any]) -> dict[str, Any]:
    """Return the mapping of a document, of text and numbers that can be written; else `Damaged`."""
    try:
        value = parse(content.decode("utf-8"), name)
        text = json.dumps(value, ensure_ascii=False, default=str)
    except Malformed as error:
        raise Damaged(str(error)) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{name} cannot be read ({type(error).__name__})") from None
    if not isinstance(value, dict | None):
        raise Damaged(f"{name} holds no mapping")
    if "\\u0000" in text or not is_text(text):
        raise Damaged(f"{name} has an invalid character (NUL or half a surrogate pair)")
    return value or {}


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's mapping of text and numbers that can be written; else `Damaged`."""
    return _mapping(_read(path), path.name, json_of)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file.

    A missing file is empty and a half-written last line is left out; another one is `Damaged`.
    """
    lines = _read(path).splitlines() if path.exists() else []
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            objects.append(value)
        elif number < len(lines):
            raise Damaged(f"{path.name} line {number} is not a JSON object")
    return objects


def read_config(path: Path) -> dict[str, Any]:
    """Return a YAML file as `config.<dotted key>` to value; `Damaged` if it is no configuration."""
    values = leaves(_mapping(_read(path), "config.yaml", yaml_of))
    if not values:
        raise Damaged("config.yaml is empty")
    return {f"config.{key}": value for key, value in values.items()}


def leaves(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values of nested mappings by dotted key, lists as JSON text."""
    result = {}
    for key, value in flatten(values).items():
        if isinstance(value, list | tuple):
            result[key] = json.dumps(value, default=str)
        elif value != {}:
            result[key] = value
    return result


def json_or_nothing(path: Path) -> dict[str, Any]:
    """Return the mapping of a JSON file; an empty one where it is missing or unreadable."""
    try:
        return read_json(path)
    except Damaged:
        return {}


def read_environment(folder: Path) -> dict[str, Any]:
    """Return a run's env.json with `torch`, its version; empty where the file cannot be read."""
    environment = json_or_nothing(folder / "env.json")
    packages = environment.get("packages")
    torch = packages.get("torch") if isinstance(packages, dict) else None
    return {**environment, "torch": torch}


def model_arguments(folder: str | Path) -> dict[str, Any] | None:
    """Return what a run's exported model was built with, from its weights' metadata."""
    return _weights_metadata(folder, "model")


def class_names(folder: str | Path) -> list[str]:
    """Return the names of the classes of a run's data, from its weights' metadata; none without."""
    names = (_weights_metadata(folder, "data") or {}).get("class_names")
    return list(map(str, names)) if isinstance(names, list) else []


def data_fingerprint(folder: str | Path, summary: Mapping[str, Any]) -> str | None:
    """Return the fingerprint of the user's own data that a run was trained on; None for others.

    Summaries of earlier versions lack it, and the weights have it.
    """
    if summary.get("data") not in ("folder", "latents"):
        return None
    value = summary.get("data_fingerprint")
    if value is None:
        value = (_weights_metadata(folder, "data") or {}).get("fingerprint")
    return value if is_text(value) else None


def _weights_metadata(folder: str | Path, key: str) -> dict[str, Any] | None:
    try:
        with safe_open(Path(folder) / "model.safetensors", framework="np") as weights:
            values = json_of((weights.metadata() or {})[key])
    except (OSError, SafetensorError, ValueError, KeyError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def is_text(value: object) -> bool:
    """Return whether a value is text that can be written anywhere: UTF-8, without NUL."""
    if not isinstance(value, str):
        return False
    # Half a surrogate pair, or a byte of a file name, has no place in UTF-8.
    return "\0" not in value and value == value.encode(errors="ignore").decode()


def fault(row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a run's flat row (summary and `config.*`), or None."""
    for key, kind in SUMMARY.items():
        value = row.get(key)
        if kind == _NAME:
            is_valid = isinstance(value, str)
        else:
            is_valid = is_measured(value) and (kind == _NUMBER or value == int(value))
        if not is_valid and (value is not None or key in _NEEDED):
            return f"summary.json: {key} is {_brief(value)}, not {kind}"
    if row.get("status") == "done" and row.get("step") is None:
        return "summary.json: it is done and has no step"
    if not isinstance(row.get("config.backbone.name"), str):
        return "config.yaml: backbone has no name"
    depth = row.get("config.backbone.depth")
    if depth is not None and not (is_number(depth) and depth >= 1):
        return f"config.yaml: backbone.depth is {_brief(depth)}, not a number of blocks"
    return None


def is_measured(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number of plausible size: its square does not overflow."""
    return is_number(value) and abs(value) < 1e30


def is_score(line: Mapping[str, Any]) -> bool:
    """Return whether a line of scores.jsonl holds a metric's name, a finite number and a step."""
    for key in ("key", "features", "guidance", "sampler"):
        if line.get(key) is not None and not is_text(line[key]):
            return False
    return (
        is_text(line.get("metric"))
        and is_measured(line.get("value"))
        and (line.get("step") is None or is_number(line["step"]))
        and line.get("better") in ("lower", "higher", None)
    )


def read_scores(path: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a `scores.jsonl`; none where the file is missing."""
    return list(filter(is_score, read_lines(path)))


def protocol(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return how a score was measured; scores under different protocols are not compared."""
    return line.get("guidance"), line.get("sampler"), line.get("weights"), line.get("seed")


def own_scores(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a run's own scores at every step: those under the protocol of its first score.

    Later evaluations under another guidance, sampler, seed or weights are comparisons of their own
    (see `analysis.scores`) and never replace the run's score.
    """
    return [line for line in lines if protocol(line) == protocol(lines[0])]


def last_scores(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the scores after the last step that was scored."""
    last_step = max((line.get("step") or 0 for line in lines), default=0)
    return [line for line in lines if (line.get("step") or 0) == last_step]


def guidance_scales(folder: Path) -> list[dict[str, Any]]:
    """Return the effective guidance scales of a run's dense pass in the form of scores.

    `python -m analysis guidance-scale` stores them, with the step that they were measured at: the
    run may have been trained further since. A missing or broken file gives none.
    """
    stored = json_or_nothing(folder / "guidance_scale.json")
    step, rows = stored.get("step"), stored.get("rows")
    if not is_measured(step) or not isinstance(rows, list):
        return []
    for row in rows:
        if not isinstance(row, dict) or row.get("pair") != "dense" or row.get("level") is not None:
            continue
        scores = []
        # The instrumented form is read as the scale: the model's own error does not raise it.
        for form, key in (("instrumented", "w_eff"), ("plain", "w_eff_plain")):
            if is_measured(row.get(form)):
                score = {"metric": f"w_eff ({form})", "key": key, "value": row[form]}
                scores.append({**score, "n": stored.get("samples"), "step": step})
        return scores
    return []


def _brief(value: object) -> str:
    return repr(value)[:40]
