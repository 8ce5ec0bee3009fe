"""Shared by the tests of pictures: seven encoded pictures in three classes, in memory and in a folder."""

import io

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def pictures():
    """Encoded pictures of random blots, by the name of their class and file; those in `grey` have one channel."""
    random = np.random.default_rng(0)
    names = ("animals/cat", "animals/flower", "grey/camera", "grey/coins", "things/astronaut", "things/coffee", "things/house")
    encoded = {}
    for name in names:
        blots = random.integers(0, 256, (12, 16) if name.startswith("grey") else (12, 16, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(blots).resize((400, 300), Image.Resampling.BICUBIC).save(stream, "PNG")
        encoded[f"{name}.png"] = stream.getvalue()
    return encoded


@pytest.fixture
def folder(tmp_path, pictures):
    for name, content in pictures.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "photos"
