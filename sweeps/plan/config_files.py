"""The files that a user writes for sweeps, YAML by name or path."""

from pathlib import Path
from typing import Any

from backbones.parsing import yaml_of
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
