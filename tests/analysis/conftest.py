"""Fixtures of the analysis tests: the published records, unpacked and read once."""

import functools

import pytest
from analysis_runs import study
from suite import RESULTS

from analysis.comparison.results import Results
from analysis.runs.archives import unpack


@pytest.fixture(scope="session")
def made_runs(tmp_path_factory):
    """`Results` of a small but complete study: placement, rates, selections, baselines and guidance."""
    return Results.of(study(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """Return a function from the name of an archive in results/ to its `Results`."""
    folder = tmp_path_factory.mktemp("records")

    @functools.cache
    def read(name):
        return Results.of(unpack(RESULTS / f"{name}.tar.gz", folder))

    return read
