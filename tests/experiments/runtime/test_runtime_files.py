"""Files are whole or absent: what a killed, a slow or a refused writer leaves, and for whom."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import subprocess
import sys

import torch
from safetensors.torch import save_file

from experiments.evaluation import small_networks
from experiments.runtime.command import run_command
from experiments.runtime.files import atomic_path, atomic_write

SLOW = """
import sys
from experiments.runtime.files import atomic_path
with atomic_path(sys.argv[1]) as path:
    path.write_text("slow")
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def writer(target):
    """Another process in the middle of writing `target`; it goes on when its input ends."""
    words = [sys.executable, "-c", SLOW, str(target)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process


def test_what_a_killed_writer_left_goes_a_day_later_and_a_slow_one_is_not_disturbed(tmp_path):
    target = tmp_path / "model.safetensors"
    others = [tmp_path / name for name in (".model-raw-0a1b2c3d.tmp.safetensors", ".model-0a1b2c3d.tmp.json", ".model-x.tmp.safetensors")]  # fmt: skip
    for other in others:
        other.write_text("not this file's")
        os.utime(other, (0, 0))
    with writer(target) as killed:
        killed.kill()
    (left,) = set(tmp_path.iterdir()) - set(others)
    assert not target.exists()
    os.utime(left, (0, 0))
    with writer(target) as slow:
        atomic_write(target, "quick")
        assert target.read_text() == "quick"
        assert len(list(tmp_path.iterdir())) == 5, "the killed one's is gone, the slow one's is not"
        slow.communicate()
    assert slow.returncode == 0 and target.read_text() == "slow"
    assert sorted(tmp_path.iterdir()) == sorted([*others, target])


def test_the_umask_decides_who_may_read(tmp_path):
    before = os.umask(0o027)
    try:
        target = tmp_path / "x.safetensors"
        with atomic_path(target) as path:
            save_file({"x": torch.ones(1)}, path)  # which makes files for their owner alone
        assert target.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_cache_on_a_full_disk_is_one_sentence(tmp_path, capsys, full_disk):
    # Reported by safetensors in its own type of error.
    def splits(split):
        return torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8), torch.arange(8) % 2

    def cache(_):
        recipe = small_networks.Recipe(epochs=1)
        build = functools.partial(small_networks.SmallClassifier, 8, 2, recipe)
        plan = small_networks.NetworkPlan("digits", "classifier", 8, [], recipe, build)
        small_networks.load_or_make(tmp_path, plan, splits)

    with full_disk():
        code = run_command(cache, [])
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and "the disk is full under" in said
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"lock"}
    assert os.strerror(errno.EFBIG) not in said
