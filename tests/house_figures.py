"""Figures of the structure and the wording of the packages, from their syntax trees: what `test_house.py` limits.

A subpackage is a folder directly in a package: `experiments.data`. Imports count wherever they stand: at the top, in
functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from small import ROOT

PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")
# Names that say nothing about their value. Well-known codebases of the field assign to them in 0.2 % of cases at most.
GENERIC_WORDS = (
    "found known made told said given asked own about theirs ours one other others every wanted rest way ways what whole "
    "left shown there kept held both alike these those place places thing things word words stands taken seen"
)
GENERIC = frozenset(GENERIC_WORDS.split())
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One file of a package."""

    name: str  # dotted
    text: str
    nodes: tuple[ast.AST, ...]

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    @property
    def subpackage(self) -> str | None:
        """`experiments.data` of `experiments.data.scenes`; None of what lies directly in a package."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if len(parts) > 2 else None


@cache
def modules() -> dict[str, Module]:
    """Return all modules by their dotted name; notebooks are left out."""
    result = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "notebooks" not in path.parts:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                text = path.read_text(encoding="utf-8")
                result[name] = Module(name, text, tuple(ast.walk(ast.parse(text))))
    return result


def owner(dotted: str) -> str | None:
    """Return the module of ours that a dotted name is, or is a part of."""
    while dotted and dotted not in modules():
        dotted = dotted.rpartition(".")[0]
    return dotted or None


@cache
def imported_by() -> dict[str, set[str]]:
    """Return the modules of ours that each module imports."""
    graph: dict[str, set[str]] = {}
    for module in modules().values():
        names = []
        for node in module.nodes:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
        graph[module.name] = {target for target in map(owner, names) if target} - {module.name}
    return graph


def imports() -> list[tuple[Module, Module]]:
    """Return the importing and the imported module of all imports of our own modules."""
    return [(modules()[here], modules()[there]) for here, targets in imported_by().items() for there in targets]


def imported_subpackages() -> dict[str, set[str]]:
    """Return the subpackages of the same package that each subpackage imports."""
    graph: dict[str, set[str]] = {}
    for here, there in imports():
        if here.package == there.package and here.subpackage and there.subpackage not in (None, here.subpackage):
            graph.setdefault(here.subpackage, set()).add(there.subpackage)
    return graph


def functions() -> Iterator[tuple[int, str]]:
    """Return length and name of every function, decorators left out."""
    for module in modules().values():
        for node in module.nodes:
            if isinstance(node, FUNCTIONS):
                yield lines_of(node), f"{module.name}.{node.name}"


def lines_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


def generic_names_share() -> float:
    """Return the assignments to generic names in per cent of those to any name."""
    nodes = (node for module in modules().values() for node in module.nodes)
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return 100 * sum(name in GENERIC for name in names) / len(names)
