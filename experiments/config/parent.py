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
from backbones.parsing import bytes_of, json_of
from backbones.sizes import parse_size
from experiments.options.objective import OBJECTIVES, ObjectiveOptions, check_same_network
from experiments.options.roles import parse_named
from experiments.runtime import run_folder
from routing.errors import UserError, require, suggest


class InitError(UserError):
    """`init=` names no weights that a run can start from."""


def split(text: str, key: str = "init=") -> tuple[Path, int | None]:
    """Return the folder or file, and the step, that `RUN[@STEP]` names.

    Args:
        text: As typed.
        key: The option, as it stands before the value in an error.

    Raises:
        InitError: The step is no number, the path does not exist, or it is a pattern that matches
            several paths.
    """
    require(
        text != "required",
        "this experiment continues from the weights of another run: name it with init=RUN",
        InitError,
    )
    # The name of a run may contain an @ (2-8@0.75); the step follows the last one.
    match = re.fullmatch(r"(.+)@([0-9]+)", text)
    name, step = (match[1], int(match[2])) if match else (text, None)
    path = Path(name).expanduser()
    if not path.exists() and glob.has_magic(name):
        # A shell leaves init=runs/dit-* as it is, and run folders end in a hash.
        matches = sorted(glob.glob(str(path)))
        example = "".join(f", such as {first}" for first in matches[:1])
        require(
            len(matches) == 1,
            f"{key}{text}: the pattern matches {len(matches)} paths{example}; expected exactly one",
            InitError,
        )
        path = Path(matches[0])
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    require(
        path.exists(),
        f"{key}{text}: {path} does not exist; expected RUN, or RUN@STEP with a whole number"
        f"{suggest(path.name, siblings)}",
        InitError,
    )
    return path, step


def parent_digest(text: str) -> str:
    """Return the SHA-256 of the weights that `init=` names: part of the child's identity.

    It covers names, types, shapes and values rather than the file: safetensors writes metadata in
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
                tensor = handle.get_slice(name)
                header = [name.removeprefix("ema."), tensor.get_dtype(), tensor.get_shape()]
                digest.update(json.dumps(header).encode())
                digest.update(_content(handle, path, name))
    except (OSError, ValueError, TypeError, MemoryError, SafetensorError):
        raise InitError(
            f"init={text}: {path} is no complete safetensors file; expected a run, or the weights "
            "that it exported"
        ) from None
    return digest.hexdigest()


def _content(handle: Any, path: Path, name: str) -> bytes:
    """Return a tensor's bytes; numpy has no bfloat16, which torch reads."""
    with suppress(TypeError):
        return handle.get_tensor(name).tobytes()
    import torch

    with safe_open(path, "pt") as torch_handle:
        return torch_handle.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes()


def check_parent(text: str, objective: ObjectiveOptions, model: Mapping[str, Any]) -> None:
    """Refuse parent weights that do not fit the run that would start from them.

    Args:
        text: The value of `init=`.
        objective: Options of the new run's objective.
        model: Arguments of the new run's model.

    Raises:
        InitError: The weights are those of another model, or do not say of which.
        ConfigError: They were trained with an objective of another meaning.
    """
    path = _weights(text)
    try:
        if path.name == "state.safetensors":
            description = json_of(bytes_of(path.with_name("state.json")))
        else:
            with safe_open(path, "numpy") as handle:
                metadata = handle.metadata()
            description = {key: json_of(metadata[key]) for key in ("config", "model")}
        parent_objective = description["config"]["objective"]
        parent_model = _model_facts(description["model"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        raise InitError(
            f"init={text}: {path} does not say which model it belongs to; expected a run, or "
            "weights that this suite exported"
        ) from None
    trained = parse_named(OBJECTIVES, "objective", parent_objective)
    check_same_network(f"init={text}", trained, objective)
    model_facts = _model_facts(model)
    require(
        parent_model == model_facts,
        f"init={text}: {parent_model} does not fit {model_facts}; give both the same backbone, "
        "size, data and learned parts",
        InitError,
    )


def _model_facts(model: Mapping[str, Any]) -> str:
    """Return family, parameters and heads; without REPA's projector, which is not copied."""
    params = cost(**{**model, "align": None}).params  # validates the arguments
    size = parse_size(model["size"], *(model.get(key) for key in ("depth", "width", "heads")))
    return f"{model['name']} with {params:,} parameters and {size.heads} heads"


def _weights(text: str) -> Path:
    path, step = split(text)
    if path.is_dir():
        if step is None:
            path = path / "model.safetensors"
        else:
            path = run_folder.step_folder(path, step) / "state.safetensors"
    require(
        path.is_file(),
        f"init={text}: no weights at {path}; finish that run, or name a step that it kept",
        InitError,
    )
    return path
