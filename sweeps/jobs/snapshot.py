"""Copies of the code, so that a job that starts later or is requeued runs what was submitted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import warnings
from pathlib import Path

from experiments.runtime.command import environment_of_jobs
from experiments.runtime.errors import PACKAGES, ROOT
from experiments.runtime.files import atomic_write, code_commit
from sweeps import SweepError

# Left out of a copy; hidden files are an editor's.
_IGNORED = shutil.ignore_patterns(".*", "__pycache__", "notebooks", "*.pyc", "*.so.tmp", "*~")


class SnapshotWarning(UserWarning):
    """A copy of the code was changed."""


def snapshot(folder: Path, root: Path = ROOT) -> Path:
    """Copy the packages in `root` to `folder/<hash>` unless they are there; return that folder.

    The folder may come from anywhere and jobs import from it, so an existing copy is trusted only
    if its content matches; one that differs is replaced, with a warning. The caller holds the lock
    of all sweeps.

    Raises:
        SweepError: A copy that differs cannot be replaced.
    """
    building = folder / ".building"
    _remove(building)  # of a copy that was cut off
    building.mkdir(parents=True)
    for package in PACKAGES:
        shutil.copytree(root / package, building / package, ignore=_IGNORED)
    _make_writable(building)
    digest = _content_hash(building)
    if digest is None:  # not a link: copytree copies what links lead to
        raise SweepError(f"{root} has a file that cannot be copied, such as a pipe; remove it")
    target = folder / digest[:12]
    # What a link leads to is neither ours to use nor to remove.
    if target.is_dir() and not target.is_symlink():
        # Compiled by a job, or planted: Python prefers it to the source that is hashed.
        for cache in list(target.rglob("__pycache__")):
            _remove(cache)
        if (target / "snapshot.json").is_file() and _content_hash(target) == digest:
            _remove(building)
            return target
    if target.is_symlink() or (target / "snapshot.json").is_file():
        text = f"{target} was changed after it was copied; it is copied again"
        warnings.warn(text, SnapshotWarning, stacklevel=2)
    _remove(target)
    values = {"commit": code_commit(root), "hash": target.name, "time": time.time()}
    atomic_write(building / "snapshot.json", json.dumps(values, indent=1))
    building.rename(target)
    return target


def _content_hash(folder: Path) -> str | None:
    """Return the hash of a copy's files without `snapshot.json`; None if it has links or devices.

    `__pycache__` does not count: running jobs write it again after its removal.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.relative_to(folder).parts:
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            return None
        if path.is_file() and path != folder / "snapshot.json":
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link but not what it leads to."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            _make_writable(path)
            shutil.rmtree(path)
    except OSError as error:
        raise SweepError(
            f"{path} is not a copy of this code and cannot be removed ({error.strerror}); remove "
            "it, or type another paths.runs=FOLDER"
        ) from None


def _make_writable(folder: Path) -> None:
    """Make folders removable that have the modes of a read-only installation."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(path.stat().st_mode | 0o700)


def job_environment(code: Path) -> dict[str, str]:
    """Return the environment of a process that runs the snapshot `code`."""
    return environment_of_jobs() | {"PYTHONPATH": python_path(code)}


def python_path(code: Path) -> str:
    """Return PYTHONPATH with a snapshot first."""
    paths = [str(code)]
    for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if path and path != str(code):
            paths.append(path)
    return os.pathsep.join(paths)
