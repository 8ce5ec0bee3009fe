"""A folder of runs from somebody else: what is in it is not executed; what is ours stays private."""

import json
import re
import shlex

import pytest
from slurm_lab import make_run, until

from sweeps import command as sweeps_command
from sweeps.jobs.snapshot import PACKAGES, SnapshotWarning
from sweeps.jobs.snapshot import snapshot as take_snapshot
from sweeps.plan import resources
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
        cli("launch", "cluster=local", "seed=0", "--retry")
    until(lambda: "done" in cli.states().values(), what="a run")
    assert not mark.exists()


def test_what_may_hold_secrets_or_run_code_is_not_stored(tmp_path):
    sweep, values = Sweep(tmp_path, "g"), {"extra": "{export: 'TOKEN=secret'}", "setup": "[export TOKEN=secret]"}
    place = resources.load("slurm", overrides=values | {"python": "env TOKEN=secret python", "srun": "[--secret]"})
    sweep.intend(JobBatch.create("g", [make_run(tmp_path)], place, "c"))
    sweep.add("G", [make_run(tmp_path, args=["a=1"])])
    stored = {file.name: file.read_text() for file in sweep.path.iterdir()}
    assert set(stored) == {"sweep.json", "batches.jsonl"} and "secret" not in "".join(stored.values())
    assert not {"entry", "args", "cluster"} & set(json.loads(stored["sweep.json"])["runs"]["r"])


# --- what is stored of a launch ---------------------------------------------------------------------------------


def stored(sweep):
    return json.loads((sweep.path / "sweep.json").read_text())


def plant(sweep, **changes):
    """Change what is stored of a sweep, as somebody else may have done; None removes a key."""
    content = stored(sweep) | changes
    (sweep.path / "sweep.json").write_text(json.dumps(content))


def retry_words(text):
    """Return the words of the command that status printed, without the interpreter's."""
    (line,) = [line for line in text.splitlines() if line.endswith("--retry")]
    assert line.startswith("python -m sweeps launch ")
    return shlex.split(line)[3:]


@pytest.mark.parametrize("version", [1, 2])
def test_nothing_stored_is_executed(version, cli, capsys):
    """A file of the first format had the module and the arguments of every run."""
    cli.stub({"sleep": 0}, seed0={"fail": 3})
    cli("launch", "cluster=debug", code=1)
    mark = cli.folder / "planted"
    words = {"entry": "os:system", "args": [f"touch {mark}", "route=none", "seed=0"]}
    runs = {name: run | words for name, run in stored(cli.sweep)["runs"].items()}
    for run in runs.values():
        run["folder"] = str(cli.folder / "elsewhere" / run["name"])
        if version == 1:
            del run["values"], run["has_output"]
    plant(cli.sweep, format=version, runs=runs)
    cli.stub({"sleep": 0})
    cli("show", "--run", "_s0-")
    assert "seed=0" in cli("status")
    cli("cancel")
    cli("launch", "cluster=debug", "--retry")
    assert cli.states() == {0: "done", 1: "done"} and not mark.exists()
    assert not (cli.folder / "elsewhere").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=0,7"], "_s7-.* (seed=7), which was not launched"),
        (["train.lr=0.5"], "(seed=0), which was not launched"),
        (["train.steps=50"], "(seed=0), 50 steps instead of 20"),
        (["scale=small"], "which was not launched"),
    ],
)
def test_a_retry_of_other_runs_is_refused_with_the_launch_to_type(words, message, cli):
    cli("launch", "cluster=debug", "train.clip=2", "train.steps=20")
    before = stored(cli.sweep)
    text = cli("launch", "cluster=debug", "--retry", "train.clip=2", *words, code=2)
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), text), text
    assert f"it was python -m sweeps launch {cli.grid} train.clip=2 train.steps=20" in text
    assert stored(cli.sweep) == before


def test_status_prints_the_launch_that_submits_failed_runs_again(cli):
    cli.stub({"sleep": 0}, seed0={"fail": 3}, seed5={"fail": 3})
    typed = ["scale=tiny", "train.clip=2"]
    cli("launch", "cluster=debug", "--compare-at", "flops", *typed, code=1)
    words = retry_words(cli("status"))
    assert words == ["launch", cli.grid, *typed, f"paths.runs={cli.runs}", "--compare-at", "flops", "--retry"]
    # A run of another launch has that one's.
    cli("launch", "cluster=debug", "seed=5", code=1)
    lines = [line for line in cli("status").splitlines() if line.endswith("--retry")]
    assert [("seed=5" in line, "train.clip=2" in line) for line in lines] == [(True, False), (False, True)]
    cli.stub({"sleep": 0})
    assert sweeps_command.main([*words, "cluster=debug"]) == 0
    assert "seed=5" in " ".join(retry_words(cli("status"))) and cli.states() == {0: "done", 1: "done", 5: "failed"}


@pytest.mark.parametrize(
    "changes",
    [
        {"overrides": ["cluster=/evil.yaml"]}, {"overrides": ["cluster.python=evil"]}, {"overrides": ["paths.runs=/evil"]},
        {"overrides": ["--config-dir=/evil"]}, {"overrides": ["hydra/callbacks=evil"]}, {"overrides": ["+a=evil"]},
        {"overrides": ["a=\x1b[2Jevil"]}, {"overrides": ["a=1\nevil"]}, {"overrides": "evil"}, {"overrides": [3]},
        {"grid": "--evil"}, {"grid": "evil\x07"}, {"grid": 7}, {"compare_at": "evil"}, {"compare_at": []}, {"runs": None},
    ],
)  # fmt: skip
def test_a_stored_launch_that_nobody_typed_is_not_printed(changes, cli):
    cli.stub({"sleep": 0}, seed0={"fail": 3})
    cli("launch", "cluster=debug", code=1)
    (launch,) = stored(cli.sweep)["launches"]
    for launches in ([launch | changes], [launch | changes, launch], "evil"):
        plant(cli.sweep, launches=launches)
        text = cli("status")
        assert "evil" not in text and "\x1b" not in text
        assert text.count("--retry") == (len(launches) == 2)
