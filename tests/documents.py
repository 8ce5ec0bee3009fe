"""What README.md and docs/ say, cut into parts that can be checked."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from small import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The list of files quotes their first lines, which are no examples.
_FILES = re.compile(r"<!-- files -->.*?<!-- end -->", re.DOTALL)
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")


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
    prose = _FENCE.sub("", _FILES.sub("", page.read_text(encoding="utf-8")))
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
        if words[0] in ("python", "torchrun", "accelerate", "make") and words[1:]:
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


def rooms() -> set[str]:
    """Tracked folders of the packages that hold code or options."""
    folders = {str(Path(path).parent) + "/" for path in tracked() if path.endswith((".py", ".yaml"))}
    return {f for f in folders if f.count("/") <= 2 and f.split("/")[0] in PACKAGES}


def tree() -> set[str]:
    """The folders that the tree of CONTRIBUTING.md shows."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where things are")[1]
    shown, top = set(), ""
    for line in _FENCE.findall(text)[0][2].splitlines():
        names = []
        for word in line.split():
            if not word.endswith("/"):
                break
            names.append(word)
        if line[0] != " ":
            top = names[-1]
            shown |= set(names)
        else:
            shown |= {top + name for name in names}
    return shown


def files() -> str:
    """Every module of the packages with the first line of its docstring, as a Markdown list."""
    lines = []
    for path in sorted(map(Path, tracked())):
        if path.parts[0] in PACKAGES and path.suffix == ".py" and "notebooks" not in path.parts:
            said = (ast.get_docstring(ast.parse((ROOT / path).read_text())) or "").split("\n")[0]
            if path.name not in ("__init__.py", "__main__.py"):
                lines.append(f"- `{path}`: {said}")
            elif path.name == "__init__.py":
                lines.append(f"\n**`{path.parent}/`** {said}\n")
    return "\n".join(lines).replace("\n\n\n", "\n\n").strip() + "\n"
