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
    words = ["seed=0,1,2", "train.steps=100"]
    shop("launch", *words)
    jobs = {seed: row.job for seed, row in shop.rows().items()}
    shop.running(2, step=6)
    os.kill(shop.starts(2)[0]["pid"], signal.SIGKILL)
    shop.done(0)
    until(lambda: shop.states()[1] == shop.states()[2] == "failed", what="two failures")
    # An array that is cancelled while it waits for a full cluster.
    full = ["sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300"]
    blocker = subprocess.run(full, capture_output=True, text=True, check=True).stdout.strip()
    until(lambda: slurm.queue()[blocker].state == "RUNNING", what="a full cluster")
    shop("launch", "seed=5,6", "train.steps=100", "--throttle", "2")
    assert {shop.states()[seed] for seed in (5, 6)} == {"pending"}
    array = shop.rows()[5].job.split("_")[0]
    subprocess.run(["scancel", array, blocker], check=True)
    # Slurm purges ended jobs every minute at the most.
    until(lambda: not slurm.queue(), 150, f"squeue to forget, {slurm.queue()}")
    states = {job.state for job in slurm.history(jobs.values()).values()}
    assert states == {"COMPLETED", "FAILED"}
    for job, record in slurm.history(jobs.values()).items():
        assert (record.state, record.exit) == sacct(job)
    rows = shop.rows()
    assert "not a number at step 7" in rows[1].why
    # A killed run leaves no word of its own: what it died of stands in accounting alone.
    assert rows[2].why.startswith("killed by signal 9 (out of memory?), saved step ")
    # Tasks that never started have one record together.
    ask = ["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", array]
    said = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"{array}_[0-1") and "CANCELLED by" in said, said
    assert {(rows[seed].state, rows[seed].why) for seed in (5, 6)} == {("stopped", "cancelled")}
    assert "2 of 3 failed: python -m sweeps retry" in shop("launch", *words)
    shop.stub({"sleep": 0})
    shop("retry")
    shop.done(0, 1, 2, 5, 6)
