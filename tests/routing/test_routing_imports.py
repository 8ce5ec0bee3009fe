"""The folder `routing/` works alone: it imports the standard library, torch, Triton and itself."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from small import ROOT

FILES = sorted((ROOT / "routing").rglob("*.py"))
ALLOWED = {*sys.stdlib_module_names, "torch", "triton", "routing"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_routing_depends_on_torch_only(path: Path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    assert imported <= ALLOWED
