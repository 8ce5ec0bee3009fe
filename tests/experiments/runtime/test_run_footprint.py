"""What a training run takes: as much memory as its dry run says, and no package that takes seconds to import."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from small import ROOT

from experiments.run import main

# Not `ru_maxrss`: a child process begins with the peak of the process that started it.
CODE = """
import pathlib, re, sys
from experiments.run import main
main(sys.argv[1:])
status = pathlib.Path("/proc/self/status").read_text()
print("PEAK", int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024 / 2**30)
print("IMPORTED", [name for name in ("sklearn", "scipy", "torch._dynamo") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    "words",
    [
        ["backbone=mamba", "route=2-8", "train.steps=2", "sampler.steps=2"],
        ["backbone.width=256", "train.batch=64", "train.steps=1", "train.final_samples=false"],  # mostly activations
    ],
)
def test_a_run_takes_the_memory_that_its_dry_run_says_and_imports_little(words, tmp_path, capsys):
    words = [*words, "eval=none", "train.sample_every=0", f"paths.runs={tmp_path}"]
    main([*words, "dry=true"])
    predicted = float(re.search(r"memory +about ([0-9.]+) GB", capsys.readouterr().out)[1])
    done = subprocess.run([sys.executable, "-c", CODE, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    *_, peak_line, imported_line = done.stdout.splitlines()
    peak = float(peak_line.removeprefix("PEAK "))
    assert 0.7 * peak < predicted < 1.4 * peak
    assert imported_line == "IMPORTED []"
