import json
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import torch

from experiments.data import DataError, IconsOptions, create, icon_fonts

FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
# Letters play icons: two fonts with the same drawings, variants of a name, and a brand.
LISTED = {"cup": "41", "cup-bold": "42", "cup-red-fill": "43", "key": "0x44", "key-line": "45", "dot": "46", "google-key": "47"}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The fonts of a package as qtawesome's, with one handwritten list of names."""
    fonts = tmp_path / "package" / "fonts"
    fonts.mkdir(parents=True)
    for font in ("one", "two", "acme-brands"):
        shutil.copy(FONT, fonts / f"{font}-webfont-1.0.ttf")
        extra = {"logos-a": "48", "logos-b": "49"} if "brands" in font else {}
        text = json.dumps({**LISTED, **extra})
        (fonts / f"{font}-webfont-charmap-1.0.json").write_text(text)
    monkeypatch.setattr(IconsOptions, "package_folder", lambda self: fonts.parent)
    return fonts


def test_each_drawing_is_there_once_with_its_first_word(folder):
    splits, words, *_ = icon_fonts.render_icons(folder, 2)
    assert words == ["cup", "key"]
    labels = sorted(int(y) for split in ("train", "test") for y in splits[split][1])
    assert labels == [0, 0, 0, 1, 1]
    images = [x for split in ("train", "test") for x in splits[split][0]]
    assert len({x.tobytes() for x in images}) == 5
    for image in images:
        assert image.shape == (1, 28, 28) and image.dtype == "uint8"
        rows, columns = image[0].any(1).nonzero()[0], image[0].any(0).nonzero()[0]
        for ink in (rows, columns):  # in the middle, give or take the pixel that is cut in half
            assert abs(ink[0] - (27 - ink[-1])) <= 1


def test_variants_share_a_base_name():
    bases = {"bell-ring-outline": "bell-ring", "box-alt-o": "box", "circle": "circle", "light-bulb": "light-bulb"}
    assert {name: icon_fonts.base_name(name) for name in bases} == bases


def test_without_the_fonts(folder):
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="cannot read the fonts.*no lists of characters"):
        create({"name": "icons"})


@pytest.mark.slow
def test_the_icons_of_the_real_fonts():
    data = create({"name": "icons"})
    count = sum(data.sizes.values())
    assert count > 5000 and 0.15 < data.sizes["test"] / count < 0.25
    splits = [data.batch(torch.arange(size), None, split) for split, size in data.sizes.items()]
    assert all((batch.y.bincount(minlength=50) >= 5).all() for batch in splits)
    assert len(torch.cat([batch.x for batch in splits]).flatten(1).unique(dim=0)) == count
    code = "import sys, experiments.data as d; d.create({'name': 'icons'}); print({'qtawesome', 'qtpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
