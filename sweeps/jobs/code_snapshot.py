"""A copy of the code beside the sweep, so that a requeued job runs what was submitted."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.runtime.command import PACKAGES, ROOT
from experiments.runtime.files import atomic_write, code_commit

_SKIP = {"__pycache__", ".ipynb_checkpoints", "notebooks", ".mypy_cache", ".ruff_cache"}


def files(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files of the five packages below `root`, relative to it, in a fixed order."""
    for package in PACKAGES:
        for folder, folders, names in os.walk(root / package):
            folders[:] = sorted(f for f in folders if f not in _SKIP)
            for name in sorted(names):
                if not name.endswith((".pyc", ".so.tmp", "~")):
                    yield (Path(folder) / name).relative_to(root)


def take(where: Path, root: Path = ROOT, own: Path | None = None) -> Path:
    """Copy the packages in `root` to `where/<hash>` unless they are there; return that folder.

    A grid in Python, `own`, is kept beside them.
    """
    listed = {path: root / path for path in files(root)}
    if own is not None:
        listed[Path(own.name)] = own
    digest = hashlib.sha256()
    for path, source in listed.items():
        content = source.read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    target = where / digest.hexdigest()[:12]
    if (target / "snapshot.json").is_file():
        return target
    building = where / f".{target.name}-{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    for path, source in listed.items():
        (building / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, building / path)
    facts = {"commit": code_commit(root), "hash": target.name, "time": time.time()}
    atomic_write(building / "snapshot.json", json.dumps(facts, indent=1))
    try:
        building.rename(target)
    except OSError:  # the same code was copied by another shell in the meantime
        shutil.rmtree(building, ignore_errors=True)
    return target


def python_path(code: Path) -> str:
    """Return PYTHONPATH with the snapshot as the first place that Python looks in."""
    rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(code)]
    return os.pathsep.join([str(code), *rest])
