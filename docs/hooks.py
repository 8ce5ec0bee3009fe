"""Build hooks of mkdocs.yml: equations as MathML (no script needed) and the configuration keys."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

from experiments.config import names
from experiments.config.help import help_text

ROOT = Path(__file__).resolve().parents[1]
# Output of pymdownx.arithmatex for $...$ and $$...$$.
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page by `--help` and the keys of a group."""
    markdown = markdown.replace("<!-- help -->", f"```text\n{_help()}\n```")
    return re.sub(r"<!-- group (\w+) -->", lambda match: _group(match[1]), markdown)


def on_page_content(text: str, **_: Any) -> str:
    """Write each equation as MathML."""
    return EQUATION.sub(_mathml, text)


def _mathml(match: re.Match[str]) -> str:
    tag, bracket, tex = match.groups()
    display = "block" if bracket == "[" else "inline"
    tex = html.unescape(tex).strip()
    mathml = convert(tex, display=display)
    # The converter renders unknown commands as letters.
    if "\\" in mathml or ">&<" in mathml:
        raise PluginError(f"latex2mathml cannot convert {tex}; write it with other commands")
    return f'<{tag} class="equation">{mathml}</{tag}>'


def _help() -> str:
    return (ROOT / "docs" / "help.txt").read_text(encoding="utf-8").strip()


def _group(name: str) -> str:
    sections = []
    for entry in names(name):
        keys = help_text(f"{name}={entry}").partition("\n")[2].rstrip()
        sections.append(f"### `{name}={entry}`\n\n```text\n{keys}\n```")
    return "\n\n".join(sections)
