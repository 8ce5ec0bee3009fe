"""Figures of the structure and the wording of the packages, from their syntax trees: what `test_house.py` limits.

A subpackage is a folder directly in a package: `experiments.data`. Code lines are those that are neither blank nor
a comment alone. Imports count wherever they stand: at the top, in functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from small import ROOT

PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")
# Names that say nothing about their value. Well-known codebases of the field assign to them in 0.2 % of cases at most.
GENERIC_WORDS = (
    "found known made told said given asked own about theirs ours one other others every wanted rest way ways what whole "
    "left shown there kept held both alike these those place places thing things word words stands taken seen"
)
GENERIC = frozenset(GENERIC_WORDS.split())
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One file of a package."""

    name: str  # dotted
    path: Path
    text: str
    nodes: tuple[ast.AST, ...]  # of the whole syntax tree, parents before their children

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    @property
    def subpackage(self) -> str | None:
        """`experiments.data` of `experiments.data.scenes`; None of what lies directly in a package."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if len(parts) > 2 else None

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def code_lines(self) -> int:
        stripped = (line.strip() for line in self.text.splitlines())
        return sum(1 for line in stripped if line and not line.startswith("#"))

    def count(self, *kinds: type) -> int:
        return sum(isinstance(node, kinds) for node in self.nodes)


@cache
def modules() -> dict[str, Module]:
    """Return all modules by their dotted name; notebooks are left out."""
    result = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "notebooks" in path.parts:
                continue
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            result[name] = Module(name, path, text, tuple(ast.walk(ast.parse(text))))
    return result


def owner(dotted: str) -> str | None:
    """Return the module of ours that a dotted name is, or is a part of."""
    while dotted and dotted not in modules():
        dotted = dotted.rpartition(".")[0]
    return dotted or None


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert not node.level, "relative imports are not counted"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@cache
def imports() -> tuple[tuple[str, str, str], ...]:
    """Return (importing module, imported module, top | function | typing) of all imports of our own modules."""
    result = []
    for module in modules().values():
        kinds: dict[ast.AST, str] = {}
        for node in module.nodes:
            for child in ast.iter_child_nodes(node):
                kinds[child] = kinds.get(node, "top")
                if isinstance(node, (*FUNCTIONS, ast.Lambda)):
                    kinds[child] = "function"
                elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                    kinds[child] = "typing"
            for name in _imported_names(node):
                target = owner(name)
                if target and target != module.name:
                    result.append((module.name, target, kinds.get(node, "top")))
    return tuple(result)


def imported_by() -> dict[str, set[str]]:
    """Return the modules of ours that each module imports."""
    graph: dict[str, set[str]] = {}
    for importing, imported, _ in imports():
        graph.setdefault(importing, set()).add(imported)
    return graph


def imported_subpackages() -> dict[str, set[str]]:
    """Return the subpackages of the same package that each subpackage imports."""
    graph: dict[str, set[str]] = {}
    for importing, imported, _ in imports():
        here, there = modules()[importing], modules()[imported]
        if (
            here.subpackage
            and there.subpackage
            and here.package == there.package
            and here.subpackage != there.subpackage
        ):
            graph.setdefault(here.subpackage, set()).add(there.subpackage)
    return graph


def functions() -> Iterator[tuple[int, str]]:
    """Return length and name of every function, decorators left out."""
    for module in modules().values():
        for node in module.nodes:
            if isinstance(node, FUNCTIONS):
                yield ((node.end_lineno or node.lineno) - node.lineno + 1, f"{module.name}.{node.name}")


def comprehensions_per_100_lines(package: str) -> float:
    own = [module for module in modules().values() if module.package == package]
    return 100 * sum(m.count(*COMPREHENSIONS) for m in own) / sum(m.code_lines for m in own)


def walrus_per_1000_lines() -> float:
    return 1000 * sum(m.count(ast.NamedExpr) for m in modules().values()) / code_lines()


def raise_share() -> float:
    """Return the lines of `raise` statements in per cent of the code lines."""
    raises = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules().values()
        for node in module.nodes
        if isinstance(node, ast.Raise)
    ]
    return 100 * sum(raises) / code_lines()


def generic_names_share() -> float:
    """Return the assignments to generic names in per cent of those to any name."""
    names = [
        node.id
        for module in modules().values()
        for node in module.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return 100 * sum(name in GENERIC for name in names) / len(names)


def code_lines() -> int:
    return sum(module.code_lines for module in modules().values())
