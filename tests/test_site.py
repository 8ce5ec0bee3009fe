"""The site: it builds strictly, loads nothing from outside, fits two widths; its tutorial's outputs are real."""

import html
import html.parser
import io
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.parse

import analysis_browser
import pytest
from documents import blocks
from mkdocs.exceptions import PluginError
from PIL import Image, ImageChops
from small import ROOT

DOCS = ROOT / "docs"
WIDTHS = (390, 1440)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


class Loads(html.parser.HTMLParser):
    """What a page loads by itself: links to click are another matter."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(given["href"])
        self.found += [given[key] for key in ("src", "srcset", "data", "poster") if key in given]


# --- what is built --------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_page_is_built_and_loads_nothing_from_outside(site):
    for source in DOCS.rglob("*.md"):
        assert (site / source.relative_to(DOCS).with_suffix(".html")).is_file(), source
    assert not list(site.rglob("*.py"))
    for page in site.rglob("*.html"):
        loads = Loads(page.read_text(encoding="utf-8")).found
        away = [url for url in loads if urllib.parse.urlsplit(url).scheme not in ("", "data")]
        assert away == [] and not any(url.startswith("//") for url in loads), page
        for url in loads:
            if page.name != "404.html" and not url.startswith("data:"):
                path = urllib.parse.urlsplit(url).path
                assert (page.parent / path).is_file(), (page, url)
    assert "selection=random" in (site / "keys.html").read_text(encoding="utf-8")  # the help, from its file
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import\s*)[\"']?(https?:)?//", style.read_text()), style


@analysis_browser.needed
@pytest.mark.slow
def test_browser_fits_every_page_at_two_widths_and_asks_for_files_alone(site):
    browser = analysis_browser.Browser()
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":
            continue
        browser.open(page, ready="document.readyState === 'complete'")
        for width in WIDTHS:
            browser.resize(width)
            assert browser.run("document.documentElement.scrollWidth") <= width, page
    assert browser.errors == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file", "data", "about"}
    browser.close()


# --- what it is built of -------------------------------------------------------------------------


def test_an_equation_that_cannot_be_converted_ends_the_build():
    convert = runpy.run_path(str(DOCS / "hooks.py"))["on_page_content"]
    page = r'<p><span class="arithmatex">\({}\)</span></p>'
    assert "<msub><mi>a</mi><mn>1</mn></msub>" in convert(page.format("a_1"))
    assert "<mo>&#x0003C;</mo>" in convert(page.format("a &lt; b"))
    for wrong in (r"\nosuch x", r"\begin{aligned} a &amp;= b \end{aligned}"):
        with pytest.raises(PluginError, match="cannot convert"):
            convert(page.format(wrong))


# --- the tutorial ---------------------------------------------------------------------------------

TUTORIAL = DOCS / "tutorial.md"
STEP = re.compile(r"^```bash\n(?P<command>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```$)?", re.M | re.S)
# What another machine, or another minute, prints otherwise: scores, times, speeds, hashes.
VOLATILE = re.compile(
    r"(?<=[↓↑]) +[\d.]+|(?<=[-@])[0-9a-f]{8}\b|(?<=at step )\d+|(?<=saved step )\d+|\d+(?:\.\d+)?(?= img/s| images/s)|\d+(?::\d\d)+|[-+]?\d+\.\d+(?:e[-+]?\d+)?%?(?![\w.])"
)
# Lines that a busy machine prints between others, and an idle one does not.
WAITING = re.compile(r"loading PyTorch |.*\bbatch \d+%")


def stable_lines(text):
    """The lines of an output without what varies: numbers, widths of columns, rules, waiting."""
    lines = (VOLATILE.sub("#", line) for line in text.splitlines() if not WAITING.match(line))
    return [" ".join(line.replace("─", " ").split()) for line in lines if line.strip(" ─")]


def matches(shown, printed):
    """Whether these lines were printed in this order; `...` stands for any number of lines."""
    lines = stable_lines(shown)
    pattern = "".join("(?:.*\n)*" if line == "..." else re.escape(line) + "\n" for line in lines)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in stable_lines(printed))) is not None


def shortened(shown):
    """What a page that trains for 200 steps and scores 200 samples would show of 60 steps and 100 samples."""
    shown = shown.replace("step-00000200", "step-00000060")
    shown = re.sub(r"(?<=step )200\b|(?<=/)200\b|\b200(?= steps)", "60", shown)
    return re.sub(r"\b200\b", "100", shown)


def test_shown_and_printed_output_are_compared_but_for_what_varies():
    shown = "step 50/100  loss 0.88  75 img/s  [0:10<0:53]\n ─────\n...\nrun  runs/a_s0-1184d657\n"
    printed = "step 50/100  loss 0.9131  7.5 img/s  [1:10<0:00]\nbatch 87%\nmore\nrun   runs/a_s0-00000000\n"
    assert matches(shown, printed)
    for wrong in (printed.replace("/100", "/90"), printed + "more\n", printed.replace("loss", "mass")):
        assert not matches(shown, wrong)


def renewed(shown, printed):
    """The shown lines as they were printed this time; `...` stays."""
    left, lines = printed.splitlines(), []
    for line in shown.splitlines():
        if line.strip() in ("", "...") or not stable_lines(line):
            lines.append(line)
            continue
        while stable_lines(left[0]) != stable_lines(line):
            left.pop(0)
        lines.append(left.pop(0).rstrip())
    return "".join(f"{line}\n" for line in lines)


def follow(command, folder, env):
    """Run a step through a shell, `press Ctrl-C` at the first step; return what it printed."""
    is_interrupted = "press Ctrl-C" in command
    lines = []
    with (folder / "stderr.txt").open("w+") as errors:
        process = subprocess.Popen(
            ["bash", "-ec", command], cwd=folder, env=env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT if is_interrupted else errors,
        )  # fmt: skip
        with process:
            for line in process.stdout:
                lines.append(line)
                if is_interrupted and re.match(r"step [1-9]", line):
                    os.killpg(process.pid, signal.SIGINT)
                    is_interrupted = False
        errors.seek(0)
        expected = 130 if "press Ctrl-C" in command else 0
        assert process.returncode == expected, f"{command}\n{''.join(lines)}{errors.read()}"
    return "".join(lines)


@pytest.mark.slow
def test_the_tutorials_commands_print_what_it_shows(tmp_path):
    """From a folder like a checkout's, through a shell; REGENERATE=1 writes today's outputs and figure into the page."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    regenerate = bool(os.environ.get("REGENERATE"))
    text = TUTORIAL.read_text(encoding="utf-8")
    steps = list(STEP.finditer(text))
    assert len(steps) == len(blocks(TUTORIAL, "bash", "sh")) > 5
    assert sum(bool(step["shown"]) for step in steps) == len(blocks(TUTORIAL, "text"))
    for step in steps:
        command, shown = step["command"], step["shown"] or "..."
        if not regenerate:
            command = command.replace("experiment=short", "experiment=short train.steps=60 eval.samples=100")
            shown = shortened(shown)
        printed = follow(command, tmp_path, env)
        if regenerate:
            text = text.replace(shown, renewed(shown, printed)) if step["shown"] else text
        else:
            assert matches(shown, printed), f"{command}\n{printed}"
    # The files that the page sends its reader to.
    names = re.findall(r"`((?:runs|guided)/[^`]+)`", text)
    assert names and all(list(tmp_path.glob(name)) for name in names), names
    if regenerate:
        TUTORIAL.write_text(text, encoding="utf-8")
        shutil.copy(tmp_path / "runs" / "figures" / "similarity.png", DOCS / "img" / "tutorial_similarity.png")


# --- pictures -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_committed_pictures_are_those_that_make_docs_draws(monkeypatch):
    """`make docs` must leave the working tree clean: the same pixels, whoever draws them."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script sets its first entry
    drawn = runpy.run_path(str(DOCS / "pictures.py"))["pictures"]()
    assert set(drawn) == {"scans.png", "selections.png", "tread.png", "tread.svg"}
    for name, (content, _) in drawn.items():
        committed = (DOCS / "img" / name).read_bytes()
        if name.endswith(".png"):  # zlib's bytes may differ between builds, pixels may not
            new, old = (Image.open(io.BytesIO(data)).convert("RGB") for data in (content, committed))
            assert new.size == old.size, name
            assert ImageChops.difference(new, old).getbbox() is None, name
        else:
            assert content == committed, name
