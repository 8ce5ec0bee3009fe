"""`init=RUN[@STEP]` read and resolved: the parent's files, the digest of its weights (no torch)."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from backbones.cost import cost
from backbones.parsing import json_of
from backbones.sizes import parse_size
from experiments.options.objective import check_same_network
from experiments.runtime import run_folder
from routing.errors import UserError, suggest


class InitError(UserError):
    """`init=` names nothing that weights can be taken from."""


def split(text: str, key: str = "init=") -> tuple[Path, int | None]:
    """Return the folder or file and the step that `RUN[@STEP]` names, in errors behind its `key`.

    Raises:
        InitError: The step is no number, or the path does not exist or is a pattern of several.
    """
    if text == "required":
        raise InitError("this recipe goes on from another run's weights: say which with init=RUN")
    # A run has an @ of its own in its name (2-8@0.75); a step is what follows the last one.
    named = re.fullmatch(r"(.+)@([0-9]+)", text)
    path, step = (named[1], int(named[2])) if named else (text, None)
    found = Path(path).expanduser()
    if not found.exists() and glob.has_magic(path):
        # A shell leaves init=runs/dit-* as it is, and run folders end in a hash.
        fits = sorted(glob.glob(str(found)))
        if len(fits) != 1:
            those = f"fits {len(fits)} paths, such as {fits[0]}" if fits else "fits nothing"
            raise InitError(f"{key}{text}: the pattern {those}; expected exactly one run")
        found = Path(fits[0])
    if not found.exists():
        siblings = [p.name for p in found.parent.iterdir()] if found.parent.is_dir() else []
        raise InitError(
            f"{key}{text}: {found} does not exist; expected RUN, or RUN@STEP with a whole number"
            f"{suggest(found.name, siblings)}"
        )
    return found, step


def parent_digest(text: str) -> str:
    """Return the SHA-256 of the weights that `init=` names: part of the child's identity.

    It is taken of names, types, shapes and values, not of the file: safetensors writes metadata in
    a random order, and a checkpoint holds more than the EMA weights that a child starts from.
    """
    path, digest = _weights(text), hashlib.sha256()
    try:
        with path.open("rb"):  # fails with the system's reason, where safetensors says "missing"
            pass
    except OSError as error:
        raise InitError(f"init={text}: {path} cannot be read ({error.strerror})") from None
    try:
        with safe_open(path, "numpy") as handle:
            names = sorted(handle.keys())
            for name in [name for name in names if name.startswith("ema.")] or names:
                about = handle.get_slice(name)
                facts = [name.removeprefix("ema."), about.get_dtype(), about.get_shape()]
                digest.update(json.dumps(facts).encode())
                digest.update(_content(handle, path, name))
    except (OSError, ValueError, TypeError, MemoryError, SafetensorError):
        raise InitError(
            f"init={text}: {path} is no whole safetensors file; name a run or weights it exported"
        ) from None
    return digest.hexdigest()


def _content(handle: Any, path: Path, name: str) -> bytes:
    """Return a tensor's bytes; numpy has no bfloat16, which torch reads."""
    with suppress(TypeError):
        return handle.get_tensor(name).tobytes()
    import torch

    with safe_open(path, "pt") as other:
        return other.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes()


def check_parent(text: str, objective: Any, model: Mapping[str, Any]) -> None:
    """Refuse weights that `init=` names for another `objective`, or another size of `model`.

    Both are those of the child: its objective's options, and the arguments of its model.
    """
    path = _weights(text)
    try:
        if path.name == "state.safetensors":
            told = json_of(path.with_name("state.json").read_bytes())
        else:
            with safe_open(path, "numpy") as handle:
                about = handle.metadata()
            told = {key: json_of(about[key]) for key in ("config", "model")}
        theirs, there = told["config"]["objective"], _facts(told["model"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        raise InitError(
            f"init={text}: {path} does not say which model it is of; name a run, or weights that "
            "this suite exported"
        ) from None
    check_same_network(f"init={text}", theirs, objective)
    if there != (here := _facts(model)):
        old, new = (
            "{} with {:,} parameters and {} heads".format(*facts) for facts in (there, here)
        )
        raise InitError(
            f"init={text}: {old} does not fit {new}; give both the same backbone, size, data and "
            "learned parts"
        )


def _facts(model: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return a model's family, parameters without REPA's projector, which stays behind, heads."""
    size = parse_size(model["size"], *(model.get(key) for key in ("depth", "width", "heads")))
    return model["name"], cost(**{**model, "align": None}).params, size.heads


def _weights(text: str) -> Path:
    path, step = split(text)
    if path.is_dir():
        if step is None:
            path = path / "model.safetensors"
        else:
            path = run_folder.step_folder(path, step) / "state.safetensors"
    if not path.is_file():
        raise InitError(
            f"init={text}: no weights at {path}; finish that run, or name a step it kept"
        )
    return path
