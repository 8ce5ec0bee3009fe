"""What users can type and import, frozen: growth is a change that somebody made on purpose.

`data/options.txt` has a line for every option: what must be typed for it to be there (`-`: nothing), key, type,
default. `data/surface.txt` has the names that users import. The wording of `--help` is free.

REGENERATE=1 python -m pytest tests/test_surface.py (or `make surface`) writes the files anew.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
from pathlib import Path

import pytest
from small import ROOT, run
from suite import DATA, GROUPS, PUBLIC, compose, option_types, registered

from experiments.runtime.nested import flatten

SURFACE = DATA / "surface.txt"
OPTIONS = DATA / "options.txt"
HELP = ROOT / "docs" / "help.txt"


def described(word: str | None) -> dict[str, str]:
    """Return type and default of every option under one more word on the command line."""
    values = compose([word] if word else [])
    types = option_types(values)
    return {key: f"{types[key]}\t{json.dumps(default)}" for key, default in flatten(values).items()}


def options() -> str:
    """Return all options: those without a word, and for every word those that are new or other under it."""
    usual = described(None)
    lines = [f"-\t{key}\t{text}" for key, text in sorted(usual.items())]
    for group in GROUPS:
        for name in registered(group):
            word = f"{group}={name}"
            changed = {k: t for k, t in described(word).items() if usual.get(k) != t}
            lines += [f"{word}\t{key}\t{text}" for key, text in sorted(changed.items())]
    return "\n".join(lines) + "\n"


def public_names() -> str:
    """Return the names that can be imported from each package."""
    lines = []
    for package in PUBLIC:
        module = importlib.import_module(package)
        names = [name for name in sorted(module.__all__) if getattr(module, name, None) is not None]
        lines += [f"[import {package}]", *names, ""]
    return "\n".join(lines)


def compare(path: Path, now: str) -> None:
    """Hold `now` against a committed file, or write it where that was asked for."""
    if os.environ.get("REGENERATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(now, encoding="utf-8")
    kept = path.read_text(encoding="utf-8")
    changed = difflib.unified_diff(kept.splitlines(), now.splitlines(), "agreed", "now", n=0)
    if now != kept:
        pytest.fail("on purpose? then `make surface`\n" + "\n".join(changed), pytrace=False)


def test_option_keys_types_and_defaults_are_those_that_were_agreed():
    compare(OPTIONS, options())


def test_public_names_are_those_that_were_agreed():
    compare(SURFACE, public_names())


def keys_in(help_text: str) -> set[str]:
    """Return the dotted keys and `group=name` words that a help text mentions."""
    return set(re.findall(r"\b[a-z_]+\.[a-z_]+\b|\b[a-z]+=[a-z0-9_]+\b", help_text))


def test_help_in_the_documentation_names_what_the_command_prints():
    done = run("--help", "all")
    assert done.returncode == 0, done.stderr
    if os.environ.get("REGENERATE"):
        HELP.write_text(done.stdout, encoding="utf-8")
    assert keys_in(HELP.read_text(encoding="utf-8")) == keys_in(done.stdout)
    option_keys = [line.split("\t")[1] for line in OPTIONS.read_text(encoding="utf-8").splitlines()]
    shown = {key.split(".")[1] for key in option_keys if key.startswith(("train.", "routing."))}
    assert [name for name in sorted(shown) if not re.search(rf"\b{name}\b", done.stdout)] == []
