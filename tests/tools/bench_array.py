"""Time trivial runs through one array of a real Slurm cluster: python tests/tools/bench_array.py [RUNS]

It starts a cluster of its own (start-slurm.sh), launches one sweep, and prints how long the plan, the submission, the
runs and one status took. For a person: no test asserts a time.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from slurm_lab import STUB, Lab, squeue, write_grid  # noqa: E402

from sweeps import command as sweeps_command  # noqa: E402
from sweeps.status import status  # noqa: E402
from sweeps.store.folder import Sweep  # noqa: E402


def main(count):
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    lab = Lab(folder / "lab")
    lab.folder.mkdir()
    began = time.perf_counter()
    lab.start()
    print(f"cluster up         {time.perf_counter() - began:7.1f} s   {os.cpu_count()} cores")
    try:
        os.environ.update(lab.environment(), PYTHONPATH=str(STUB))
        measure(folder, count)
    finally:
        lab.stop()
        shutil.rmtree(folder)


def measure(folder, count):
    runs = folder / "runs"
    runs.mkdir()
    (runs / "stub.json").write_text('{"*": {"sleep": 0}}')
    (folder / "lab.yaml").write_text("kind: slurm\nsignal_s: 60\nthrottle: 8\n")
    grid = write_grid(folder, seeds=list(range(count)), base={"train.steps": 1})
    sweep = Sweep(runs, "count")
    words = ["launch", grid, f"cluster={folder / 'lab.yaml'}", f"paths.runs={runs}"]
    began = time.perf_counter()
    assert sweeps_command.main(words) == 0
    submitted = time.perf_counter()
    print(f"plan and submit    {submitted - began:7.1f} s   {count} runs, each composed and checked")
    while True:
        asked = time.perf_counter()
        rows, _ = status.statuses(sweep)
        answered = time.perf_counter()
        if not any(row.live for row in rows):
            break
        time.sleep(1)
    took = answered - submitted
    print(f"all runs           {took:7.1f} s   {took / count:.2f} s each, 8 at once")
    print(f"one status         {answered - asked:7.2f} s")
    done = sum(row.state == "done" for row in rows)
    arrays = {i.split("_")[0] for i in squeue()}
    print(f"done               {done:7}     of {count}, in {len(arrays)} array(s)")
    assert done == count


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
