"""One writer for a folder: the lock excludes, names its holder, and dies with it."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock
from small import ROOT

from experiments.runtime import locks
from experiments.runtime.locks import LockedError, is_locked, locked


def test_two_writers_are_refused_and_the_lock_of_a_killed_process_is_not_held(tmp_path):
    assert not is_locked(tmp_path)
    code = (
        "import time; from experiments.runtime.locks import locked; from pathlib import Path\n"
        f"with locked(Path({str(tmp_path)!r})): print('in', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "in\n" and is_locked(tmp_path)
    with pytest.raises(LockedError, match=f"process {holder.pid} on "), locked(tmp_path, wait_s=0.1):
        pass
    holder.kill()
    holder.communicate()
    for _ in range(2):
        with locked(tmp_path, wait_s=5):
            assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_look_at_the_lock_is_not_another_writer(tmp_path, monkeypatch):
    """What `is_locked` holds for a moment is free when a writer asks again."""
    look = FileLock(tmp_path / "lock")
    look.acquire()
    monkeypatch.setattr(time, "sleep", lambda _: look.release())
    with locked(tmp_path):
        assert not look.is_locked and is_locked(tmp_path)


def test_a_colleagues_lock_is_looked_at_without_the_right_to_write(tmp_path, monkeypatch):
    opened, plain = [], Path.open

    def open_(path, mode="r", **other):
        opened.append(mode)
        return plain(path, mode, **other)

    with locked(tmp_path):
        monkeypatch.setattr(Path, "open", open_)
        assert is_locked(tmp_path) and opened == ["rb"]
    assert (tmp_path / "lock").is_file() and not is_locked(tmp_path)


def test_without_flock_a_lock_is_looked_at_by_taking_it(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)  # as on Windows
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_file_system_without_locks_is_not_another_process(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LockedError, match="cannot be locked .*flock$"), locked(tmp_path):
        pass
