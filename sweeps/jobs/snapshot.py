"""The folder of a launch: its own copy of the code, and what its jobs read.

A job that starts later, or is requeued, runs what was submitted. The folder is for its owner alone,
and no launch uses that of another one, so nobody else can put code there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Collection
from pathlib import Path

from backbones.parsing import is_own
from experiments.runtime.command import environment_of_jobs
from experiments.runtime.errors import PACKAGES, ROOT
from experiments.runtime.files import atomic_write, code_commit

# Left out of a copy; hidden files are an editor's.
_IGNORED = shutil.ignore_patterns(".*", "__pycache__", "notebooks", "*.pyc", "*.so.tmp", "*~")


def new_launch(launches: Path, root: Path = ROOT) -> tuple[Path, str]:
    """Make the folder of a launch with a copy of the packages in `root`; return it and their hash.

    The copy is in `code/`, with its hash and commit in `snapshot.json`.
    """
    launches.mkdir(parents=True, exist_ok=True)
    folder = launches / uuid.uuid4().hex[:8]
    folder.mkdir(mode=0o700)
    code = folder / "code"
    for package in PACKAGES:
        shutil.copytree(root / package, code / package, ignore=_IGNORED)
    digest = _content_hash(code)[:12]
    values = {"commit": code_commit(root), "hash": digest, "time": time.time()}
    atomic_write(code / "snapshot.json", json.dumps(values, indent=1))
    return folder, digest


def remove_launches(launches: Path, keep: Collection[str]) -> None:
    """Remove the folders of this user's launches that have ended; those in `keep` have jobs."""
    for folder in launches.glob("*"):
        if folder.name not in keep and folder.is_dir() and is_own(folder):
            remove_launch(folder)


def remove_launch(folder: Path) -> None:
    """Remove the folder of a launch."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():  # of a read-only installation
            path.chmod(0o700)
    shutil.rmtree(folder)


def _content_hash(folder: Path) -> str:
    """Return the hash of the files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def job_environment(code: Path) -> dict[str, str]:
    """Return the environment of a process that runs the copy `code`."""
    return environment_of_jobs() | {"PYTHONPATH": python_path(code)}


def python_path(code: Path) -> str:
    """Return PYTHONPATH with a copy of the code first."""
    paths = [str(code)]
    for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if path and path != str(code):
            paths.append(path)
    return os.pathsep.join(paths)
