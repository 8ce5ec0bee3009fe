"""Status where squeue has forgotten the jobs and only accounting (a real sacct) knows of them."""

import os
import signal
import subprocess

import pytest
from slurm_lab import started, until, which

from sweeps.jobs import slurm

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def lab():
    missing = [name for name in ("slurmctld", "slurmd", "munged", "slurmdbd", "mariadbd") if which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on PATH: apt-get install slurmdbd mariadb-server")
    # No line in /etc/hosts: the other tests' cluster takes its own away when it ends.
    yield from started(ACCT="1", MIN_JOB_AGE="2", ETC_HOSTS="0")


def sacct(job):
    """Return state and exit code of one job, as the site's own tool says."""
    words = ["sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", job]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rows = {parts[0]: parts[1:] for line in out.splitlines() if (parts := line.split("|"))}
    return rows[job][0].split()[0], rows[job][1]


def test_what_squeue_forgot_is_read_from_accounting(cli):
    cli.stub({"sleep": 0.02, "save_every": 5}, seed1={"fail": 7}, seed2={"sleep": 0.2})
    cli("launch", "train.steps=100")
    jobs = {seed: row.job for seed, row in cli.rows().items()}
    cli.running(2, step=6)
    os.kill(cli.starts(2)[0]["pid"], signal.SIGKILL)
    cli.done(0, 3)
    # Slurm purges ended jobs every minute at the most.
    until(lambda: not slurm.queue(), 150, f"squeue to forget, {slurm.queue()}")
    told = slurm.history(jobs.values())
    assert [told[jobs[seed]].state for seed in range(4)] == ["COMPLETED", "FAILED", "FAILED", "COMPLETED"]
    for job in jobs.values():
        assert (told[job].state, told[job].exit) == sacct(job)
    assert cli.states() == {0: "done", 1: "failed", 2: "failed", 3: "done"}
    rows = cli.rows()
    assert "not a number at step 7" in rows[1].why
    # A killed run leaves no word of its own: what it died of stands in accounting alone.
    assert rows[2].why.startswith("killed by signal 9 (out of memory?), saved step ")
    assert "2 of 4 failed; add --retry" in cli("launch", "train.steps=100")
    cli.stub({"sleep": 0.01})
    cli("launch", "train.steps=100", "--retry")
    cli.done(0, 1, 2, 3)


def test_an_array_that_was_cancelled_while_it_waited_is_stopped_after_squeue_forgot_it(cli):
    full = ["sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null"]
    full = [*full, "--wrap", "sleep 300"]
    blocker = subprocess.run(full, capture_output=True, text=True, check=True).stdout.strip()
    until(lambda: slurm.queue()[blocker].state == "RUNNING", what="a full cluster")
    cli("launch", "seed=0,1,2", "--throttle", "2")
    assert set(cli.states().values()) == {"pending"}
    array = cli.rows()[0].job.split("_")[0]
    subprocess.run(["scancel", array, blocker], check=True)
    until(lambda: not slurm.queue(), 150, "squeue to forget")
    words = ["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", array]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    # Tasks that never started have one record together.
    assert said.startswith(f"{array}_[0-2") and "CANCELLED by" in said, said
    assert {(row.state, row.why) for row in cli.rows().values()} == {("stopped", "cancelled")}
    assert "submitted 3 runs" in cli("launch", "seed=0,1,2")
    cli.done(0, 1, 2)
