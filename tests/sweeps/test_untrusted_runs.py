"""A folder of runs from somebody else: what is in it is not executed; what is ours stays private."""

import os
from pathlib import Path

import pytest
from slurm_lab import STUB, Launcher, until, use_stubs

from sweeps import NothingSubmitted
from sweeps.jobs.snapshot import PACKAGES, SnapshotWarning
from sweeps.jobs.snapshot import snapshot as take_snapshot
from sweeps.store.folder import JobBatch, Sweep


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    monkeypatch.syspath_prepend(str(STUB))
    use_stubs(monkeypatch)


@pytest.fixture
def shop(tmp_path, capsys):
    return Launcher(tmp_path, capsys)


@pytest.fixture
def suite(tmp_path):
    """A folder with the packages of the suite, of a file each."""
    root = tmp_path / "suite"
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "errors.py").write_text(f"# {package}\n")
    return root


def plant(snapshot, how, elsewhere):
    """Change a copy of the code as somebody could who hands on a folder of runs."""
    source = snapshot / "sweeps" / "errors.py"
    if how == "edited":
        source.write_text(source.read_text() + "\nprint('planted')\n")
    elif how == "shadow":
        (snapshot / "numpy.py").write_text("print('planted')\n")
    elif how == "hidden":
        (snapshot / "routing" / ".x.so").write_bytes(b"planted")
    elif how == "removed":
        (snapshot / "routing" / "errors.py").unlink()
    elif how == "linked file":
        (elsewhere / "job.py").write_text(source.read_text())
        source.unlink()
        source.symlink_to(elsewhere / "job.py")
    elif how == "linked":
        snapshot.rename(elsewhere / "copy")
        snapshot.symlink_to(elsewhere / "copy")
    else:
        raise ValueError(how)


CHANGES = ["edited", "shadow", "hidden", "removed", "linked file", "linked"]


@pytest.mark.parametrize("how", CHANGES)
def test_a_copy_of_the_code_that_was_changed_is_copied_again(how, tmp_path, suite):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    snapshot = take_snapshot(tmp_path / "code", suite)
    before = {p.relative_to(snapshot): p.read_bytes() for p in snapshot.rglob("*") if p.is_file()}
    plant(snapshot, how, elsewhere)
    with pytest.warns(SnapshotWarning, match="was changed after it was copied"):
        assert take_snapshot(tmp_path / "code", suite) == snapshot
    assert not snapshot.is_symlink() and not any(p.is_symlink() for p in snapshot.rglob("*"))
    after = {p.relative_to(snapshot): p.read_bytes() for p in snapshot.rglob("*") if p.is_file()}
    before.pop(Path("snapshot.json")), after.pop(Path("snapshot.json"))
    assert after == before
    assert [path.name for path in (tmp_path / "code").iterdir()] == [snapshot.name]


def test_a_link_in_the_place_of_a_copy_is_removed_and_what_it_leads_to_is_kept(tmp_path, suite):
    snapshot = take_snapshot(tmp_path / "code", suite)
    snapshot.rename(tmp_path / "theirs")
    (tmp_path / "theirs" / "sweeps" / "__pycache__").mkdir()
    snapshot.symlink_to(tmp_path / "theirs")
    with pytest.warns(SnapshotWarning):
        assert take_snapshot(tmp_path / "code", suite) == snapshot
    assert not snapshot.is_symlink() and (tmp_path / "theirs" / "sweeps" / "__pycache__").is_dir()


def test_a_folder_of_logs_that_cannot_be_made_is_said_before_anything_is_noted(shop):
    shop("launch", "cluster=debug", "seed=0")
    shop.sweep.logs.rename(shop.folder / "logs")
    shop.sweep.logs.symlink_to(shop.folder / "nowhere" / "logs")
    text = shop("launch", "cluster=local", "seed=1", code=2)
    assert f"error: {shop.sweep.logs} cannot be used" in text and len(shop.sweep.batches()) == 1


def test_compiled_code_in_a_copy_is_removed_before_it_is_used(tmp_path, suite):
    """Python runs a .pyc whose source has the noted time and size, whatever is in it."""
    snapshot = take_snapshot(tmp_path / "code", suite)
    for folder in (snapshot, snapshot / "sweeps"):
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "job.cpython-311.pyc").write_bytes(b"planted")
    assert take_snapshot(tmp_path / "code", suite) == snapshot
    assert not list(snapshot.rglob("__pycache__"))


def test_a_link_in_the_place_of_a_copy_that_is_being_made_is_not_written_through(tmp_path, suite):
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / ".building").symlink_to(target)
    snapshot = take_snapshot(tmp_path / "code", suite)
    assert not snapshot.is_symlink() and not list(target.iterdir())


def test_a_retry_runs_the_code_of_this_suite_not_what_was_planted(shop):
    shop.stub({"sleep": 0}, seed0={"fail": 3})
    shop("launch", "cluster=local", "seed=0")
    until(lambda: shop.states() == {0: "failed"}, what="a failure")
    (snapshot,) = (shop.runs / ".sweeps" / "code").glob("[!.]*")
    mark = shop.folder / "planted"
    with (snapshot / "sweeps" / "jobs" / "job.py").open("a") as file:
        file.write(f"\nopen({str(mark)!r}, 'w')\n")
    shop.stub({"sleep": 0})
    with pytest.warns(SnapshotWarning):
        shop("retry", "cluster=local")
    until(lambda: "done" in shop.states().values(), what="a run")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("resources", "mode"),
    [({"extra": {"gres": "gpu:1"}}, 0o644), ({"setup": ["export TOKEN=x"]}, 0o600),
     ({"extra": {"export": "ALL,TOKEN=x"}}, 0o600)],
)  # fmt: skip
def test_what_may_hold_secrets_is_for_its_owner_alone(resources, mode, tmp_path):
    before = os.umask(0o022)
    try:
        sweep = Sweep(tmp_path, "g")
        sweep.intend(JobBatch("b0", "slurm", "slurm", ["r"], 1.0, "c"))
        assert (sweep.path / "batches.jsonl").stat().st_mode & 0o777 == 0o644
        sweep.intend(JobBatch("b1", "slurm", "slurm", ["r"], 1.0, "c", resources))
        file = sweep.path / "batches.jsonl"
        assert file.stat().st_mode & 0o777 == mode and len(sweep.batches()) == 2
        # A refusal takes its line back, and leaves the mode.
        with pytest.raises(NothingSubmitted), sweep.undo_if_refused():
            sweep.intend(JobBatch("b2", "slurm", "slurm", ["r"], 1.0, "c", resources))
            raise NothingSubmitted("refused")
        assert file.stat().st_mode & 0o777 == mode and len(sweep.batches()) == 2
    finally:
        os.umask(before)
