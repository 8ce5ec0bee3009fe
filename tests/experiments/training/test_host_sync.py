"""A training step never waits for its GPU: on fake CUDA tensors, and on a real one where there is one."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from fake_gpu_steps import CASES, prepared

HERE = Path(__file__).parent


@pytest.mark.slow
def test_steps_on_a_fake_gpu_read_nothing_back():
    # Tables that are made of fake tensors would stay in this process.
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / "fake_gpu_steps.py")]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0 and "14 passed" in done.stdout, done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "route", "selection"), CASES)
def test_torch_sees_no_wait_in_a_step(name, route, selection):
    step = prepared(name, route, selection, torch.device("cuda"))
    step()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It says that it is a prototype.
            torch.cuda.set_sync_debug_mode("error")
        step()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
