"""Names that others chose: members of tars stay inside, markup stays text, no shell reads a value."""

from __future__ import annotations

import html
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
from html.parser import HTMLParser

import pytest
from analysis_runs import write
from data_tools import add, latents, npy, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_lab import until

from analysis import report
from analysis.report_sections import runs_table
from analysis.results import Results
from analysis.tables import render
from analysis.tables.table import Column, Entry, Row, Table
from experiments import prepare
from experiments.data.latent_store import open_store
from routing.errors import UserError
from sweeps import command as sweeps_command
from sweeps.jobs import sbatch_script
from sweeps.plan import resources
from sweeps.store.folder import Sweep

# --- tars -----------------------------------------------------------------------------------------------



def tree(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["../0.latent.npy", "/tmp/0.latent.npy", "a/../../0.latent.npy", "//0.latent.npy"])
def test_members_that_point_outside_are_refused(name, form, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    content = npy(latents(1, side=2)[0])
    with tarfile.open(folder / "a.tar", "w", format=form) as archive:
        add(archive, name, content)
    with pytest.raises(UserError, match="points outside"):
        open_store(folder)
    assert tree(tmp_path) == ["data", "data/a.tar"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(kind, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(npy(latents(1, side=2)[0]))
    link = tarfile.TarInfo("1.latent.npy")
    link.type, link.linkname = kind, str(secret)
    with tarfile.open(folder / "a.tar", "w") as archive:
        add(archive, "0.latent.npy", npy(latents(1, side=2)[0]))
        archive.addfile(link)
    with pytest.raises(UserError, match="link|outside"):
        open_store(folder)
    assert tree(tmp_path) == ["data", "data/a.tar", "secret"]


def test_pictures_in_tars_cannot_leave_either(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as archive:
        add(archive, "../0.png", b"\x89PNG")
    assert prepare.main([str(folder), str(tmp_path / "out"), "--size", "64"]) == 2
    assert not [p for p in tree(tmp_path) if p.endswith("0.png")]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_a_manifest_names_files_of_its_own_folder_only(name, tmp_path):
    folder = write_store(tmp_path / "data", latents(6, side=2))
    (folder / "shard-00000.safetensors").rename(tmp_path / "outside.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["file"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="damaged|cannot be read|no safetensors file"):
        open_store(folder)


# --- HTML, LaTeX, Markdown, CSV -------------------------------------------------------------------------

HOSTILE = (
    "<script>alert(1)</script> & 100% \\input{/etc/passwd} $x_1^2$ #1 ~ {a} \"q\" 'r' <img src=x onerror=alert(1)>"
)
AS_FILE = HOSTILE.replace("/", "|")  # a folder's name holds everything else


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        for route in ("none", "2-8"):
            run = write(root, "dit", route, seed, experiment=HOSTILE, samples=not seed, evaluations=2)
            named = run.with_name(f"{AS_FILE}{route}{seed}")
            run.rename(named)
            summary = json.loads((named / "summary.json").read_text())
            (named / "summary.json").write_text(json.dumps(summary | {"name": named.name, "data": HOSTILE}))
            (named / "env.json").write_text(json.dumps({"device": HOSTILE, "python": HOSTILE}))
    broken = write(root, "dit", "none", 7)
    (broken / "config.yaml").write_text("[")
    broken.rename(broken.with_name(f"{AS_FILE}broken"))
    return Results.of(root)


@pytest.mark.slow
def test_the_report_holds_names_as_text_alone(study, tmp_path):
    text = report.write(study, tmp_path / "report.html", title=HOSTILE).read_text()
    for name in (HOSTILE, AS_FILE):
        assert name not in text
        assert html.escape(name, quote=False)[:40] in text

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attributes):
            assert not any(key.startswith("on") for key, _ in attributes)
            assert ("src", "x") not in attributes

    Tags().feed(text)
    # Data for the page's own script stand in no second script that a name could close.
    assert text.count("<script") == text.count("</script>")
    assert "<script>alert" not in text


def hostile_table():
    columns = (Column(HOSTILE, numeric=False), Column("b", numeric=False))
    rows = (Row(HOSTILE, (Entry(HOSTILE), Entry("=cmd|'/c calc'!A1"))),)
    return Table("safe", HOSTILE, columns, rows, (HOSTILE,))


# What stands for one character: an escaped one, a named text command, a single symbol of mathematics.
_COMMANDS = re.compile(r"\\[&%$#_{}]|\\text[a-z]+\{\}|\\dots\{\}|\{\\`\{\}\}|\$(?:-|\^?\\[a-zA-Z]+)\$")


def specials_left(text):
    """Return the characters with a meaning in LaTeX that stand unescaped."""
    return re.findall(r"[\\&%$#_{}~^]", _COMMANDS.sub("", text))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("\\{}&%$#_^~\n\r")), max_size=40))
def test_nothing_with_a_meaning_is_left_in_latex(text):
    escaped = render.latex_escape(text)
    assert specials_left(escaped) == [] and escaped.isascii() and "\n" not in escaped


def test_tables_are_escaped_in_every_format(study):
    for table in (hostile_table(), runs_table(study)):
        tex = render.latex(table)
        assert "\\input" not in tex and "textless{}script" in tex
        assert "$x_1" not in tex and " & 100%" not in tex and "\\%" in tex
        page = render.to_html(table)
        assert "<script>" not in page and "<img" not in page
        mark = render.markdown(table)
        assert not re.search(r"(?<!\\)<(script|img)", mark)
    sheet = render.to_csv(hostile_table())
    assert not re.search(r'(^|,)"?[=+@-]cmd', sheet)


# --- shells ---------------------------------------------------------------------------------------------

VALUES = [
    "a;touch marker", "$(touch marker)", "`touch marker`", "a && touch marker", "a|touch marker", "> marker", "$HOME", "'; touch marker #",
    "a\ntouch marker", "*", "~", "%s %d {0}", "\\", "!!", "a b  c",
]  # fmt: skip

PROBE = """
import json, os, pathlib
def main(words):
    folder = pathlib.Path(os.environ["PROBE_OUT"])
    folder.mkdir(exist_ok=True)
    (folder / f"{os.getpid()}-{len(list(folder.iterdir()))}.json").write_text(json.dumps(words))
    return 0
"""


def test_values_arrive_verbatim(tmp_path, monkeypatch):
    (tmp_path / "probe_entry.py").write_text(PROBE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PROBE_OUT", str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    grid = tmp_path / "shell.py"
    grid.write_text(f'commands = {{"probe": "probe_entry:main"}}\ncommand, args, seeds = "probe", {VALUES!r}, [0]\n')
    words = ["launch", str(grid), "cluster=local", f"paths.runs={tmp_path / 'runs'}"]
    assert sweeps_command.main(words) == 0
    until(lambda: len(list((tmp_path / "out").glob("*.json"))) == 1, what="the command")
    (arrived,) = (json.loads(p.read_text()) for p in (tmp_path / "out").glob("*.json"))
    assert arrived[: len(VALUES)] == VALUES
    assert not list(tmp_path.rglob("marker"))


@pytest.mark.parametrize("name", ["a;touch marker", "$(touch marker)", "a' 'b"])
def test_the_batch_script_runs_none_of_a_name(name, tmp_path):
    """The script that sbatch gets, run by a real shell with a stand-in for srun."""
    for program in ("srun", "scontrol"):
        stand_in = tmp_path / program
        save_words = f"open({str(tmp_path / 'argv')!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')"
        stand_in.write_text(f"#!{sys.executable}\nimport sys, json\n{save_words}\n")
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    place = resources.load("slurm", "tiny", {"account": "a"})
    sweep = Sweep(tmp_path / name, "g")
    text = sbatch_script.script(sweep, place, 2, tmp_path / name / "code")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("marker"))
    words = [json.loads(line) for line in (tmp_path / "argv").read_text().splitlines()]
    assert any(str(sweep.logs) in words_of_one for words_of_one in words), words


@pytest.mark.parametrize(("key", "value"), [("partition", "a;touch marker"), ("constraint", "a\n#SBATCH --wrap=x"), ("exclude", "a'b")])
def test_resources_take_no_characters_of_a_shell(key, value):
    with pytest.raises(UserError, match="characters"):
        resources.load("slurm", "tiny", {key: value})
