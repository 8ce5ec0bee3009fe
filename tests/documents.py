"""README.md, CONTRIBUTING.md and docs/, cut into parts that tests check: blocks, inline code, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from small import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks of some languages, without their indent."""
    fences = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, name, text in fences if name in languages]


def spans(page: Path) -> list[str]:
    """Inline code outside of fenced blocks, on one line."""
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `python ...`, `torchrun ...`, `accelerate ...` and `make ...` on a page."""
    lines = list(spans(page))
    for block in blocks(page, "bash", "sh"):
        lines += [re.sub(r"\s+#.*", "", line) for line in block.replace("\\\n", " ").splitlines()]
    for line in lines:
        if re.match(r"\s*(python|torchrun|accelerate|make) +\S", line):
            yield shlex.split(line)
