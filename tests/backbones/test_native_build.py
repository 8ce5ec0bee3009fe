"""The build of the C++ kernels: under kills, by many processes, damaged, and without a compiler."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from small import ROOT

from backbones.ops import native
from routing.errors import UserError

compiled = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
LOAD = (
    "import torch; torch.set_num_threads(1); from backbones.ops import native;"
    "print((native.library(), native.OPERATIONS['cpu'].gelu(torch.ones(3)).tolist())[1], native.library()[0])"
)
ONES = "[0.8411920070648193, 0.8411920070648193, 0.8411920070648193]"


def start(folder, **changes):
    env = os.environ | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | changes
    command = [sys.executable, "-W", "ignore", "-c", LOAD]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out.strip(), err.strip()


@pytest.mark.slow
@compiled
def test_many_processes_build_once_and_a_killed_build_leaves_nothing(tmp_path):
    compiler, slow = tmp_path / "c++", tmp_path / "slow"
    # While `slow` is there, this compiler stops after half a library.
    compiler.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && exec {shutil.which('c++')} --version\n"
        f"echo built >> {tmp_path}/log\nfor out; do :; done\n"
        f'if [ -e {slow} ]; then echo half > $out; sleep 600; fi\nexec {shutil.which("c++")} "$@"\n'
    )
    compiler.chmod(0o755)
    cache = tmp_path / "tread-suite" / "native"
    slow.touch()
    victim = start(tmp_path, CXX=str(compiler))
    until = time.monotonic() + 120
    while not any(f.read_text() for f in cache.glob("*.tmp/*.o")):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    slow.unlink()
    assert not list(cache.glob("*.so"))
    (tmp_path / "log").unlink()
    processes = [start(tmp_path, CXX=str(compiler)) for _ in range(3)]
    for process in processes:
        assert finish(process) == (f"{ONES} True", "")
    assert (tmp_path / "log").read_text() == 3 * "built\n"  # two sources and a library
    assert len(list(cache.glob("*.so"))) == 1 and not list(cache.glob("*.tmp"))


@pytest.mark.parametrize(
    ("library", "record", "builds"),
    [
        (b"library", None, 1),  # as it was built
        (b"libr", None, 2),
        (b"libraRy", None, 2),
        (b"library", "", 2),
        (b"library", "[]", 2),
    ],
)
def test_a_library_is_loaded_only_as_it_was_built(tmp_path, monkeypatch, library, record, builds):
    """Loading a truncated one would end the process with SIGBUS."""
    count = []

    def compile_(compiler, folder):
        count.append(compiler)
        built = folder / "library.so"
        built.write_bytes(b"library")
        return built

    monkeypatch.setattr(native, "_compile", compile_)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = native._built("c++", "12")
    record_path = path.with_suffix(".json")
    path.write_bytes(library)
    if record is not None:
        record_path.write_text(record)
    assert native._built("c++", "12") == path and len(count) == builds
    assert path.read_bytes() == b"library" and native._matches(path, record_path)
    assert native._built("c++", "13") != path  # another compiler


@pytest.mark.parametrize(
    ("target", "change", "builds"),
    [
        ("library", {"mode": 0o755}, 1),
        ("library", {"mode": 0o775}, 2),
        ("library", {"mode": 0o757}, 2),
        ("library", {"link": True}, 2),
        ("folder", {"mode": 0o770}, None),
        ("folder", {"mode": 0o1777}, None),
        ("folder", {"link": True}, None),
        ("library", {"owner": 12345}, 2),
        ("folder", {"owner": 12345}, None),
    ],
)
def test_a_cache_that_somebody_else_could_have_written_is_not_loaded(target, change, builds, tmp_path, monkeypatch):
    count = []

    def compile_(compiler, folder):
        count.append(compiler)
        (folder / "library.so").write_bytes(b"library")
        return folder / "library.so"

    monkeypatch.setattr(native, "_compile", compile_)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0o002)
    try:
        library = native._built("c++", "12")
        assert native._built("c++", "12") == library and len(count) == 1  # a common umask of groups
    finally:
        os.umask(before)
    path = library if target == "library" else library.parent
    if "mode" in change:
        path.chmod(change["mode"])
    elif "owner" in change:
        if os.getuid():
            pytest.skip("only root gives files away")
        os.chown(path, change["owner"], -1)
    else:
        path.rename(tmp_path / "theirs")
        path.symlink_to(tmp_path / "theirs")
    if builds is None:
        with pytest.raises(OSError, match="belongs to somebody else, or others may write to it"):
            native._built("c++", "12")
        return
    assert native._built("c++", "12") == library and len(count) == builds
    assert not library.is_symlink() and library.stat().st_uid == os.getuid()


def test_a_build_in_the_background_reports_its_begin_and_its_end(monkeypatch):
    lines = []

    def load():
        with native._elapsed_time(every=0.01):
            time.sleep(0.1)
        return False, "built nothing"

    monkeypatch.setattr(native, "_load", load)
    monkeypatch.setattr(native, "ACTIVE", native.Implementations())
    monkeypatch.setattr(native, "REPORT", native.REPORT)
    native.start_build(lines.append).join()
    task = "building the CPU kernels, once for this machine"
    assert lines[:2] == [f"{task} ...", f"{task}: 0 s"] and lines[-1] == "built the CPU kernels in 0 s"
    assert native.start_build(lines.append) is None  # once is enough


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"PATH": "/nowhere", "CXX": ""}, "no C++ compiler found (c++, g++, clang++)"),
        ({"TREAD_NATIVE": "0"}, ""),
    ],
)
def test_without_a_library_torch_runs_and_one_line_says_so(tmp_path, changes, warning):
    out, err = finish(start(tmp_path, **changes))
    assert out.endswith("False")
    assert len(err.splitlines()) == bool(warning) and warning in err, err


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv("TREAD_NATIVE", "off")
    with pytest.raises(UserError, match="TREAD_NATIVE=off.*expected 0 or 1"):
        native._load()


def test_a_compiler_that_fails_is_a_warning(tmp_path, monkeypatch, caplog):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'native.cpp: error: no such header' >&2; exit 1; }\n")
    compiler.chmod(0o755)
    monkeypatch.delenv("TREAD_NATIVE", raising=False)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not native._load()[0]
    assert "cannot build them: native.cpp: error: no such header: CPU kernels run as plain torch" in caplog.text
