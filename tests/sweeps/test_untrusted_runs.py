"""A folder of runs from somebody else: what is in it is not executed; what is ours stays private."""

import json
import os
import re
import shlex
import stat
from pathlib import Path

import pytest
from slurm_lab import make_run, note_submission, until, yaml_grid

from experiments.runtime.files import code_commit
from routing.errors import UserError
from sweeps import command as sweeps_command
from sweeps.jobs import pool, slurm
from sweeps.jobs.snapshot import PACKAGES, ROOT, new_launch, remove_launches
from sweeps.plan import resources
from sweeps.plan.command_output import check_writes
from sweeps.plan.grid import ENTRIES
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


def test_a_launch_has_a_copy_of_its_own_for_its_owner_alone(tmp_path, suite):
    for package in PACKAGES:
        (suite / package).chmod(0o555)  # an installation that is read-only
    (suite / "sweeps" / "__init__.py").symlink_to(suite / "routing" / "errors.py")
    before = os.umask(0o002)
    try:
        first, second = new_launch(tmp_path / "launches", suite), new_launch(tmp_path / "launches", suite)
    finally:
        os.umask(before)
    assert first[0] != second[0] and first[1] == second[1]
    for folder, digest in (first, second):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert json.loads((folder / "code" / "snapshot.json").read_text())["hash"] == digest
        assert not any(path.is_symlink() for path in folder.rglob("*"))
    (suite / "sweeps").chmod(0o755)
    (suite / "sweeps" / "errors.py").write_text("# edited")
    third, digest = new_launch(tmp_path / "launches", suite)
    assert digest != first[1]
    # What was planted beside them is neither followed nor removed.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "launches" / "link").symlink_to(elsewhere)
    remove_launches(tmp_path / "launches", keep={second[0].name})
    assert {path.name for path in (tmp_path / "launches").iterdir()} == {second[0].name, "link"}
    assert elsewhere.is_dir() and not third.exists()


def test_the_copy_of_this_suite_is_whole(tmp_path):
    folder, digest = new_launch(tmp_path)
    code = folder / "code"
    assert (code / "experiments" / "conf" / "scale" / "small.yaml").is_file() and (code / "sweeps" / "grids").is_dir()
    assert not list(code.rglob("*.pyc")) and code_commit(code) == code_commit(ROOT)
    # A copy of a copy is the same code; what an editor has beside it is none.
    (code / "sweeps" / ".#launch.py").symlink_to("nobody@nowhere.1")
    again, same = new_launch(tmp_path / "again", code)
    assert same == digest and not (again / "code" / "sweeps" / ".#launch.py").is_symlink()


def test_an_edited_copy_is_run_by_no_other_launch_and_removed_by_the_next(cli):
    cli.stub({"sleep": 0}, seed0={"fail": 3})
    cli("launch", "cluster=local", "seed=0")
    until(lambda: cli.states() == {0: "failed"}, what="a failure")
    until(lambda: not pool.is_alive(cli.sweep, cli.sweep.batches()[0].name), what="the pool's end")
    (first,) = cli.sweep.launches.iterdir()
    mark = cli.folder / "planted"
    with (first / "code" / "sweeps" / "jobs" / "job.py").open("a") as file:
        file.write(f"\nopen({str(mark)!r}, 'w')\n")
    cli.stub({"sleep": 0.05})
    cli("launch", "cluster=local", "seed=0", "--retry")
    (second,) = cli.sweep.launches.iterdir()
    assert second != first
    # A launch whose jobs run keeps its copy.
    cli("launch", "cluster=local", "seed=1")
    assert second in cli.sweep.launches.iterdir()
    until(lambda: set(cli.states().values()) == {"done"}, what="both runs")
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


# --- jobs that are somebody else's ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noted", "name", "folder", "ours"),
    [
        ("count.12345678", "count.12345678", "{sweep}/launches/l/code", True),
        ("count.12345678", "count.12345678", "{sweep}/../../../elsewhere/.sweeps/count/launches/l/code", False),
        ("count.12345678", "count.12345678", "{sweep}/launches", False),
        ("count.12345678", "count.12345678", "", False),
        ("count.12345678", "important", "{sweep}/launches/l/code", False),
        ("important", "important", "{sweep}/launches/l/code", False),
        ("count.12345678.sh", "count.12345678.sh", "{sweep}/launches/l/code", False),
    ],
)
@pytest.mark.parametrize("ids", [False, True])
def test_only_jobs_that_the_queue_lists_for_this_launch_are_touched(noted, name, folder, ours, ids, cli, monkeypatch):
    """A name or an id in the folder of runs may be that of any job of this user."""
    cli("launch", "cluster=debug", "seed=0", "train.steps=3")
    (run,) = cli.sweep.runs()
    line = {"batch": noted, "cluster": "slurm", "kind": "slurm", "runs": [run], "time": 1e9, "code": "c"}
    lines = [line, {"batch": noted, "ids": dict.fromkeys([run] if ids else [], "18")}]
    (cli.sweep.path / "batches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = slurm.QueueJob("18", "RUNNING", name=name, folder=folder.format(sweep=cli.sweep.path))
    calls = []
    monkeypatch.setattr(slurm, "queue", lambda *_: {"18": job})
    monkeypatch.setattr(slurm, "history", lambda *_: {})
    monkeypatch.setattr(slurm, "call", lambda words: calls.append(words) or "")
    (Path(cli.sweep.runs()[run].folder) / "summary.json").unlink()
    cli("cancel")
    cli("launch", "seed=0", "train.steps=3", "--throttle", "2", "cluster=debug")
    assert calls == ([["scancel", "18"]] if ours else [])


@pytest.mark.parametrize("ids", [{"r": "../../../x"}, {"r": "18_0\n"}, {"r": "1 2"}, {"r": 18}, {"r": ""}])
def test_ids_that_slurm_does_not_give_are_passed_over(ids, tmp_path):
    sweep = Sweep(tmp_path, "g")
    note_submission(sweep, "g.12345678", ids)
    assert sweep.batches()[0].ids == {}


# --- grids of somebody else -------------------------------------------------------------------------------------

# Arguments of evaluate after its run, and of analysis; key=value of bench.
ELSEWHERE = [
    ("evaluate", ["{parent}", "--out", "/x"]), ("evaluate", ["{parent}", "--out=/x"]), ("evaluate", ["{parent}", "--ou", "/x"]),
    ("evaluate", ["{parent}", "--out", "{out}/../../x"]), ("evaluate", ["{parent}", "--out", "x/{out}"]),
    ("evaluate", ["{parent}", "--cache", "/x"]), ("evaluate", ["{parent}", "--write-samples", "/x"]),
    ("evaluate", ["{parent}", "--write-reference", "/x"]), ("evaluate", ["/x"]), ("evaluate", ["--samples", "3", "{parent}/../x"]),
    ("evaluate", ["{parent}", "{option}", "/x"]), ("evaluate", ["{parent}", "--help"]), ("evaluate", ["{parent}", "--nothing"]),
    ("bench", ["out=/x"]), ("bench", []), ("bench", ["out={out}", "out=/x"]), ("bench", ["out={out}/../x"]),
    ("analysis", ["report", "{runs}"]), ("analysis", ["report", "{runs}", "--out", "/x"]), ("analysis", ["report", "/x", "--out", "{out}"]),
    ("analysis", ["tables", "{runs}", "--out", "/x"]), ("analysis", ["figures", "{runs}", "--out", "~/x"]),
    ("analysis", ["similarity", "/x"]), ("analysis", ["similarity", "{parent}", "/x"]), ("analysis", ["pages"]), ("analysis", ["notebooks"]),
    ("analysis", ["guidance-scale", "{parent}", "--out", "/x"]), ("train", {"paths.cache": "/x"}), ("train", {"paths.runs": "/x"}),
    ("train", {"hydra.searchpath": "[/x]"}), ("train", {"hydra/callbacks": "x"}), ("train", {"--config-dir": "/x"}), ("train", {"-m": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("command", "arguments"), ELSEWHERE)
def test_a_command_of_a_grid_writes_below_out_only(command, arguments, tmp_path, capsys):
    stage = {"base": arguments} if command == "train" else {"command": command, "args": arguments}
    if "{option}" in arguments:
        stage["axes"] = {"option": ["--out"]}
    grid = yaml_grid(tmp_path, stages=[{"name": "later", "of": "train"} | stage])
    assert sweeps_command.main(["launch", str(grid.path), "--dry-run", f"paths.runs={tmp_path / 'runs'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and len(line) < 400


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("evaluate", ["{parent}", "--out", "{out}"]), ("evaluate", ["--cache", "{out}-cache", "{parent}", "--guidance", "none"]),
        ("bench", ["out={out}.json"]), ("analysis", ["report", "{runs}", "--out", "{out}.html"]),
        ("analysis", ["tables", "{runs}", "--print"]), ("analysis", ["similarity", "{parent}"]),
    ],
)  # fmt: skip
def test_what_a_grid_may_write_is_planned(command, arguments, tmp_path, capsys):
    grid = yaml_grid(tmp_path, stages=[{"name": "later", "of": "train", "command": command, "args": arguments}])
    assert sweeps_command.main(["launch", str(grid.path), "--dry-run", f"paths.runs={tmp_path / 'runs'}"]) == 0


def test_each_command_of_a_grid_has_a_rule_for_what_it_writes():
    for name, entry in ENTRIES.items():
        if name != "train":
            with pytest.raises(UserError):
                check_writes(entry, ["out=/x"], "/out", ["/runs"])
