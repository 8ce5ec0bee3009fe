"""Icons out of the fonts that the package qtawesome brings, drawn once and kept in the cache.

The package is never imported (it wants Qt): only its font files and their lists of names are read.
"""

from __future__ import annotations

import collections
import hashlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from experiments.data.data_options import DataError, IconsOptions
from experiments.runtime.files import atomic_path, default_cache, sha256
from routing.parsing import json_of

#: Raise it when the drawing, the classes or the split change.
VERSION = 1

_SIDE = 28
# Drawn twice as large and averaged.
_DRAWN = 2 * _SIDE
# What the fonts add to a name for another drawing of the same thing.
_STYLES = {
    "alt", "bold", "circle", "duotone", "fill", "light", "line", "o", "outline", "outlined",
    "regular", "sharp", "solid", "square", "thin", "variant",
}  # fmt: skip
# Trademarks among the first words of names; the fonts of brands are left out as a whole.
_BRANDS = {"apple", "google", "logo", "microsoft"}


def read(options: IconsOptions) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], list[str]]:
    """Return the icons of the commonest first words; all drawings of a name are on one side."""
    folder = options.folder() / "fonts"
    try:
        kept, words = _kept(folder, options.class_count)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"data=icons: cannot read the fonts in {folder} ({error}); type "
            "pip install --force-reinstall --no-deps qtawesome"
        ) from None
    return {split: (kept[f"{split}-x"], kept[f"{split}-y"]) for split in ("train", "test")}, words


def _kept(folder: Path, classes: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return what `drawn` returns, from the cache if it is there, and the classes' names."""
    listed = {
        path: {
            name: chr(int(code, 16))
            for name, code in sorted(json_of(path.read_bytes()).items())
            if not _BRANDS & set(name.split("-"))
        }
        for path in sorted(folder.glob("*-charmap*.json"))
        if "brands" not in path.name
    }
    if not listed:
        raise FileNotFoundError("there is none")
    counts = collections.Counter(name.split("-")[0] for name in set().union(*listed.values()))
    words = sorted(sorted(counts, key=lambda word: (-counts[word], word))[:classes])
    files = map(sha256, sorted(folder.glob("*.[jt]*")))
    # FreeType draws, and its next version may draw another way.
    identity = repr([VERSION, words, features.version("freetype2"), *files])
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    path = default_cache() / "icons" / f"{key}.safetensors"
    try:
        return load_file(path), words
    except (OSError, SafetensorError):  # not there, or damaged
        made = drawn(listed, words)
    with atomic_path(path) as temporary:
        save_file(made, temporary)
    return made, words


def base(name: str) -> str:
    """Return an icon's name without the words at its end that only say how it is drawn."""
    words = name.split("-")
    while len(words) > 1 and words[-1] in _STYLES:
        words.pop()
    return "-".join(words)


def drawn(listed: dict[Path, dict[str, str]], words: list[str]) -> dict[str, np.ndarray]:
    """Draw the icons whose first word is in `words`, a fifth of the base names held out.

    Versions of one font share most drawings: of equal ones the first stays.

    Returns:
        `train-x` and `test-x`, images (N, 1, 28, 28) uint8, and `train-y` and `test-y`, labels.
    """
    found: dict[str, tuple[list, list]] = {"train": ([], []), "test": ([], [])}
    seen = set()
    for path, names in listed.items():
        file = path.with_name(path.name.replace("-charmap", "")).with_suffix(".ttf")
        font = ImageFont.truetype(str(file), _DRAWN)
        for name, character in names.items():
            word = name.split("-")[0]
            image = draw(font, character) if word in words else np.zeros(())
            if image.any() and image.tobytes() not in seen:
                seen.add(image.tobytes())
                held_out = hashlib.sha256(base(name).encode()).digest()[0] < 51
                images, labels = found["test" if held_out else "train"]
                images.append(image)
                labels.append(words.index(word))
    made = {f"{split}-x": np.stack(images)[:, None] for split, (images, _) in found.items()}
    return made | {f"{split}-y": np.array(labels) for split, (_, labels) in found.items()}


def draw(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray:
    """Return a character, white on black in the middle of (28, 28) uint8, shrunk if larger."""
    left, top, right, bottom = font.getbbox(character)
    width, height = int(right - left), int(bottom - top)
    side = max(_DRAWN, width, height)
    image = Image.new("L", (side, side))
    at = (side - width) // 2 - left, (side - height) // 2 - top
    ImageDraw.Draw(image).text(at, character, fill=255, font=font)
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX))
