"""Feature extractors: the digits classifier, and the real Inception and DINOv2 with random weights."""

from __future__ import annotations

import io
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.data import create
from experiments.metrics import (
    EvalOptions,
    Moments,
    create_features,
    frechet_distance,
    pretrained,
)
from experiments.metrics.classifier import Recipe, SmallClassifier, checksum, load_or_train, train
from experiments.metrics.collect import collect
from experiments.metrics.eval_options import MetricError
from experiments.metrics.features import identity
from experiments.metrics.images import labelled_images, split_images, split_indices
from experiments.metrics.meters import Meter
from experiments.metrics.reference import heldout, load, save
from experiments.metrics.scoring import default_cache


def noise(n: int, side: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, side, side), generator=generator, dtype=torch.uint8)


# --- digits -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> object:
    return create({"name": "digits"})


@pytest.fixture(scope="module")
def classifier(digits: object) -> object:
    return create_features("digits-classifier", cache=default_cache(), dataset=digits)


def test_the_classifier_is_right_on_held_out_digits(digits: object, classifier: object) -> None:
    pixels, labels = labelled_images(digits, "test")
    found = classifier(pixels)
    share = (found["logits"].argmax(1) == labels).double().mean().item()
    assert share >= 0.97
    assert share == classifier.accuracy
    assert f"{share:.1%} of held-out images right" in classifier.note
    # No dead feature: the covariance of the held-out split has full rank.
    rank = torch.linalg.matrix_rank(torch.cov(found["features"].double().T)).item()
    assert rank == classifier.dim == 64


def test_the_classifier_is_kept_and_taken_again(digits: object, classifier: object) -> None:
    again = create_features("digits-classifier", cache=default_cache(), dataset=digits)
    assert "trained now" not in again.note
    assert identity(again) == identity(classifier)


def test_training_is_repeatable_and_ignores_the_global_state() -> None:
    recipe = Recipe(epochs=1, width=4)
    pixels, labels = noise(48, 8), torch.arange(48) % 10
    torch.manual_seed(1)
    first = train(pixels, labels, 10, recipe)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = train(pixels, labels, 10, recipe)
    assert checksum(first) == checksum(second)
    assert torch.equal(torch.get_rng_state(), state)
    assert not first.training


def test_a_broken_or_foreign_cache_file_is_made_again(tmp_path: Path) -> None:
    recipe = Recipe(epochs=1, width=4)
    calls = []

    def splits(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(name)
        return noise(24, 8), torch.arange(24) % 10

    def get(fingerprint: str = "a") -> object:
        return load_or_train("digits", fingerprint, 8, 10, splits, tmp_path, recipe)

    first = get()
    assert first.fresh
    assert not get().fresh
    assert get("b").path != first.path
    calls.clear()
    first.path.write_bytes(first.path.read_bytes()[:100])
    assert get().fresh
    assert calls == ["train", "test"]
    assert get().checksum == first.checksum


def test_other_images_and_other_data_are_refused(digits: object, classifier: object) -> None:
    with pytest.raises(MetricError, match="takes images of 8x8 pixels, got 16x16"):
        classifier(noise(2, 16))
    with pytest.raises(MetricError, match="uint8 images"):
        classifier(torch.zeros(2, 3, 8, 8))
    other = SimpleNamespace(name="latents", task="class")
    with pytest.raises(MetricError, match="is for data=digits, here is the data set latents"):
        create_features("digits-classifier", cache="x", dataset=other)
    with pytest.raises(MetricError, match="did you mean digits-classifier"):
        create_features("digit-classifier", cache="x", dataset=digits)


def test_held_out_reference_is_computed_once(
    digits: object, classifier: object, tmp_path: Path
) -> None:
    first = heldout(digits, classifier, tmp_path)
    assert first.n == digits.sizes["test"]
    (path,) = (tmp_path / "references").iterdir()
    stamp = path.stat().st_mtime_ns
    assert heldout(digits, classifier, tmp_path).checksum == first.checksum
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(b"broken")
    assert np.array_equal(heldout(digits, classifier, tmp_path).mu, first.mu)


def test_held_out_digits_score_better_than_noise(digits: object, classifier: object) -> None:
    real = heldout(digits, classifier, default_cache())
    metrics = ("fd", "accuracy", "precision", "recall", "kid")
    values = {}
    pixels, labels = labelled_images(digits, "train")
    for name, sample in (("train", pixels), ("noise", noise(300, 8))):
        meter = Meter(classifier, metrics, EvalOptions(), real)
        for part in sample.split(128):
            meter.update(part)
        asked = labels if name == "train" else torch.arange(300) % 10
        values[name] = {r.key: r.value for r in meter.results(asked)}
    assert values["train"]["fd"] < 5 < values["noise"]["fd"]
    assert values["train"]["accuracy"] > 0.97 > 0.4 > values["noise"]["accuracy"]
    assert values["train"]["precision"] > 0.8 > values["noise"]["precision"]
    assert values["train"]["recall"] > 0.8 > values["noise"]["recall"]
    assert values["train"]["kid"] < values["noise"]["kid"]


def test_an_even_selection_of_a_split(digits: object) -> None:
    chosen = split_indices(digits, "train", 100)
    assert len(chosen) == 100
    assert chosen[0] == 0
    assert chosen.diff().min() >= digits.sizes["train"] // 100
    assert sum(len(x) for x in split_images(digits, "test", batch=100)) == digits.sizes["test"]
    with pytest.raises(MetricError, match="has no validation split"):
        split_indices(digits, "validation")


def test_larger_images_have_a_classifier_too() -> None:
    features, logits = SmallClassifier(32, 5, Recipe(width=4))(noise(2, 32))
    assert features.shape == (2, 64)
    assert logits.shape == (2, 5)


# --- weights ------------------------------------------------------------------------------------


def test_absent_weights_offline_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(pretrained.urllib.request, "urlopen", offline)
    with pytest.raises(MetricError) as caught:
        create_features("inception-adm", cache=tmp_path)
    message = str(caught.value)
    for part in (
        "no route to host",
        "weights-inception-2015-12-05-6726825d.pth",
        "eval.inception_weights=FILE",
    ):
        assert part in message
    assert "\n" not in message
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_download_is_checked_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained.urllib.request, "urlopen", lambda *a, **k: io.BytesIO(b"data"))
    digest = "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"
    target = tmp_path / "w.pth"
    with pytest.raises(MetricError, match="its checksum differs"):
        pretrained.fetch("https://x/w.pth", target, "0000", "weights", "key")
    assert not target.exists()
    assert (
        pretrained.fetch("https://x/w.pth", target, digest[:8], "weights", "key").read_bytes()
        == b"data"
    )
    target.write_bytes(b"else")
    with pytest.raises(MetricError, match="delete it and run again"):
        pretrained.fetch("https://x/w.pth", target, digest[:8], "weights", "key")


def test_weights_files_are_not_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "boom",))

    path = tmp_path / "w.pth"
    torch.save({"a": Bomb()}, path)
    with pytest.raises(MetricError, match="is not readable as"):
        pretrained.load_state(path, "weights", "key")
    assert not (tmp_path / "boom").exists()
    with pytest.raises(MetricError, match="no such file"):
        pretrained.load_state(tmp_path / "none.pth", "weights", "key")


def test_absent_dinov2_weights_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MetricError, match="dinov2_weights=.*: no such file; expected vit_small"):
        create_features(
            "dinov2-vits14", EvalOptions(dinov2_weights=str(tmp_path / "x")), cache=tmp_path
        )


# --- the large networks, real architectures, random weights ---------------------------------------


@pytest.fixture(scope="module")
def inception() -> object:
    from experiments.metrics.pretrained import InceptionFeatures, build_inception

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build_inception()
    return InceptionFeatures(None, cache=Path(), network=network)


@pytest.mark.slow
def test_inception_is_torch_fidelitys(inception: object) -> None:
    found = inception(noise(2, 32))
    direct = inception.network(noise(2, 32))
    assert torch.equal(found["features"], direct[0])
    assert torch.equal(found["logits"], direct[1])
    assert found["spatial"].shape == (2, 17 * 17 * 7)


@pytest.mark.slow
def test_spatial_features_are_rows_over_height_width_channel(inception: object) -> None:
    kept = {}
    hook = inception.network.Mixed_6d.register_forward_hook(lambda m, i, o: kept.update(out=o))
    found = inception(noise(2, 64))
    hook.remove()
    # mixed_6/conv is the first branch of the block: the first channels of what it returns.
    whole = kept["out"]
    assert whole.shape == (2, 768, 17, 17)
    table = found["spatial"].view(2, 17, 17, 7)
    for y, x, channel in ((0, 0, 0), (3, 11, 6), (16, 2, 4)):
        assert torch.equal(table[:, y, x, channel], whole[:, channel, y, x])


@pytest.mark.slow
def test_every_inception_metric_end_to_end(inception: object, tmp_path: Path) -> None:
    real, fake = noise(12, 32, 1), noise(10, 32, 2) // 2
    wanted = ("moments", "rows", "spatial")
    path = save(
        tmp_path / "real.npz", inception, collect(inception, real.split(6), wanted), "noise"
    )
    reference = load(path, inception, rows=True, spatial=True)
    metrics = ("fd", "sfid", "is", "precision", "recall", "kid")
    meter = Meter(inception, metrics, EvalOptions(kid_subset_size=8, kid_subsets=4), reference)
    meter.update(fake[:6])
    meter.update(fake[6:])
    with pytest.warns(UserWarning, match="singular"):
        values = {r.key: r.value for r in meter.results()}
    assert set(values) == set(metrics)
    assert all(np.isfinite(v) for v in values.values())
    assert values["is"] >= 1
    rows = collect(inception, [fake], ("rows",)).rows
    moments = Moments(2048).update(rows).finish()
    with pytest.warns(UserWarning, match="singular"):
        direct = frechet_distance(*moments, reference.mu, reference.sigma)
    assert values["fd"] == pytest.approx(direct, rel=1e-6)


@pytest.mark.slow
def test_local_inception_weights_are_loaded(inception: object, tmp_path: Path) -> None:
    path = tmp_path / "inception.pth"
    torch.save(inception.network.state_dict(), path)
    again = create_features(
        "inception-adm", EvalOptions(inception_weights=str(path)), cache=tmp_path
    )
    assert again.checksum == inception.checksum
    torch.save({"fc.weight": torch.zeros(3)}, path)
    with pytest.raises(MetricError, match="holds another network"):
        create_features("inception-adm", EvalOptions(inception_weights=str(path)), cache=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dim"), [("dinov2-vits14", 384), ("dinov2-vitl14", 1024)])
def test_fd_dinov2_end_to_end(name: str, dim: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from experiments.metrics.pretrained import DinoFeatures, build_dinov2

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build_dinov2(name, pretrained=False)
    features = DinoFeatures(name, network=network)
    assert features.dim == dim
    real, fake = noise(4, 32, 1), noise(4, 32, 2) // 2
    path = save(
        tmp_path / "real.npz", features, collect(features, [real], ("moments", "rows")), "noise"
    )
    reference = load(path, features, rows=True)
    meter = Meter(features, ("fd", "kid"), EvalOptions(), reference)
    meter.update(fake)
    with pytest.warns(UserWarning, match="singular"):
        values = {r.key: r.value for r in meter.results()}
    assert values["fd"] > 0
    if name == "dinov2-vits14":
        # The class token after the last norm, and the same weights from a local file.
        x = torch.nn.functional.interpolate(real.float(), size=224, mode="bicubic", antialias=True)
        x = (x.clamp(0, 255) / 255 - features.mean) / features.std
        token = network.forward_features(x)[:, 0]
        assert torch.allclose(features(real)["features"], token, atol=1e-5)
        local = tmp_path / "model.safetensors"
        save_file(network.state_dict(), local)
        again = create_features(name, EvalOptions(dinov2_weights=str(local)), cache=tmp_path)
        assert again.checksum == features.checksum
