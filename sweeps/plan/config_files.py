"""The files that a user writes for sweeps: YAML by name or path, and grids in Python."""

import importlib.util
import itertools
import runpy
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from backbones.parsing import yaml_of
from experiments.runtime.errors import PACKAGES
from routing.errors import require, suggest
from sweeps import SweepError


def read_yaml(
    kind: str, name: str, folder: Path, numbers_as_text: bool = False
) -> tuple[Path, dict[Any, Any]]:
    """Return the path and the values of a YAML file: a grid or a cluster (`kind`).

    `name` is its path, or the name of a file in `folder` or in the current folder. With
    `numbers_as_text` 0123 is not read as 83.

    Raises:
        SweepError: There is no such file, or it is not a mapping in YAML.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file() and Path(f"{name}.yaml").is_file():
        path = Path(f"{name}.yaml")
    if not path.is_file():
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        raise SweepError(
            f"{kind}={name}: there is no such {kind}; expected a .yaml file or one of "
            f"{', '.join(names)}{suggest(name, names)}"
        )
    try:
        raw = yaml_of(path.read_text(encoding="utf-8"), numbers_as_text=numbers_as_text)
    except ValueError as error:  # not UTF-8, or not YAML
        raise SweepError(f"{kind} {path} is not YAML: {error}") from None
    require(isinstance(raw, dict), f"{kind} {path}: expected a mapping of keys", SweepError)
    return path, raw


def read_python(
    path: Path, keys: Collection[str], max_cells: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Execute a grid in Python.

    Returns:
        Its values of `keys`, and its commands as `module:function`.

    Raises:
        SweepError: There is no such file, its name would hide a module, or it raises.
    """
    require(path.is_file(), f"grid {path}: there is no such file", SweepError)
    spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    installed = spec is not None and "site-packages" in str(spec.origin)
    require(
        not installed and path.stem not in {*sys.stdlib_module_names, *PACKAGES},
        f"grid {path}: its jobs could not import {path.stem}, a module; rename it",
        SweepError,
    )
    print(f"{path} is code: it is executed, and kept with what it submits", file=sys.stderr)
    # Modules beside it are for its commands; a job finds the file itself in the code snapshot.
    sys.path.append(str(path.resolve().parent))
    try:
        namespace = runpy.run_path(str(path), run_name=path.stem)
        raw = {key: namespace[key] for key in keys if key in namespace}
        if callable(raw.get("cells")):
            # One more than allowed, so that the limit is reported.
            raw["cells"] = [dict(row) for row in itertools.islice(raw["cells"](), max_cells + 1)]
        return raw, _commands(path.stem, namespace)
    except Exception as error:
        raise SweepError(f"grid {path}: {type(error).__name__}: {error}") from error


def _commands(module: str, namespace: dict[str, Any]) -> dict[str, str]:
    """Return the entry points that a grid in Python has in `commands`."""
    commands = {}
    for name, target in namespace.get("commands", {}).items():
        function_name = getattr(target, "__name__", "")
        if not callable(target):
            commands[str(name)] = str(target)
        elif namespace.get(function_name) is target:
            commands[str(name)] = f"{module}:{function_name}"
        else:
            raise SweepError(f"command {name} needs a function with a name in this file: def")
    return commands
