"""A real Slurm cluster for the tests: two node daemons on this machine, fake GPUs, no accounting."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import yaml
from small import ROOT

from sweeps import SweepError
from sweeps import command as sweeps_command
from sweeps.jobs import slurm
from sweeps.plan import grid
from sweeps.status import status
from sweeps.store.folder import JobBatch, Sweep
from sweeps.store.planned_run import PlannedRun, values_of

TOOLS = Path(__file__).parent / "tools"
STUB = TOOLS / "stub"


class Lab:
    """The cluster: start, stop, and what the tests do to it."""

    def __init__(self, folder, **knobs):
        self.folder = Path(folder)
        self.knobs = knobs
        self.port = free_ports(8)
        self.over = threading.Event()

    def script(self, *words):
        settings = {"LAB": str(self.folder), "PORT": str(self.port), "NODES": "2", "CPUS": "4", "GPUS": "2"}
        settings |= {"ACCT": "0", "GRACE": "20", "KILL_WAIT": "2"} | self.knobs
        command, env = [str(TOOLS / "start-slurm.sh"), *words], {**os.environ, **settings}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self):
        self.script("start")
        threading.Thread(target=self._undelay, daemon=True).start()

    def stop(self):
        self.over.set()
        self.script("wipe")

    def _undelay(self):
        # Slurm holds a requeued job for 120 s; the tests do not wait for that.
        while not self.over.wait(0.5):
            with contextlib.suppress(AssertionError):
                self.script("undelay")

    def environment(self):
        # With accounting there is a real sacct; without, a stand-in in the cluster's folder.
        has_accounting = self.knobs.get("ACCT") == "1"
        stand_in = "" if has_accounting else f"{self.folder / 'bin'}{os.pathsep}"
        return {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf"), "PATH": stand_in + os.environ["PATH"]}


def free_ports(count):
    """Return the first of `count` ports in a row that nobody listens on."""
    for start in range(17000 + os.getpid() % 500 * 8, 30000, count):
        with contextlib.suppress(OSError):
            for port in range(start, start + count):
                with socket.create_server(("127.0.0.1", port)):  # with SO_REUSEADDR
                    pass
            return start
    raise RuntimeError("no free ports")


@pytest.fixture(scope="session")
def lab():
    require_slurm()
    yield from started()


@pytest.fixture
def named_nodes(lab):
    """Names that resolve: jobs of several nodes need them, and only root's cluster can add them."""
    try:
        socket.gethostbyname("n2")
    except OSError:
        without("n1 and n2 do not resolve: echo '127.0.0.1 n1 n2' | sudo tee -a /etc/hosts")


def require_slurm():
    missing = [name for name in ("slurmctld", "slurmd", "munged") if which(name) is None]
    if missing:
        without(f"no {', '.join(missing)} on PATH: apt-get install slurm-wlm munge")


def without(reason):
    if os.environ.get("SLURM_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


def started(**knobs):
    """Start a cluster, yield it, and take it away again."""
    # A short path: a munge socket's name has at most 107 characters.
    folder = tempfile.mkdtemp(prefix="slurm-", dir="/tmp")
    cluster = Lab(folder, **knobs)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def which(name):
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))


def until(check, seconds=60.0, what="it"):
    """Poll until `check` returns something true, and return that."""
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.1)
    return found


def squeue(columns="%i|%T|%N|%j"):
    """Return what squeue says of each task: {id: (state, node, name)}."""
    command = ["squeue", "-r", "-h", "-t", "all", "-o", columns]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tasks = (line.split("|") for line in out.splitlines())
    return {task: tuple(values) for task, *values in tasks}


def silent(*_):
    """In place of `slurm.queue`: no answer."""
    raise SweepError("squeue gave no answer")


# What grids of the tests run in place of training, and beside it.
STUB_COMMANDS = {"score": "stub_command:main", "train": "stub_training:main"} | {
    name: f"stub_command:{name}" for name in ("seven", "nothing", "usr2", "term")
}


def use_stubs(monkeypatch):
    """Let grids of this process, and of those that it starts, run the stubs; flush no files to disk in this one."""
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    for name, target in STUB_COMMANDS.items():
        monkeypatch.setitem(grid.ENTRIES, name, target)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def stubbed_main():
    """Run the command of `sys.argv` with the stubs: what `Launcher.shell` starts."""
    grid.ENTRIES.update(STUB_COMMANDS)
    sys.exit(sweeps_command.main())


def write_grid(folder, name="count", **changes):
    """Write a grid of trivial runs and return its path."""
    raw = {"title": "Trivial runs", "base": {"train.steps": 20}, "seeds": [0, 1, 2, 3]}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**raw, **changes}, sort_keys=False))
    return str(path)


def yaml_grid(folder, name="g", **raw):
    """Write a grid in YAML and load it."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return grid.load(str(path))


def make_run(root, name="r", **changes):
    """Return a planned run of ten steps whose folder is `root/name`."""
    values = {
        "name": name, "stage": "train", "label": f"name={name}", "entry": "stub_training:main", "args": [],
        "trains": True, "folder": str(root / name), "steps": 10, "varies": {"seed": "0"},
    }  # fmt: skip
    values |= changes
    return PlannedRun(**{"values": values_of(values["args"]) | values["varies"], **values})


def note_submission(sweep, batch, ids, time=1.0):
    """Note that the runs of `ids`, job ids by run, were submitted to Slurm."""
    sweep.intend(JobBatch(batch, "slurm", "slurm", list(ids), time, "c"))
    sweep.submitted(batch, ids)


class Launcher:
    """One folder of runs, and the commands on it; called with a command's words."""

    def __init__(self, folder, capsys, seeds=(0, 1), sleep=0):
        self.folder, self.capsys = folder, capsys
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.sweep = Sweep(self.runs, "count")
        self.grid = write_grid(folder, seeds=list(seeds))
        self.place = []  # words of `launch`
        self.stub({"sleep": sleep})

    def stub(self, everywhere, **by_seed):
        values = {"*": everywhere} | {key.removeprefix("seed"): value for key, value in by_seed.items()}
        (self.runs / "stub.json").write_text(json.dumps(values))

    def words(self, command, *words):
        place = self.place if command == "launch" else []
        return [command, self.grid, *place, f"paths.runs={self.runs}", *words]

    def __call__(self, command, *words, code=0):
        self.capsys.readouterr()
        assert sweeps_command.main(self.words(command, *words)) == code
        out = self.capsys.readouterr()
        return out.out + out.err

    def shell(self, command, *words):
        """Start a command in a process of its own."""
        start = "import slurm_lab; slurm_lab.stubbed_main()"
        call = [sys.executable, "-c", start, *self.words(command, *words)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, STUB, ROOT / "tests")))}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(call, cwd=self.folder, env=env, **pipes)

    def rows(self):
        return {int(r.run.varies["seed"]): r for r in status.statuses(self.sweep)[0]}

    def states(self):
        return {seed: row.state for seed, row in self.rows().items()}

    def events(self, seed):
        return self.sweep.events(self.rows()[seed].run.name)


class SlurmLauncher(Launcher):
    """The commands on the cluster of this machine."""

    def __init__(self, folder, capsys):
        super().__init__(folder, capsys, seeds=(0, 1, 2, 3), sleep=0.02)
        self.place = [f"cluster={folder / 'lab.yaml'}"]
        self.resources(throttle=8)

    def resources(self, **changes):
        values = {"kind": "slurm", "time": "1:00:00", "signal_s": 60, **changes}
        (self.folder / "lab.yaml").write_text(yaml.safe_dump(values))

    def starts(self, seed):
        return [e for e in self.events(seed) if e["event"] == "start"]

    def running(self, seed, step=1, seconds=60):
        def look():
            row = self.rows()[seed]
            return row if row.state == "running" and (row.step or 0) >= step else None

        return until(look, seconds, what=f"seed {seed} to run, {self.states()}")

    def done(self, *seeds, seconds=90):
        until(lambda: all(self.states()[s] == "done" for s in seeds), seconds, f"{seeds}: {self.rows()}")

    def log(self, seed, kind="err"):
        name = self.rows()[seed].run.name
        batch = [b for b in self.sweep.batches() if name in b.runs][-1]
        return self.sweep.log(batch, name, kind).read_text()


def on_cluster(cluster, folder, capsys, monkeypatch):
    """Yield the commands on a cluster, whose queue is empty afterwards."""
    for key, value in cluster.environment().items():
        monkeypatch.setenv(key, value)
    yield SlurmLauncher(folder, capsys)
    subprocess.run(["scancel", "--user", str(os.getuid())], check=False)
    until(lambda: not any(job.live for job in slurm.queue().values()), what="an empty queue")
