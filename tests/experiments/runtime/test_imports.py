"""What a training run does not import: packages that take seconds and are needed for little or nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = """
import sys
from experiments import run
words = ["backbone=mamba", "route=2-8", "train.steps=2", "eval=none", "sampler.steps=1", "paths.runs=RUNS"]
assert run.main(words) == 0
print([name for name in ("sklearn", "scipy", "torch._dynamo") if name in sys.modules])
"""


@pytest.mark.slow
def test_a_run_imports_neither_scikit_learn_nor_a_compiler(tmp_path):
    code = CODE.replace("RUNS", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
