"""What README.md and docs/ say, cut into parts that can be checked."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from small import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"(\.?[\w*-]+/|\.?[\w*-]+(\.[\w-]+)+|\.\w+|Makefile|LICENSE)")


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks of some languages, without their indent."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [
        re.sub(rf"^{indent}", "", text, flags=re.M)
        for indent, name, text in found
        if name in languages
    ]


def spans(page: Path) -> list[str]:
    """Inline code outside of fenced blocks, line breaks inside taken out."""
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def lines(page: Path) -> list[str]:
    """Every line of shell, comments and continuations resolved, and every inline command."""
    found = []
    for block in blocks(page, "bash", "sh"):
        found += [re.sub(r"\s+#.*", "", line) for line in block.replace("\\\n", " ").splitlines()]
    return [line.strip() for line in [*found, *spans(page)] if line.strip()]


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `python ...`, `torchrun ...` and `make ...` on a page."""
    for line in lines(page):
        words = line.split()
        if words[0] in ("python", "torchrun", "accelerate", "make"):
            yield shlex.split(line)


def tracked() -> list[str]:
    """Paths of all files under version control."""
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def children(folder: str) -> set[str]:
    """Tracked entries of a folder ("" is the root); subfolders end in a slash."""
    inside = [path.removeprefix(folder) for path in tracked() if path.startswith(folder)]
    return {path.split("/")[0] + "/" if "/" in path else path for path in inside}


def tree() -> dict[str, list[str]]:
    """The README's tree: folder -> entries that it shows there; a folder without any is not opened."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Where things are")[1]
    shown: dict[str, list[str]] = {"": []}
    where = ""
    for line in _FENCE.findall(text)[0][2].splitlines():
        names = []
        for word in line.split():
            if not _NAME.fullmatch(word):
                break
            names.append(word)
        if line[0] != " ":
            where = names[-1]
            shown[""] += names
        else:
            shown.setdefault(where, []).extend(names)
    return shown
