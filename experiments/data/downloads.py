"""Downloads of published files, verified by their checksums."""

from __future__ import annotations

import functools
import hashlib
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from experiments.data.data_options import DataError, require
from experiments.runtime.files import atomic_path
from experiments.runtime.locks import locked

# Seconds to wait for another process that downloads the same file, and for a server to answer.
_LOCK_TIMEOUT_S, _SERVER_TIMEOUT_S = 3600, 20


def fetch(addresses: Sequence[str], path: Path, digest: str, kind: str = "md5") -> None:
    """Download a published file from the first address that answers, unless it exists.

    Args:
        addresses: URLs of the same file.
        path: The file. It is written whole or not at all.
        digest: First digits of the checksum of the content.
        kind: Hash function of the checksum, as `hashlib` calls it.

    Raises:
        DataError: The file cannot be downloaded, or the existing one differs from the published.
    """
    if not path.is_file():
        _download_from_any(addresses, path, digest, kind)
    check_published(path, digest, kind)


def check_published(path: Path, digest: str, kind: str = "md5") -> None:
    """Refuse a file that differs from the published one, whose checksum starts with `digest`."""
    actual = _checksum(path, kind)
    require(
        actual.startswith(digest),
        f"{path} is truncated or differs from the published file: its {kind.upper()} is {actual}, "
        f"expected {digest}; delete it, and it is downloaded again",
    )


def _download_from_any(addresses: Sequence[str], path: Path, digest: str, kind: str) -> None:
    """Download a file from the first address that answers; only one process does."""
    reason = ""
    with locked(path.parent, wait_s=_LOCK_TIMEOUT_S):
        for address in addresses:
            if path.is_file():  # written by another process in the meantime
                return
            print(f"downloading {address} to {path}", file=sys.stderr)
            try:
                _download(address, path, digest, kind)
                return
            except (OSError, HTTPException) as error:
                reason = str(error)
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
    raise DataError(f"cannot download {addresses[-1]} to {path} ({reason})")


@functools.cache
def unreachable_reason(address: str) -> str:
    """Ask once whether a file can be downloaded; return why not, empty if it can."""
    try:
        with _open(address, "HEAD"):
            return ""
    except (OSError, HTTPException) as error:
        return str(error)


def _open(address: str, method: str = "GET") -> Any:
    """Send a request and return the response, which is closed as a context manager."""
    # Some servers refuse urllib's own user agent.
    headers = {"User-Agent": "tread-suite"}
    request = urllib.request.Request(address, headers=headers, method=method)
    return urllib.request.urlopen(request, timeout=_SERVER_TIMEOUT_S)


def _download(address: str, path: Path, digest: str, kind: str) -> None:
    with _open(address) as response, atomic_path(path) as temporary:
        with temporary.open("wb") as file:
            shutil.copyfileobj(response, file)
        if not _checksum(temporary, kind).startswith(digest):
            raise OSError("its checksum differs")


def _checksum(path: Path, kind: str) -> str:
    """Return the checksum of a file as hexadecimal digits."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
    return digest.hexdigest()
