"""The structure of the packages holds: one-way imports, short files and functions, plain names.

Nothing limits the number of lines: a longer clear version is better than a shorter clever one.
"""

from graphlib import CycleError, TopologicalSorter

import house_figures as house
import pytest


def test_files_and_functions_are_short_and_import_few_of_ours():
    assert max((len(targets), name) for name, targets in house.imported_by().items()) <= (10, "~")
    assert max(house.functions()) <= (60, "~")
    assert max((len(module.text.splitlines()), module.name) for module in house.modules().values()) <= (400, "~")


def test_few_names_are_generic():
    assert round(house.generic_names_share(), 1) <= 1.0, "per cent of assignments"


@pytest.mark.parametrize("graph", [house.imported_by, house.imported_subpackages])
def test_nothing_leads_back_to_itself_however_it_is_imported(graph):
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_packages_import_earlier_ones_only():
    later = []
    for here, there in house.imports():
        is_prediction = here.name.startswith("sweeps.prediction")  # analyses the pilot's runs
        if house.PACKAGES.index(there.package) > house.PACKAGES.index(here.package) and not is_prediction:
            later.append((here.name, there.name))
    assert later == []
