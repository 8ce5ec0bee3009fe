"""Files written whole or not at all, checksums, the code's commit (no torch here)."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import re
import secrets
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from backbones.parsing import check_file, json_of
from routing.errors import UserError

# A temporary file of this age was left behind by a killed writer.
ABANDONED_S = 86400


# Folders that macOS, Synology disks, Windows and Linux create.
_SYSTEM_FOLDERS = {
    "__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found",
}  # fmt: skip


def is_system_file(name: str) -> bool:
    """Whether a file or folder is hidden or the system's, as `._1.png` or `@eaDir`."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def visible_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern, sorted, without the system's (`._0.tar`)."""
    return sorted(path for path in folder.glob(pattern) if not is_system_file(path.name))


def refuse_links(folder: Path, names: Iterable[str], trees: Iterable[str] = ()) -> None:
    """Refuse links among these names in a folder, and in the `trees` also below them.

    A folder may be somebody else's, and what is written to a link is written elsewhere.

    Raises:
        UserError: The message names the link.
    """
    paths = [folder / name for name in (*names, *trees)]
    links = [path for path in paths if path.is_symlink()]
    links = links or [link for tree in trees for link in _links_below(folder / tree)]
    if links:
        raise UserError(
            f"{links[0]} is a link to {os.readlink(links[0])}, and what is written there would be "
            "written elsewhere: replace it by what it leads to, or remove it"
        )


def _links_below(folder: Path) -> Iterator[Path]:
    # An absent folder has none, and in one that cannot be read nothing is written.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        for entry in os.scandir(folder):
            if entry.is_symlink():
                yield Path(entry.path)
            elif entry.is_dir():
                yield from _links_below(Path(entry.path))


def fsync_dir(path: Path) -> None:
    """Flush a directory entry to disk, so that a rename survives a power cut."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_replaceable(target: Path) -> None:
    """Raise `OSError` for a target that exists and is no file, or whose folder is not writable."""
    check_file(target)  # a rename would replace a device
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not os.access(folder, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder that becomes `path` if the block succeeds.

    The temporary file keeps the suffix of `path`, by which libraries choose a format. It is flushed
    to disk before the rename and removed if the block raises, so `path` is never half written.
    Temporary files of killed writers of the same `path` are removed after a day.

    Raises:
        OSError: The disk is full or not writable, also if safetensors reports it as its own error.
    """
    target = Path(path)
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{target.stem}-", f".tmp{target.suffix}"
    for old in target.parent.glob(f"{glob.escape(prefix)}????????{suffix}"):
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < time.time() - ABANDONED_S:
                old.unlink()
    temporary = target.with_name(f"{prefix}{secrets.token_hex(4)}{suffix}")
    try:
        # Permissions follow the umask, unlike those of `tempfile`.
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        # safetensors replaces it by a private file.
        temporary.chmod(mode)
        with temporary.open("r+b") as written:  # Windows flushes only writable files
            os.fsync(written.fileno())
        os.replace(temporary, target)
        fsync_dir(target.parent)
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None or type(error).__name__ != "SafetensorError":
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(target)) from error
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` (text as UTF-8) so that a reader sees the old file or the whole new one."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def default_cache() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/tread-suite` or `~/.cache/tread-suite`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tread-suite"


def sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file as hexadecimal digits, without loading it whole."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def code_commit(root: Path) -> str | None:
    """Return the commit of the code at `root`, with `+` if changed; None outside a repository.

    A sweep's copy of the code is no repository: its `snapshot.json` records the commit.
    """
    with contextlib.suppress(OSError, ValueError):
        return json_of((root / "snapshot.json").read_bytes())["commit"]
    describe = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            [*describe, "--dirty=+"], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    return None
