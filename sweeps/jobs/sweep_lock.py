"""A lock file that a dead process cannot keep."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from sweeps.errors import SweepError


@contextlib.contextmanager
def held(path: Path, wait_s: float = 60.0, what: str = "another launch") -> Iterator[None]:
    """Hold an exclusive lock on `path` (the kernel drops it however the process ends).

    Works across hosts where the file system passes flock on (NFSv4, Lustre with flock).

    Raises:
        SweepError: It stayed with somebody else for `wait_s` seconds, or there are no locks here.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    end = time.monotonic() + wait_s
    try:
        while not _try(fd):
            if time.monotonic() > end:
                raise SweepError(
                    f"{what} holds {path} for more than {wait_s:.0f} s; wait for it, then try again"
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def is_held(path: Path) -> bool:
    """Whether some process holds the lock on `path`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try(fd)
    finally:
        os.close(fd)


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise SweepError(
                f"the folder of runs cannot be locked ({error.strerror}), so two launches could "
                "submit everything twice; put paths.runs on a file system with flock"
            ) from error
        return False
    return True
