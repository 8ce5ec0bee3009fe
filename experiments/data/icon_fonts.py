"""Images of data=icons, rendered from qtawesome's fonts.

Only the font files and their lists of names are read; qtawesome itself requires Qt.
"""

from __future__ import annotations

import collections
import hashlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from backbones.parsing import json_of
from experiments.data.data_options import DataError
from experiments.data.image_options import IconsOptions
from experiments.data.image_sets import LabelledImages, Split

_SIDE = 28
# Rendered at twice the size and averaged.
_RENDERED_SIDE = 2 * _SIDE
# Last words of names that only distinguish drawing styles of the same icon.
_STYLES = {
    "alt", "bold", "circle", "duotone", "fill", "light", "line", "o", "outline", "outlined",
    "regular", "sharp", "solid", "square", "thin", "variant",
}  # fmt: skip
# Trademarks among the words of names. Whole fonts of brands are left out too.
_BRANDS = {"apple", "google", "logo", "microsoft"}


def read_icons(options: IconsOptions) -> LabelledImages:
    """Render the icons of the most frequent first words."""
    folder = options.package_folder() / "fonts"
    try:
        return render_icons(folder, options.class_count)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"data=icons: cannot read the fonts in {folder} ({error}); type "
            "pip install --force-reinstall --no-deps qtawesome"
        ) from None


def base_name(name: str) -> str:
    """Return an icon's name without the trailing words that only describe its style."""
    words = name.split("-")
    while len(words) > 1 and words[-1] in _STYLES:
        words.pop()
    return "-".join(words)


def render_icons(folder: Path, class_count: int) -> LabelledImages:
    """Render the icons of the most frequent first words, (N, 1, 28, 28).

    A fifth of the base names is held out, with all their styles. Versions of one font share most
    drawings, so duplicates are dropped.
    """
    characters = _characters_by_font(folder)
    names = set().union(*characters.values())
    counts = collections.Counter(name.split("-")[0] for name in names)
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    class_names = sorted(by_frequency[:class_count])
    images: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    rendered = set()
    for path, characters_by_name in characters.items():
        font_file = path.with_name(path.name.replace("-charmap", "")).with_suffix(".ttf")
        font = ImageFont.truetype(str(font_file), _RENDERED_SIDE)
        for name, character in characters_by_name.items():
            class_name = name.split("-")[0]
            if class_name not in class_names:
                continue
            image = render_character(font, character)
            if not image.any() or image.tobytes() in rendered:
                continue
            rendered.add(image.tobytes())
            held_out = hashlib.sha256(base_name(name).encode()).digest()[0] < 51  # of 256
            split = "test" if held_out else "train"
            images[split].append(image)
            labels[split].append(class_names.index(class_name))
    splits: dict[str, Split] = {}
    for split in images:
        splits[split] = np.stack(images[split])[:, None], np.array(labels[split])
    return LabelledImages(splits, class_names)


def _characters_by_font(folder: Path) -> dict[Path, dict[str, str]]:
    """Return the characters of each font by the names of its icons, without brands."""
    characters: dict[Path, dict[str, str]] = {}
    for path in sorted(folder.glob("[!.]*-charmap*.json")):
        if "brands" in path.name:
            continue
        characters[path] = {}
        for name, code in sorted(json_of(path.read_bytes()).items()):
            if not _BRANDS & set(name.split("-")):
                characters[path][name] = chr(int(code, 16))
    if not characters:
        raise FileNotFoundError("no lists of characters there")
    return characters


def render_character(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray:
    """Return a character, white on black, centred in (28, 28) uint8 and shrunk to fit."""
    left, top, right, bottom = font.getbbox(character)
    width, height = int(right - left), int(bottom - top)
    side = max(_RENDERED_SIDE, width, height)
    image = Image.new("L", (side, side))
    position = (side - width) // 2 - left, (side - height) // 2 - top
    ImageDraw.Draw(image).text(position, character, fill=255, font=font)
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX))
