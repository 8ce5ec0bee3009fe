"""A folder of runs from somebody else: what is in it is not executed; what is ours stays private."""

import os

import pytest
from slurm_lab import until

from sweeps import NothingSubmitted
from sweeps.jobs.snapshot import PACKAGES, SnapshotWarning
from sweeps.jobs.snapshot import snapshot as take_snapshot
from sweeps.store.folder import JobBatch, Sweep


@pytest.fixture
def suite(tmp_path):
    """A folder with the packages of the suite, of a file each."""
    root = tmp_path / "suite"
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "errors.py").write_text(f"# {package}\n")
    yield root
    for package in PACKAGES:
        (root / package).chmod(0o755)


def edit(snapshot):
    with (snapshot / "sweeps" / "errors.py").open("a") as file:
        file.write("print('planted')\n")


def add(snapshot):
    (snapshot / "routing" / ".x.so").write_bytes(b"planted")


def remove(snapshot):
    (snapshot / "routing" / "errors.py").unlink()


def link(snapshot):
    snapshot.rename(snapshot.parent.parent / "theirs")
    snapshot.symlink_to(snapshot.parent.parent / "theirs")


@pytest.mark.parametrize("change", [edit, add, remove, link])
def test_a_copy_of_the_code_that_was_changed_is_copied_again(change, tmp_path, suite):
    snapshot = take_snapshot(tmp_path / "code", suite)
    before = {p.relative_to(snapshot): p.read_bytes() for p in snapshot.rglob("*.py")}
    change(snapshot)
    with pytest.warns(SnapshotWarning, match="was changed after it was copied"):
        assert take_snapshot(tmp_path / "code", suite) == snapshot
    assert not snapshot.is_symlink()
    after = [p for p in snapshot.rglob("*") if p.is_file() and p.name != "snapshot.json"]
    assert {p.relative_to(snapshot): p.read_bytes() for p in after} == before
    assert [path.name for path in (tmp_path / "code").iterdir()] == [snapshot.name]
    # What a link leads to is left alone.
    assert change is not link or (tmp_path / "theirs" / "snapshot.json").is_file()


def test_a_link_in_the_place_of_an_unfinished_copy_is_not_written_through(tmp_path, suite):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / ".building").symlink_to(tmp_path / "elsewhere")
    assert not take_snapshot(tmp_path / "code", suite).is_symlink()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_compiled_code_in_a_copy_is_removed_before_it_is_used(tmp_path, suite):
    """Python runs a .pyc whose source has the noted time and size, whatever is in it."""
    snapshot = take_snapshot(tmp_path / "code", suite)
    for folder in (snapshot, snapshot / "sweeps"):
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "job.cpython-311.pyc").write_bytes(b"planted")
    assert take_snapshot(tmp_path / "code", suite) == snapshot
    assert not list(snapshot.rglob("__pycache__"))


def test_a_copy_of_a_read_only_installation_can_be_removed_and_a_part_is_made_anew(tmp_path, suite):
    for package in PACKAGES:
        (suite / package).chmod(0o555)
    snapshot = take_snapshot(tmp_path / "code", suite)
    assert all(path.stat().st_mode & 0o200 for path in snapshot.rglob("*"))
    (snapshot / "snapshot.json").unlink()
    assert take_snapshot(tmp_path / "code", suite) == snapshot
    assert (snapshot / "snapshot.json").is_file() and len([*(tmp_path / "code").iterdir()]) == 1


def test_a_retry_runs_the_code_of_this_suite_not_what_was_planted(cli):
    cli.stub({"sleep": 0}, seed0={"fail": 3})
    cli("launch", "cluster=local", "seed=0")
    until(lambda: cli.states() == {0: "failed"}, what="a failure")
    (snapshot,) = (cli.runs / ".sweeps" / "code").glob("[!.]*")
    mark = cli.folder / "planted"
    with (snapshot / "sweeps" / "jobs" / "job.py").open("a") as file:
        file.write(f"\nopen({str(mark)!r}, 'w')\n")
    cli.stub({"sleep": 0})
    with pytest.warns(SnapshotWarning):
        cli("retry", "cluster=local")
    until(lambda: "done" in cli.states().values(), what="a run")
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
