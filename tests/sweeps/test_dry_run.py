"""A dry run of a sweep: what a launch would submit now, and what it would refuse, said first."""

import contextlib
import io

from slurm_lab import write_grid

from routing.errors import UserError
from sweeps import SweepError
from sweeps import command as sweeps_command
from sweeps.jobs import slurm
from sweeps.plan import plan, preflight
from sweeps.store.folder import JobBatch


def queued(cli, seed):
    """Note a submission of the runs of one seed, as by an earlier launch on Slurm."""
    (run,) = (run for run in cli.sweep.runs().values() if run.varies["seed"] == str(seed))
    cli.sweep.intend(JobBatch("count.b", "slurm", "slurm", [run.name], 1.0, "c"))
    cli.sweep.submitted("count.b", {run.name: "18"})
    return slurm.QueueJob("18", "PENDING", name="count.b")


def test_a_dry_run_leaves_out_what_is_finished_or_queued(cli, monkeypatch):
    cli.grid = write_grid(cli.folder, seeds=[0, 1, 2])
    text = cli("launch", "--dry-run")
    assert "3 runs on cluster=slurm" in text and "--array=0-2" in text
    assert not cli.sweep.path.exists()
    cli("launch", "cluster=debug", "seed=0")
    text = cli("launch", "--dry-run")
    assert "1 of 3 done" in text and "2 runs on cluster=slurm" in text and "--array=0-1" in text
    assert "_s0-" not in text and text.count("20 steps") == 2
    cli.stub({"sleep": 0, "fail": 3})
    cli("launch", "cluster=debug", "seed=1", code=1)
    text = cli("launch", "--dry-run")
    assert "1 of 3 failed: python -m sweeps retry count" in text and "1 runs on" in text
    cli.stub({"sleep": 0})
    cli("retry", "cluster=debug")
    cli("launch", "cluster=debug", "seed=2")
    text = cli("launch", "--dry-run")
    assert "3 of 3 done" in text and "0 runs on cluster=slurm" in text and "#SBATCH" not in text
    # More steps are wanted than they have.
    job = queued(cli, 2)
    monkeypatch.setattr(slurm, "queue", lambda *_: {"18": job})
    text = cli("launch", "--dry-run", "train.steps=30")
    assert "1 of 3 in the queue or running" in text and "2 runs on" in text

    def silent(*_):
        raise SweepError("squeue: no answer")

    monkeypatch.setattr(slurm, "queue", silent)
    text = cli("launch", "--dry-run", "train.steps=30")
    assert "squeue: no answer; what was submitted earlier counts as in the queue or running" in text
    assert "2 runs on cluster=slurm" in text


def test_what_the_first_cell_lacks_is_said_before_the_others_are_composed(cli, monkeypatch):
    def refuse(*_):
        raise UserError("no data")

    composed = []
    honest = plan.load_config
    monkeypatch.setattr(plan, "load_config", lambda words: composed.append(1) or honest(words))
    monkeypatch.setattr(preflight, "check_ready", refuse)
    assert "error: no data" in cli("launch", "cluster=debug", code=2) and len(composed) == 1
    assert not cli.sweep.path.exists()
    # A dry run says it first, and once; it goes on, so that the cost can be looked at.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert sweeps_command.main(cli.words("launch", "--dry-run")) == 2
    is_code, first, *others = printed.getvalue().splitlines()
    assert "is code: it is executed" in is_code and first == "error: no data"
    assert "2 runs on cluster=slurm" in "".join(others) and any(line.startswith("together:") for line in others)
