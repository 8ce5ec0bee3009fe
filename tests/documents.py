"""README.md, CONTRIBUTING.md and docs/, cut into parts that tests check: blocks, inline code, commands, the tree."""

from __future__ import annotations

import re
import shlex
import subprocess
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


def package_folders() -> set[str]:
    """Folders of the packages, up to two deep, that hold code or options under version control."""
    command = ["git", "-c", "safe.directory=*", "ls-files"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {f"{Path(path).parent}/" for path in listing.splitlines() if path.endswith((".py", ".yaml"))}
    return {folder for folder in folders if folder.count("/") <= 2 and folder.split("/")[0] in PACKAGES}


def tree() -> set[str]:
    """Folders that the tree of CONTRIBUTING.md shows: one or several names a line, then what they hold."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where things are")[1]
    shown, package = set(), ""
    for line in _FENCE.findall(text)[0][2].splitlines():
        names = re.match(r"[\s\w/]*/(?=\s)", line)[0].split()
        if line[0] != " ":
            package = ""
        shown |= {package + name for name in names}
        package = package or names[-1]
    return shown
