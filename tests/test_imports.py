"""Imports between the packages run one way: routing, backbones, experiments, sweeps, analysis."""

import ast
from graphlib import CycleError, TopologicalSorter

from small import ROOT

PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")


def imports() -> list[tuple[str, str]]:
    """Return all (importing, imported) pairs of our modules, wherever in a file the import stands."""
    paths = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "notebooks" not in path.parts:
                paths[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    pairs = []
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parent, *filter(None, [node.module])])
                targets = [f"{base}.{alias.name}" for alias in node.names]
            for target in targets:
                while target and target not in paths:
                    target = target.rpartition(".")[0]
                if target and target != name:
                    pairs.append((name, target))
    return pairs


def assert_no_cycle(pairs: list[tuple[str, str]]) -> None:
    graph: dict[str, set[str]] = {}
    for importing, imported in pairs:
        if importing != imported:
            graph.setdefault(importing, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def subpackage(module: str) -> str:
    """Return `experiments.data` of `experiments.data.scenes`."""
    return ".".join(module.split(".")[:2])


def test_no_module_leads_back_to_itself():
    # A package's __init__ offers the names of its modules, so only the modules themselves are nodes.
    assert_no_cycle(imports())


def test_packages_import_earlier_ones_only():
    order = {package: index for index, package in enumerate(PACKAGES)}
    later = [pair for pair in imports() if order[pair[1].split(".")[0]] > order[pair[0].split(".")[0]]]
    assert later == []


def test_subpackages_import_each_other_in_one_order():
    folders = {path.name for package in PACKAGES for path in (ROOT / package).iterdir() if path.is_dir()}
    inside = [(subpackage(a), subpackage(b)) for a, b in imports()]
    assert_no_cycle([pair for pair in inside if all(name.split(".")[-1] in folders for name in pair)])
