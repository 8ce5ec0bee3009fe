"""Encoded images, cropped as ADM prepared ImageNet: 8-bit RGB, upright, on white."""

import io

import hostile
import numpy as np
from PIL import Image

from experiments.data.raw_images import RawImage, center_crop, crop


def cropped(image, kind, size=8, **options):
    """Encode an image and crop it as prepare does."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return crop(RawImage("a", stream.getvalue(), None), size)


def test_crop_halves_with_a_box_filter_and_cuts_the_middle():
    pixels = np.random.default_rng(0).integers(0, 256, (128, 192, 3), dtype=np.uint8)
    expected = pixels.reshape(64, 2, 96, 2, 3).mean((1, 3))[:, 16:80]
    # Pillow rounds after each axis: at most one level off the mean of four pixels.
    assert np.abs(center_crop(Image.fromarray(pixels), 64) - expected).max() <= 1
    exact = pixels[:64, :80]
    assert np.array_equal(center_crop(Image.fromarray(exact), 64), exact[:, 8:72])
    for shape in ((37, 200), (200, 37), (65, 64), (1000, 65), (3, 3)):
        assert center_crop(Image.new("RGB", shape), 64).shape == (64, 64, 3)
    for mode in ("L", "RGBA", "P", "CMYK", "1", "I;16", "LA"):
        image = center_crop(Image.new(mode, (70, 64)), 64)
        assert image.shape == (64, 64, 3) and image.dtype == np.uint8


def test_sixteen_bits_are_scaled_to_eight():
    ramp = np.rint(np.linspace(0, 65535, 64)).reshape(8, 8).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = cropped(Image.fromarray(ramp), kind).pixels
        assert (pixels == np.rint(ramp / 257)[..., None]).all(), kind  # 65535 becomes 255


def test_photographs_are_turned_as_they_are_shown():
    sky = np.zeros((40, 60, 3), np.uint8)
    sky[:, :30] = 255  # of a camera that was held on its side
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        pixels = cropped(Image.fromarray(sky), kind, 16, exif=exif).pixels
        assert pixels[:7].min() > 200 and pixels[9:].max() < 50, kind
    damaged = exif.tobytes().replace(b"MM\0*", b"MM\0!")
    assert damaged != exif.tobytes()
    assert cropped(Image.fromarray(sky), "JPEG", 16, exif=damaged).pixels is not None


def test_what_is_transparent_is_laid_on_white():
    grey = np.full((8, 8), 100, np.uint8)
    alpha = np.zeros((8, 8), np.uint8)
    alpha[:4], alpha[4:6] = 255, 51  # opaque, a fifth, nothing
    expected = np.full((8, 8), 255.0)
    expected[:4], expected[4:6] = 100, 255 - 0.2 * 155
    rgba = np.stack([grey, grey, grey, alpha], -1)
    for pixels in (rgba, rgba[..., [0, 3]]):
        shown = cropped(Image.fromarray(pixels), "PNG").pixels
        assert np.abs(shown - expected[..., None]).max() <= 1
    palette = Image.fromarray((alpha == 255).astype(np.uint8)).convert("P")
    palette.putpalette([0, 0, 0, 100, 100, 100])
    shown = cropped(palette, "PNG", transparency=0).pixels
    assert (shown[:4] == 100).all() and (shown[4:] == 255).all()


def test_what_cannot_be_cropped_has_a_reason():
    image = cropped(Image.new("F", (8, 8)), "TIFF")
    assert image.pixels is None and "floating-point values" in image.reason
    with hostile.Memory() as memory:
        image = cropped(Image.new("L", (9_000, 100)), "PNG", 256)
    assert image.pixels is None and "9000x100 pixels are too long and narrow" in image.reason
    assert memory.grown < 100
