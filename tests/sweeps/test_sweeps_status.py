"""Status: what the disk and Slurm's queue say of runs, when they will end, and the table."""

import functools
import io
import json
import re
import time
from pathlib import Path

import pytest
from slurm_lab import make_run, note_submission, silent

from experiments.runtime.records import append_jsonl
from sweeps import SweepError
from sweeps import command as sweeps_command
from sweeps.jobs import slurm
from sweeps.status import status, status_table
from sweeps.status.run_status import RunStatus
from sweeps.store.folder import Sweep


def fake_sweep(root, count):
    """A sweep of `count` runs on Slurm in every state that the disk and the queue can say."""
    sweep = Sweep(root, "many")
    runs = [make_run(root, f"r{i:04}", varies={"seed": str(i)}) for i in range(count)]
    sweep.add("Many", runs)
    note_submission(sweep, "many.bbbbbbbb", {run.name: f"18_{i}" for i, run in enumerate(runs)})
    queue, folder_of_jobs = {}, str(sweep.launches / "l" / "code")
    for i, run in enumerate(runs):
        kind = ("done", "running", "pending", "failed", "killed", "requeued", "cancelled")[i % 7]
        folder, note = Path(run.folder), functools.partial(sweep.note, run.name)
        folder.mkdir()
        if kind not in ("pending", "cancelled"):
            note("start", step=0, pid=1)
        if kind == "done":
            summary = {"status": "done", "step": 10, "scores": {"FD": 2.5}, "wall_s": 8, "session_s": 9}
            (folder / "summary.json").write_text(json.dumps(summary))
        elif kind == "running":
            write_beat(run)
            queue[f"18_{i}"] = slurm.QueueJob(f"18_{i}", "RUNNING", "None", "n1", "many.bbbbbbbb", folder=folder_of_jobs)
        elif kind == "pending":
            queue[f"18_{i}"] = slurm.QueueJob(f"18_{i}", "PENDING", "Priority", "", "many.bbbbbbbb", folder=folder_of_jobs)
        elif kind == "failed":
            note("end", how="failed", rank=0, error="Error: [red]no[/]\nsecond", where="experiments/x.py:3")
        elif kind == "requeued":
            note("end", how="requeued", step=3)
            queue[f"18_{i}"] = slurm.QueueJob(f"18_{i}", "PENDING", "BeginTime", "", "many.bbbbbbbb", folder=folder_of_jobs)
    return sweep, queue


def write_beat(run):
    beat = {"status": "running", "step": 4, "images_per_s": 7, "eta_s": 75, "time": time.time() + 60}
    Path(run.folder, "status.json").write_text(json.dumps(beat))


def test_every_state_is_told_from_disk_and_two_calls(tmp_path, monkeypatch):
    sweep, queue = fake_sweep(tmp_path, 7)
    # The same id in a cluster that was set up anew belongs to somebody else.
    queue["18_0"] = slurm.QueueJob("18_0", "RUNNING", "", "n9", "other")
    asked = []
    monkeypatch.setattr(slurm, "queue", lambda *_: asked.append("squeue") or queue)
    in_accounting = {"18_4": slurm.QueueJob("18_4", "OUT_OF_MEMORY", "", "n2", "", "0:125")}
    in_accounting["18_6"] = slurm.QueueJob("18_6", "CANCELLED", "", "", "", "0:0")
    monkeypatch.setattr(slurm, "history", lambda ids, *_: asked.append(sorted(ids)) or in_accounting)
    sweep.logs.mkdir()
    (sweep.logs / "18_4_0_log.err").write_text("Traceback\nMemoryError: all of it\nslurmstepd: error: killed\n\n")
    rows = {r.run.name: r for r in status.statuses(sweep)[0]}
    assert [rows[f"r{i:04}"].state for i in range(7)] == [
        "done", "running", "pending", "failed", "failed", "requeued", "stopped"
    ]  # fmt: skip
    assert asked[0] == "squeue" and len(asked) == 2
    assert rows["r0004"].why == (
        "out of memory (cluster.memory_gb= asks for more), saved step 0: MemoryError: all of it"
    )
    assert rows["r0003"].why == "Error: [red]no[/] second  (experiments/x.py:3)"
    assert (rows["r0001"].step, rows["r0001"].eta, rows["r0002"].why) == (4, 75, "Priority")
    assert (rows["r0000"].trained, rows["r0000"].elapsed, rows["r0000"].score) == (8, 9, "FD 2.5")
    # Cancelled while it waited to go on, and forgotten by the queue.
    requeued, ended = queue.pop("18_5"), sweep.runs()["r0005"]
    ((row,), _), queue["18_5"] = status.statuses(sweep, [ended]), requeued
    assert (row.state, row.why) == ("stopped", "its job is gone")
    # One filtered run has the estimate that it has among all.
    ((row,), _) = status.statuses(sweep, [sweep.runs()["r0002"]])
    assert row.work == pytest.approx(rows["r0002"].work, abs=2)
    values = status_table.as_json(sweep, list(rows.values()), "")
    assert json.loads(json.dumps(values)) == values and values["elapsed"] > 0 and values["eta"] >= 75
    lines = status_table.plain(list(rows.values()))
    assert "running   r0001  seed=1  4/10  7 img/s  ETA 1:15  18_1  n1" in lines
    monkeypatch.setattr(slurm, "queue", silent)
    rows, trouble = status.statuses(sweep)
    assert "no answer" in trouble and {row.state for row in rows} == {"done", "failed", "pending", "starting"}


def test_the_time_left_falls_between_heartbeats(tmp_path, answers, monkeypatch):
    sweep, run = Sweep(tmp_path, "g"), make_run(tmp_path)
    sweep.add("G", [run])
    note_submission(sweep, "g.bbbbbbbb", {"r": "18"}, time.time())
    answers.queue["18"] = slurm.QueueJob("18", "RUNNING", "None", "n1", "g.bbbbbbbb")
    sweep.note("r", "start", batch="g.bbbbbbbb")
    (tmp_path / "r").mkdir()
    now = time.time() + 1
    beat = {"status": "running", "step": 4, "images_per_s": 7, "eta_s": 100, "time": now}
    (tmp_path / "r" / "status.json").write_text(json.dumps(beat))
    for seconds, eta in ((0, 100), (60, 40), (200, 0)):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        ((row,), _) = status.statuses(sweep)
        assert row.eta == pytest.approx(eta)


def test_a_submission_is_not_judged_by_what_an_earlier_one_left(tmp_path, answers):
    sweep, run = Sweep(tmp_path, "g"), make_run(tmp_path)
    sweep.add("G", [run])

    def shown():
        (row,), _ = status.statuses(sweep)
        return row.state, row.step, row.why

    note_submission(sweep, "g.aaaaaaaa", {"r": "18"}, time.time())
    sweep.note("r", "end", how="failed", rank=0, error="old", job="18")
    assert shown() == ("failed", 0, "old")
    # A job that ends before its start.
    answers.history["19"] = slurm.QueueJob("19", "FAILED", exit="1:0")
    note_submission(sweep, "g.bbbbbbbb", {"r": "19"}, time.time())
    assert shown() == ("failed", 0, "FAILED with exit code 1, saved step 0")
    sweep.note("r", "end", how="failed", rank=1, error="no code", where="", job="19")
    assert shown() == ("failed", 0, "no code")
    # One that has not begun: the last start and the heartbeat are those of a run that was killed.
    answers.queue["20"] = slurm.QueueJob("20", "RUNNING", "None", "n1", "g.cccccccc")
    (tmp_path / "r" / "checkpoints" / "step-00000003").mkdir(parents=True)
    sweep.note("r", "start", batch="g.bbbbbbbb")
    write_beat(run)
    note_submission(sweep, "g.cccccccc", {"r": "20"}, time.time())
    assert shown() == ("starting", 3, "")
    sweep.note("r", "start", batch="g.cccccccc")
    assert shown() == ("running", 4, "")


# Rows of 100 steps by name: (state, step, own estimate, what they wait for).
@pytest.mark.parametrize(
    ("rows", "etas", "total"),
    [
        # Nothing is known of a run that has only begun.
        ({"a": ("starting", None, None, []), "b": ("pending", 0, None, [])}, [None, None], None),
        # 0.5 s a step: the second begins at step 60. A queued run's turn is unknown.
        ({"a": ("running", 50, 25, []), "b": ("starting", 60, None, []), "c": ("pending", 0, None, [])}, [25, 20, None], 47.5),
        # Three more, one at a time.
        ({"a": ("running", 50, 50, []), **{name: ("pending", 0, None, []) for name in "bcd"}}, [50, None, None, None], 350),
        # One after the other, however many run at once.
        ({"a": ("running", 80, 20, []), "b": ("pending", 0, None, ["a"]), "c": ("pending", 0, None, ["b"])}, [20, 120, 220], 220),
        # A run that is done took 30 s for its 100 steps; what runs now counts before that.
        ({"a": ("done", 100, 30, []), "b": ("starting", 0, None, [])}, [30], 30),
        ({"a": ("done", 100, 30, []), "b": ("running", 50, 100, []), "c": ("starting", 0, None, [])}, [100, 200], 200),
    ],
)  # fmt: skip
def test_the_time_left_is_steps_over_rate_after_dependencies(rows, etas, total, tmp_path):
    statuses = {}
    for name, (state, step, seconds, needs) in rows.items():
        run = make_run(tmp_path, name, steps=100, after=needs)
        row = RunStatus(run, state, step=step, steps=100)
        if state == "done":
            row.trained = seconds
        else:
            row.eta = seconds
        statuses[name] = row
    status.estimate_etas(statuses)
    assert [row.eta for row in statuses.values() if row.live] == etas
    assert status_table.seconds_left(list(statuses.values())) == total


def test_a_table_of_many_runs_fits_the_terminal(tmp_path, answers):
    from rich.console import Console

    sweep, answers.queue = fake_sweep(tmp_path, 140)
    rows, _ = status.statuses(sweep)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(status_table.table("many", rows, 80, height=60))
    text = console.export_text()
    lines = [line.rstrip() for line in text.splitlines()]
    assert len(lines) <= 60 and max(map(len, lines)) <= 80
    assert "20 running" in text and "not shown" in text
    # One line a run, and nothing that tells runs apart is cut; what a user's data hold is no markup.
    assert sum("running" in line and "4/10" in line and re.search(r"\b1:[01]\d", line) is not None for line in lines) == 20
    assert any(line.split()[:2] == ["failed", "3"] and "[red]no[/]" in line for line in lines)


# --- files that are damaged ------------------------------------------------------------------------------------


def test_half_written_and_foreign_lines_are_passed_over(tmp_path):
    sweep = Sweep(tmp_path, "g")
    note_submission(sweep, "g.bbbbbbbb", {"r": "18"})
    with (sweep.path / "batches.jsonl").open("a") as handle:
        handle.write('{"batch": "../b", "cluster": "", "kind": "local", "code": "", "runs": [], "time": 1}\n')
        handle.write('[1]\nnot json\n{"batch": "z", "ids": {"r": "1"}}\n{"batch": "g.bbbbbbbb", "id')
    (batch,) = sweep.batches()
    assert batch.ids == {"r": "18"} and batch.code == "c"
    # Times beyond the calendar are none that could be shown.
    append_jsonl(sweep.attempts("r"), [{"event": "end", "time": t} for t in (1e300, 1e9)])
    assert [event["time"] for event in sweep.events("r")] == [1e9]


def test_a_damaged_list_of_runs_is_named_and_leaves_the_other_sweeps_readable(tmp_path, capsys):
    Sweep(tmp_path, "good").add("t", [make_run(tmp_path)])
    torn = Sweep(tmp_path, "torn")
    torn.path.mkdir()
    for runs in ({"r": {"name": "r"}}, {"r": make_run(tmp_path, "..").__dict__}):
        (torn.path / "sweep.json").write_text(json.dumps({"runs": runs}))
        with pytest.raises(SweepError, match="torn/sweep.json cannot be read; if it is damaged, remove it, then"):
            torn.add("t", [])
    (torn.path / "sweep.json").write_text('{"runs": ')
    assert sweeps_command.main(["status", f"paths.runs={tmp_path}"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("good ") and "torn/sweep.json cannot be read" in printed.err
