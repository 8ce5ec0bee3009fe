"""Status where squeue has forgotten the jobs and only accounting (a real sacct) knows of them."""

import os
import signal
import subprocess

import pytest
from slurm_lab import started, until, which
from test_slurm_sweeps import SlurmLauncher

from sweeps.jobs import slurm

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def accounted():
    needed = ("slurmctld", "slurmd", "munged", "slurmdbd", "mariadbd")
    missing = [name for name in needed if which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on PATH: apt-get install slurmdbd mariadb-server")
    # No line in /etc/hosts: the other tests' cluster takes its own away when it ends.
    yield from started(ACCT="1", MIN_JOB_AGE="2", ETC_HOSTS="0")


@pytest.fixture
def shop(accounted, tmp_path, capsys, monkeypatch):
    for key, value in accounted.environment().items():
        monkeypatch.setenv(key, value)
    from slurm_lab import use_stubs

    use_stubs(monkeypatch)
    yield SlurmLauncher(tmp_path, capsys)
    subprocess.run(["scancel", "--user", str(os.getuid())], check=False)
    until(lambda: not any(job.live for job in slurm.queue().values()), what="an empty queue")


def sacct(job):
    """Return state and exit code of one job, as the site's own tool says."""
    words = ["sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", job]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rows = {parts[0]: parts[1:] for line in out.splitlines() if (parts := line.split("|"))}
    return rows[job][0].split()[0], rows[job][1]


def test_what_squeue_forgot_is_read_from_accounting(shop):
    shop.stub({"sleep": 0.02, "save_every": 5}, seed1={"fail": 7}, seed2={"sleep": 0.2})
    shop("launch", "train.steps=100")
    jobs = {seed: row.job for seed, row in shop.rows().items()}
    shop.running(2, step=6)
    os.kill(shop.starts(2)[0]["pid"], signal.SIGKILL)
    shop.done(0, 3)
    # Slurm purges ended jobs every minute at the most.
    until(lambda: not slurm.queue(), 150, f"squeue to forget, {slurm.queue()}")
    told = slurm.history(jobs.values())
    assert {seed: told[job].state for seed, job in jobs.items()} == {
        0: "COMPLETED",
        1: "FAILED",
        2: "FAILED",
        3: "COMPLETED",
    }
    for job in jobs.values():
        assert (told[job].state, told[job].exit) == sacct(job)
    assert shop.states() == {0: "done", 1: "failed", 2: "failed", 3: "done"}
    rows = shop.rows()
    assert "not a number at step 7" in rows[1].why
    # A killed run leaves no word of its own: what it died of stands in accounting alone.
    assert rows[2].why.startswith("killed by signal 9 (out of memory?), saved step ")
    assert "2 of 4 failed: python -m sweeps retry" in shop("launch", "train.steps=100")
    shop.stub({"sleep": 0.01})
    shop("retry")
    shop.done(0, 1, 2, 3)


def test_an_array_that_was_cancelled_while_it_waited_is_stopped_after_squeue_forgot_it(shop):
    full = ["sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null"]
    full = [*full, "--wrap", "sleep 300"]
    blocker = subprocess.run(full, capture_output=True, text=True, check=True).stdout.strip()
    until(lambda: slurm.queue()[blocker].state == "RUNNING", what="a full cluster")
    shop("launch", "seed=0,1,2", "--throttle", "2")
    assert set(shop.states().values()) == {"pending"}
    array = shop.rows()[0].job.split("_")[0]
    subprocess.run(["scancel", array, blocker], check=True)
    until(lambda: not slurm.queue(), 150, "squeue to forget")
    words = ["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", array]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    # Tasks that never started have one record together.
    assert said.startswith(f"{array}_[0-2") and "CANCELLED by" in said, said
    assert {(row.state, row.why) for row in shop.rows().values()} == {("stopped", "cancelled")}
    assert "submitted 3 runs" in shop("launch", "seed=0,1,2")
    shop.done(0, 1, 2)
