"""Checkpoints that are whole or absent, the newest of them, and the weights of a finished run.

A checkpoint is a folder `step-00001000` with `state.safetensors` (weights, EMA, optimizer),
`state.json` (step, counters, generators, config) and `manifest.json` (sizes and SHA-256 of both).
It is written under a temporary name, flushed and renamed; nothing in it is ever unpickled.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from backbones import Backbone
from backbones.weights import save_tensors
from experiments.config.schema import Config
from experiments.runtime.files import atomic_path, fsync_dir, sha256
from experiments.runtime.parsing import bytes_of, json_of
from experiments.runtime.run_folder import listed, step_folder
from routing.errors import UserError

FORMAT = "tread-suite/1"


class CheckpointError(UserError):
    """A checkpoint or weights file that cannot be written, read or used."""


# --- writing -------------------------------------------------------------------------------------


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    keep: int = 2,
    keep_every: int = 0,
    streak: int = 0,
) -> Path:
    """Write the checkpoint of `step`: tensors by name, and the JSON-able rest.

    The last `keep` stay, those of every `keep_every` steps for good (0: none), and the one before
    the last `streak` steps, which were bad: a roll-back goes there.

    Raises:
        CheckpointError: The disk is full or refuses; earlier checkpoints are untouched.
    """
    target = step_folder(folder, step)
    spare = target.with_name(f"{target.name}.old")
    temporary = target.with_name(f".{target.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        # Not the run folder itself: one that was deleted must not come back without its config.
        target.parent.mkdir(exist_ok=True)
        temporary.mkdir()
        _write(temporary, tensors, state)
        if target.exists():  # the only one, perhaps: it stays until there is another
            os.replace(target, spare)
        os.replace(temporary, target)
        fsync_dir(target.parent)
        shutil.rmtree(spare, ignore_errors=True)
    except _IO_ERRORS as error:
        shutil.rmtree(temporary, ignore_errors=True)
        intact = "no checkpoint was written yet"
        if earlier := listed(folder):
            intact = f"the checkpoint of step {earlier[-1][0]} is intact"
        raise CheckpointError(
            f"could not write the checkpoint of step {step} to {target.parent} "
            f"({_reason(error)}); {intact}: free some space and type the same command to go on"
        ) from error
    saved = listed(folder)
    before = max((old for old, _ in saved if old <= step - streak), default=None)
    for old, path in saved[:-keep]:
        if old != before and not (keep_every and old % keep_every == 0):
            shutil.rmtree(path, ignore_errors=True)
    return target


def _write(folder: Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    save_tensors(folder / "state.safetensors", tensors)
    (folder / "state.json").write_text(json.dumps(state))
    manifest = {"format": FORMAT, "files": _files(folder)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for path in folder.iterdir():
        with path.open("r+b") as handle:
            os.fsync(handle.fileno())


_CONTENTS = ("state.safetensors", "state.json")


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the manifest says of the files of a checkpoint."""
    paths = [folder / name for name in _CONTENTS]
    for path in paths:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in paths}


# safetensors wraps the system's error in its own type.
_IO_ERRORS = (OSError, SafetensorError)
# What values of another form than ours raise when they are read.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


def _reason(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())


# --- reading -------------------------------------------------------------------------------------


def damage(path: Path) -> str | None:
    """Return how a checkpoint differs from its manifest, or None when it verifies.

    Raises:
        CheckpointError: A file is there but cannot be read (permissions, a network file system
            that fails for a moment), which says nothing about its contents.
    """
    try:
        missing = sorted({"manifest.json", *_CONTENTS} - set(os.listdir(path)))
        if missing:
            return f"{' and '.join(missing)}: missing"
        manifest = bytes_of(path / "manifest.json")
        actual = _files(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        expected = json_of(manifest)["files"]
        wrong = [name for name, facts in actual.items() if expected[name] != facts]
    except _MALFORMED:
        return "manifest.json: not a manifest"
    return f"{' and '.join(wrong)}: not as manifest.json says" if wrong else None


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read, which is no reason to discard it."""
    return CheckpointError(
        f"{error.filename or path} cannot be read or moved ({_reason(error)}); this is not taken "
        "for damage and nothing was changed: get access to it or mend the file system, then type "
        "the command again"
    )


def _check_readable(path: Path) -> None:
    """Open a file, which fails with the system's reason: safetensors calls it missing."""
    with path.open("rb"):
        pass


def newest(
    folder: Path, say: Callable[[str], object] = print, up_to: int | None = None
) -> Path | None:
    """Return the newest checkpoint that verifies, of no later step than `up_to`.

    Damaged ones are set aside, each with a message to `say`.

    Raises:
        CheckpointError: A checkpoint cannot be read or set aside; the files stay as they are.
    """
    try:
        return _newest(folder, say, up_to)
    except OSError as error:
        raise _unreadable(folder / "checkpoints", error) from error


def _newest(folder: Path, say: Callable[[str], object], up_to: int | None) -> Path | None:
    for stale in (folder / "checkpoints").glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for spare in (folder / "checkpoints").glob("step-*.old"):
        # A kill came while it was written again: before the new one had the name, or after it.
        if spare.with_suffix("").exists():
            shutil.rmtree(spare, ignore_errors=True)
        else:
            os.replace(spare, spare.with_suffix(""))
    for step, path in reversed(listed(folder)):
        if up_to is not None and step > up_to:
            continue
        problem = damage(path)
        if problem is None:
            return path
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
        say(
            f"checkpoint {path.name} is damaged ({problem}); set aside as {aside.name}, trying "
            "the one before it"
        )
    return None


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the state of a checkpoint folder."""
    try:
        state = json_of((path / "state.json").read_bytes())
        _check_readable(path / "state.safetensors")
        return load_file(path / "state.safetensors"), state
    except OSError as error:
        raise _unreadable(path, error) from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({_reason(error)})") from error


# --- weights -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedModel:
    """A model ready for sampling."""

    model: Backbone  # in eval mode, on the device asked for
    config: Config  # the run's configuration
    step: int  # optimizer steps behind the weights
    source: str  # the file or checkpoint they came from
    # What the data set said of itself (shape, classes, ...) when the weights were written
    info: dict[str, Any]


def export(
    path: Path,
    model: Backbone,
    weights: Mapping[str, torch.Tensor],
    config: Config,
    step: int,
    info: Mapping[str, Any],
) -> None:
    """Write `model.safetensors`: weights, with config and model arguments as metadata."""
    about = {"config": config.to_dict(), "model": model.config, "data": dict(info), "step": step}
    metadata = {"format": FORMAT, **{key: json.dumps(value) for key, value in about.items()}}
    with atomic_path(path) as temporary:
        try:
            save_tensors(temporary, weights, metadata)
        except _IO_ERRORS as error:
            raise CheckpointError(
                f"could not write {path} ({_reason(error)}); every checkpoint is intact: free some "
                "space and type the same command to go on"
            ) from error


def load_model(
    source: str | os.PathLike[str],
    step: int | None = None,
    weights: str = "ema",
    device: str | torch.device | None = None,
) -> TrainedModel:
    """Load a model from a run folder, one of its checkpoints or an exported file.

    Args:
        source: A run folder or a `.safetensors` file written by `export`.
        step: A checkpoint's step; None takes the exported weights, or the newest checkpoint.
        weights: `ema` or `raw` (the optimizer's own; checkpoints only).
        device: Where to put the model; None: CUDA where there is one, else the CPU.

    Raises:
        CheckpointError: Nothing there, another format, or no such step (those present are listed).
    """
    if weights not in ("ema", "raw"):
        raise CheckpointError(f"weights={weights}: expected ema or raw")
    path = Path(source).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist: give a run folder (runs/...) or a model.safetensors file"
        )
    exported = step is None and weights == "ema"
    if path.is_dir():
        if exported and (path / "model.safetensors").is_file():
            return _make(*_exported(path / "model.safetensors"), device)
        return _make(*_saved(path, step, weights), device)
    if not exported:
        raise CheckpointError(
            f"{path} is one set of EMA weights: give the run folder to choose a step or raw weights"
        )
    return _make(*_exported(path), device)


# What a model is made of: what its file says of it, its weights, and where they are.
_Parts = tuple[Mapping[str, Any], Mapping[str, torch.Tensor], str]


def _exported(path: Path) -> _Parts:
    try:
        _check_readable(path)
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    except OSError as error:
        raise _unreadable(path, error) from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({_reason(error)})"
        ) from error
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has no {FORMAT} metadata: expected weights that this suite exported "
            "(other projects' weights load through backbones.import_weights)"
        )
    try:
        keys = ("config", "model", "data", "step")
        return {key: json_of(metadata[key], key) for key in keys}, tensors, str(path)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"the metadata of {path} is damaged ({error})") from error


def _saved(run: Path, step: int | None, weights: str) -> _Parts:
    try:
        found = dict(listed(run))
    except OSError as error:
        raise _unreadable(run / "checkpoints", error) from error
    if not found:
        files = " or ".join(sorted(path.name for path in run.glob("*.safetensors"))[:3])
        raise CheckpointError(
            f"{run} has no checkpoints: give a run folder that trained for a while"
            + (f", or {files} in it" if files else "")
        )
    asked = [p for at, p in reversed(found.items()) if step in (None, at)]
    path = next((p for p in asked if damage(p) is None), None)
    if path is None:
        why = f"is damaged ({damage(asked[0])})" if asked else "is not there"
        what = "no checkpoint verifies, the newest" if step is None else f"checkpoint {step}"
        raise CheckpointError(
            f"{run}: {what} {why}; choose another --step: there are {', '.join(map(str, found))}"
        )
    tensors, state = read(path)
    prefix = "ema." if weights == "ema" else "model."
    chosen = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    return state, chosen, str(path)


def _make(
    described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], source: str, device: Any
) -> TrainedModel:
    try:
        config = Config.from_dict(described["config"])
        info, step = dict(described["data"]), int(described["step"])
        if not all(isinstance(name, str) for name in info.get("class_names") or ()):
            raise TypeError("class_names holds no names")
        model = Backbone.from_tensors(dict(described["model"]), tensors, source)
    except UserError as error:
        raise CheckpointError(str(error)) from error
    except _MALFORMED as error:
        raise CheckpointError(f"{source} does not describe its model ({error!r})") from error
    for name, p in model.named_parameters():
        if not torch.isfinite(p).all():
            raise CheckpointError(
                f"{source} holds weights that are not finite ({name}): the run diverged; take an "
                "earlier step of it, or another run"
            )
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1).to(place).item()  # not on `meta`, which holds no numbers
        model = model.to(place)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise CheckpointError(f"device={place} cannot be used ({reason}): try cpu") from error
    return TrainedModel(model.eval(), config, step, source, info)
