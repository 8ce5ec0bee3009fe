"""Shared by the tests of one run."""

import contextlib
import resource

import pytest


@pytest.fixture
def full_disk():
    """A context in which no file grows beyond ten kilobytes: writing is refused as on a full disk."""

    @contextlib.contextmanager
    def limited():
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
