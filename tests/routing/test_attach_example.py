"""The example that the README shows runs, routes and learns."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "route_your_own.py"


def test_route_your_own_learns(capsys):
    pytest.importorskip("timm")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        accuracy = runpy.run_path(str(EXAMPLE))["main"]("1-3@0.5", 100)
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "tokens 16 -> [8] in 1-3@0.5" in printed and "held-out accuracy" in printed
    assert accuracy > 0.2  # chance is 0.1; 300 steps reach about 0.8
