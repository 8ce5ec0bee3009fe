"""What users can type and import, frozen: growth is a change of `data/surface.txt` that somebody made on purpose.

REGENERATE=1 python -m pytest tests/test_surface.py (or `make surface`) writes the files anew.
"""

import difflib
import importlib
import os
from pathlib import Path

import pytest
import yaml
from small import ROOT, run

from experiments.config.compose import flatten
from experiments.config.schema import CONF

SURFACE = ROOT / "tests" / "data" / "surface.txt"
HELP = ROOT / "docs" / "help.txt"
PACKAGES = (
    "routing",
    "backbones",
    "experiments.diffusion",
    "experiments.evaluation",
    "experiments.data",
    "experiments.evaluation",
    "analysis",
)


def keys(path: Path) -> list[str]:
    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    values.pop("defaults", None)
    return sorted(flatten(values))


def surface() -> str:
    lines = []
    for path in sorted(CONF.rglob("*.yaml")):
        lines += [f"[{path.relative_to(CONF).with_suffix('')}]", *keys(path), ""]
    for package in PACKAGES:
        lines += [f"[import {package}]", *sorted(importlib.import_module(package).__all__), ""]
    return "\n".join(lines)


def compare(path: Path, now: str) -> None:
    """Hold `now` against a committed file, or write it where that was asked for."""
    if os.environ.get("REGENERATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(now, encoding="utf-8")
    kept = path.read_text(encoding="utf-8")
    changed = difflib.unified_diff(kept.splitlines(), now.splitlines(), "agreed", "now", n=2)
    if now != kept:
        pytest.fail("on purpose? then `make surface`\n" + "\n".join(changed), pytrace=False)


def test_keys_and_public_names_are_those_that_were_agreed():
    compare(SURFACE, surface())


def test_public_names_can_be_imported():
    for package in PACKAGES:
        module = importlib.import_module(package)
        missing = [name for name in module.__all__ if getattr(module, name, None) is None]
        assert not missing, f"{package}: {missing}"
        assert set(module.__all__) <= set(dir(module)), package


def test_help_in_the_documentation_is_what_the_command_prints():
    done = run("--help", "all")
    assert done.returncode == 0, done.stderr
    compare(HELP, done.stdout)
