"""What a reader of one training step meets: files, changes from one to another, calls of functions."""

import json
import subprocess
import sys

import pytest
from small import ROOT
from test_imports import PACKAGES

LIMITS = {"dit": (12, 60, 500), "mamba": (15, 120, 500)}

# Names the file of each call of ours between the second step of the optimizer and the third.
STEP = """
import json, runpy, sys, torch
from pathlib import Path
root, packages, files, steps = Path(sys.argv[1]), sys.argv[2].split(), [], []
update = torch.optim.AdamW.step
def called(frame, event, _):
    path = Path(frame.f_code.co_filename)
    if event == "call" and path.is_relative_to(root) and path.relative_to(root).parts[0] in packages:
        files.append(str(path.relative_to(root)))
def step(*given):
    steps.append(sys.setprofile(None))
    update(*given)
    sys.setprofile(called if len(steps) == 2 else None)
torch.optim.AdamW.step = step
sys.argv = [str(root / "experiments/run.py"), *sys.argv[3:]]
sys.path.insert(0, str(root))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(json.dumps(files))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backbone", list(LIMITS))
def test_a_reader_of_one_training_step_turns_few_pages(backbone, tmp_path):
    run = [f"backbone={backbone}", "route=2-8", "train.steps=4", "train.batch=8", "eval=none", "train.final_samples=false"]
    command = [sys.executable, "-c", STEP, str(ROOT), " ".join(PACKAGES), *run, f"paths.runs={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    files = json.loads(done.stdout.splitlines()[-1])
    changes = sum(a != b for a, b in zip(files, files[1:], strict=False))
    figures = len(set(files)), changes, len(files)
    for figure, limit in zip(figures, LIMITS[backbone], strict=True):
        assert 0 < figure <= limit, figures
