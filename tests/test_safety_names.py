"""Names that others chose: members of tars stay inside, nothing is left with a meaning in LaTeX, no shell reads a value."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import subprocess
import sys
import tarfile

import pytest
import yaml
from data_tools import add, latents, npy, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_lab import until

from analysis.tables import render
from experiments.data.import_latents import latent_rows
from experiments.data.latent_store import open_store
from routing.errors import UserError
from sweeps import command as sweeps_command
from sweeps.jobs import sbatch_script
from sweeps.plan import grid, resources
from sweeps.store.folder import Sweep

# --- tars -----------------------------------------------------------------------------------------------

OUTSIDE = ("../0.latent.npy", "/tmp/0.latent.npy", "a/../../0.latent.npy", "//0.latent.npy")
LINKS = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, tarfile.REGTYPE) for name in OUTSIDE), *(("1.latent.npy", kind) for kind in LINKS)]
)
def test_members_that_lead_outside_are_refused(name, kind, tmp_path):
    folder, secret, sample = tmp_path / "data", tmp_path / "secret", npy(latents(1, side=2)[0])
    folder.mkdir()
    secret.write_bytes(sample)
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, str(secret)
    member.size = len(sample) if kind == tarfile.REGTYPE else 0
    with tarfile.open(folder / "a.tar", "w") as archive:
        add(archive, "0.latent.npy", sample)
        archive.addfile(member, io.BytesIO(sample))
    with pytest.raises(UserError, match="is a link or points outside"):
        list(latent_rows(folder, "*"))
    assert sorted(tmp_path.rglob("*")) == [folder, folder / "a.tar", secret]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_a_manifest_names_files_of_its_own_folder_only(name, tmp_path):
    folder = write_store(tmp_path / "data", latents(6, side=2))
    (folder / "shard-00000.safetensors").rename(tmp_path / "outside.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["file"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="damaged|cannot be read|no safetensors file"):
        open_store(folder)


# --- LaTeX ---------------------------------------------------------------------------------------------

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


# --- shells ---------------------------------------------------------------------------------------------

VALUES = [
    "a;touch marker", "$(touch marker)", "`touch marker`", "a && touch marker", "a|touch marker", "> marker", "$HOME", "'; touch marker #",
    "a\ntouch marker", "*", "~", "%s %d {0}", "\\", "!!", "a b  c",
]  # fmt: skip

PROBE = """
import json, os, pathlib
def main(words):
    pathlib.Path(os.environ["PROBE_OUT"]).write_text(json.dumps(words))
    return 0
"""


def test_values_arrive_verbatim(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    (tmp_path / "probe_entry.py").write_text(PROBE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PROBE_OUT", str(out))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(grid.ENTRIES, "probe", "probe_entry:main")
    path = tmp_path / "shell.yaml"
    path.write_text(yaml.safe_dump({"command": "probe", "args": VALUES, "seeds": [0]}))
    assert sweeps_command.main(["launch", str(path), "cluster=local", f"paths.runs={tmp_path / 'runs'}"]) == 0
    until(lambda: out.exists() and out.read_text(), what="the command")
    assert json.loads(out.read_text())[: len(VALUES)] == VALUES
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
    text = sbatch_script.script(sweep, place, 2)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("marker"))
    words = [json.loads(line) for line in (tmp_path / "argv").read_text().splitlines()]
    assert any(str(sweep.launches / "LAUNCH") in words_of_one for words_of_one in words), words
