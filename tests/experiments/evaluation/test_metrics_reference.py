"""Reference statistics: ADM's files and ours, what is refused, and what is never unpickled."""

import numpy as np
import pytest
import torch
from evaluation_tools import pictures
from PIL import Image

from experiments.evaluation import images
from experiments.evaluation.collect import collect
from experiments.evaluation.features import Features, pixel_features
from experiments.evaluation.images import Images
from experiments.evaluation.reference import load_reference, save_reference
from experiments.options.evaluation import MetricError


def other():
    return Features("inception-adm", 48, "1" * 64, pixel_features((4, 4)).measure)


@pytest.fixture
def pixels():
    return pixel_features((4, 4))


def test_an_array_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", mu=np.zeros(2**16))
    monkeypatch.setattr(images, "_UNCHECKED_BYTES", 1000)
    with pytest.raises(MetricError, match="mu would unpack from"):
        images.read_arrays(tmp_path / "x.npz", {"mu"})


def test_what_is_written_is_read_back(tmp_path, pixels):
    images = pictures(60, 4)
    found = collect(pixels, images.split(16), ("moments", "rows"))
    path = save_reference(tmp_path / "real.npz", pixels, found, "pictures")
    back = load_reference(path, pixels, rows=True)
    flat = images.flatten(1).double().numpy() / 255
    np.testing.assert_allclose(back.mu, flat.mean(0), rtol=1e-6)
    np.testing.assert_allclose(back.sigma, np.cov(flat, rowvar=False), rtol=1e-5, atol=1e-8)
    assert back.rows is not None
    assert torch.equal(back.rows, pixels(images)["features"])
    assert (back.n, back.name, back.features) == (60, "pictures", "pixels@00000000")
    assert back.label == f"pictures@{back.checksum[:8]}"
    assert not list(tmp_path.glob(".*"))


def test_adm_reference_batches_are_read(tmp_path):
    # The layout of VIRTUAL_imagenet256_labeled.npz: images beside moments, no word about the features.
    images = pictures(20, 4)
    rng = np.random.default_rng(0)
    arrays = {"mu": rng.normal(size=48), "sigma": np.eye(48), "mu_s": np.zeros(7), "sigma_s": np.eye(7)}
    path = tmp_path / "VIRTUAL.npz"
    np.savez(path, arr_0=images.permute(0, 2, 3, 1).numpy(), **arrays)
    back = load_reference(path, other(), rows=True, spatial=True)
    for key, value in arrays.items():
        assert np.array_equal(getattr(back, key), value)
    # Rows are not stored: they come from the images.
    assert back.rows is not None
    assert torch.equal(back.rows, images.flatten(1).float() / 255)


def test_other_features_are_refused(tmp_path, pixels):
    found = collect(pixels, [pictures(60, 4)], ("moments",))
    path = save_reference(tmp_path / "real.npz", pixels, found, "pictures")
    with pytest.raises(MetricError, match="holds features pixels@00000000, the samples have inception-adm@11111111"):
        load_reference(path, other())
    adm = tmp_path / "adm.npz"
    np.savez(adm, mu=np.zeros(48), sigma=np.eye(48))
    with pytest.raises(MetricError, match="use features inception-adm"):
        load_reference(adm, pixels)


def test_missing_parts_are_named(tmp_path):
    path = tmp_path / "part.npz"
    np.savez(path, mu=np.zeros(48))
    with pytest.raises(MetricError, match="has no sigma; expected reference statistics"):
        load_reference(path, other())
    np.savez(path, mu=np.zeros(48), sigma=np.eye(48))
    with pytest.raises(MetricError, match="no spatial statistics .* leave out sfid"):
        load_reference(path, other(), spatial=True)
    with pytest.raises(MetricError, match="has no images .*precision, recall, kid"):
        load_reference(path, other(), rows=True)


def test_folders_of_pictures(tmp_path):
    def save(image, name):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / name)

    images = pictures(5, 4)
    for i, image in enumerate(images):
        save(image, f"{i:03d}.{'tif' if i == 3 else 'png'}")  # whatever prepare reads too
    (tmp_path / "notes.txt").write_text("not a picture")
    folder = Images(tmp_path)
    assert folder.n == 5
    assert torch.equal(torch.cat(list(folder.batches(range(5), batch=2))), images)
    save(pictures(1, 6)[0], "900.png")
    for batch in (6, 5):  # alone in its batch too
        with pytest.raises(MetricError, match="900.png is 6x6, 000.png is 4x4"):
            list(Images(tmp_path).batches(range(6), batch))
