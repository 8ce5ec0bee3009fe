"""Shared by all tests: quiet threads, no network, a cache of their own, the tree's packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# A busy machine is slow to draw inputs and to run examples; neither is a fault of what is tested.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("suite")

# Hubs cannot be reached from a test; without this each look-up retries for half a minute.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")
if "PYTEST_XDIST_WORKER" in os.environ:
    # A worker for each core: the commands that a test starts would wait for each other's threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tutorial: the longest test, which one worker would otherwise end with alone."""
    items.sort(key=lambda item: item.name != "test_the_tutorials_commands_print_what_it_shows")


@pytest.fixture(autouse=True, scope="session")
def _quiet_threads() -> None:
    """One thread per worker: xdist runs one worker per core."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trained feature networks of the tests do not touch the user's cache, and are shared by all workers."""
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    os.environ["XDG_CACHE_HOME"] = str(shared / "cache")


@pytest.fixture(scope="session")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The architecture of Stable Diffusion's VAE with few channels and random weights."""
    import torch
    from diffusers import AutoencoderKL

    folder = tmp_path_factory.mktemp("vae")
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The gathers and scatters of every stack, by name, in their order."""
    from routing.routed_pass import Tokens

    done: list[str] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def move(*args: object, **given: object) -> Any:
            done.append(original.__name__)
            return original(*args, **given)

        return move

    for name in ("gather", "scatter"):
        monkeypatch.setattr(Tokens, name, counted(getattr(Tokens, name)))
    return done
