"""Files that are either whole or absent: write beside, flush, rename (no torch here)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


def fsync_dir(path: Path) -> None:
    """Flush a directory entry to disk, so that a rename survives a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder that becomes `path` if the block succeeds.

    The temporary file keeps the suffix of `path` (libraries choose a format by it). It is flushed
    to disk
    before the rename and removed if the block raises, so `path` is never half written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.stem}-", suffix=f".tmp{target.suffix}"
    )
    os.close(fd)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files private; results are for the group as any other file is.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, target)
        fsync_dir(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` to `path` so that a reader sees the old file or the whole new one."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file as hexadecimal digits, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as handle:
        while piece := handle.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def code_commit(root: Path) -> str | None:
    """Return the commit of the code at `root`, `+` if it has changes; None outside a repository.

    A sweep's copy of the code has no repository: its `snapshot.json` says where it was taken.
    """
    with contextlib.suppress(OSError, ValueError):
        return json.loads((root / "snapshot.json").read_text())["commit"]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
