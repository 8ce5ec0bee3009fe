"""Feature extractors: the data set's own two networks, and the real Inception and DINOv2 with random weights."""

from __future__ import annotations

import io
import re
import threading
import time
import urllib.error
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small import small

from experiments.data import create
from experiments.data.downloads import unreachable_reason
from experiments.evaluation import Moments, create_features, frechet_distance
from experiments.evaluation import features as published
from experiments.evaluation.collect import collect
from experiments.evaluation.images import split_indices, whole_split
from experiments.evaluation.meters import Meter
from experiments.evaluation.reference import heldout_reference, load_reference, save_reference
from experiments.evaluation.small_networks import (
    CodeRecipe,
    Recipe,
    SmallAutoencoder,
    SmallClassifier,
    checksum,
    load_or_make,
)
from experiments.options.evaluation import EvalOptions, MetricError
from experiments.preflight import check_ready
from experiments.runtime.files import default_cache


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
    pixels, labels = whole_split(digits, "test")
    found = classifier(pixels)
    share = (found["logits"].argmax(1) == labels).double().mean().item()
    assert share >= 0.97
    assert f"{share:.1%} accuracy on held-out images" in classifier.note
    # No dead feature: the covariance of the held-out split has full rank.
    rank = torch.linalg.matrix_rank(torch.cov(found["features"].double().T)).item()
    assert rank == classifier.dim == 64


@pytest.fixture(scope="module")
def autoencoder(digits: object) -> object:
    return create_features("autoencoder", cache=default_cache(), dataset=digits)


def test_the_autoencoder_draws_held_out_digits_again(digits: object, autoencoder: object) -> None:
    (quality,) = re.findall(r"(\S+)% of held-out variance explained", autoencoder.note)
    assert float(quality) > 90
    codes = autoencoder(whole_split(digits, "train")[0])["features"]
    # A code half as long as the image; no number of it outweighs the others, none is dead.
    assert codes.shape[1] == autoencoder.dim == 32
    assert 0.5 < codes.var(dim=0).min() < codes.var(dim=0).max() < 2


def _classifier(folder: Path, fingerprint: str, splits: object) -> object:
    recipe = Recipe(epochs=1, width=4)
    build = partial(SmallClassifier, 8, 10, recipe)
    return load_or_make(folder, "digits", [fingerprint], recipe, build, splits)


def _autoencoder(folder: Path, fingerprint: str, splits: object) -> object:
    recipe = CodeRecipe(steps=3, width=4, batch=16)
    build = partial(SmallAutoencoder, 8, recipe)
    return load_or_make(folder, "digits", [fingerprint], recipe, build, splits)


@pytest.mark.parametrize("get", [_classifier, _autoencoder])
def test_training_is_repeatable_and_ignores_the_global_state(tmp_path: Path, get: object) -> None:
    def splits(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return noise(48, 8), torch.arange(48) % 10

    torch.manual_seed(1)
    first = get(tmp_path / "a", "a", splits)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = get(tmp_path / "b", "a", splits)
    assert first.fresh and second.fresh
    assert checksum(first.model) == checksum(second.model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not first.model.training


def test_a_broken_or_foreign_cache_file_is_made_again(tmp_path: Path) -> None:
    calls, get = [], _classifier

    def splits(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(name)
        return noise(24, 8), torch.arange(24) % 10

    first = get(tmp_path, "a", splits)
    assert first.fresh
    assert not get(tmp_path, "a", splits).fresh
    assert get(tmp_path, "b", splits).path != first.path
    calls.clear()
    first.path.write_bytes(first.path.read_bytes()[:100])
    assert get(tmp_path, "a", splits).fresh
    assert calls == ["train", "test"]
    assert checksum(get(tmp_path, "a", splits).model) == checksum(first.model)


def test_of_two_that_want_a_network_one_trains_it(tmp_path: Path) -> None:
    trained = []

    class Slow(torch.nn.Linear):
        def learn(self, images: torch.Tensor) -> None:
            trained.append(time.sleep(0.3))

        def quality(self, images: torch.Tensor) -> float:
            return 0.5

    def get() -> None:
        build, splits = lambda: Slow(2, 2), lambda split: (noise(1, 8),)
        found.append(load_or_make(tmp_path, "x", [1], Recipe(), build, splits))

    found: list = []
    threads = [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trained) == 1
    assert sorted(kept.fresh for kept in found) == [False, True]
    assert len({checksum(kept.model) for kept in found}) == 1


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
    with pytest.raises(MetricError, match="trained on a data set's images, and none is given"):
        create_features("autoencoder", cache="x")


def test_held_out_reference_is_computed_once(digits: object, classifier: object, tmp_path: Path) -> None:
    first = heldout_reference(digits, classifier, tmp_path)
    assert first.n == digits.sizes["test"]
    (path,) = (tmp_path / "references").iterdir()
    stamp = path.stat().st_mtime_ns
    assert heldout_reference(digits, classifier, tmp_path).checksum == first.checksum
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(b"broken")
    assert np.array_equal(heldout_reference(digits, classifier, tmp_path).mu, first.mu)


@pytest.mark.parametrize("space", ["classifier", "autoencoder"])
def test_held_out_digits_score_better_than_noise(digits: object, space: str, request: pytest.FixtureRequest) -> None:
    features = request.getfixturevalue(space)
    real = heldout_reference(digits, features, default_cache())
    metrics = ("fd", "precision", "recall", "kid") + ("accuracy",) * (space == "classifier")
    values = {}
    pixels, labels = whole_split(digits, "train")
    for name, sample in (("train", pixels), ("noise", noise(300, 8))):
        meter = Meter(features, metrics, EvalOptions(), real)
        for part in sample.split(128):
            meter.update(part)
        asked = labels if name == "train" else torch.arange(300) % 10
        values[name] = {r.key: r.value for r in meter.results(asked)}
    assert values["train"]["fd"] < 5 < values["noise"]["fd"]
    assert values["train"]["precision"] > 0.8 > values["noise"]["precision"]
    assert values["train"]["recall"] > 0.8 > values["noise"]["recall"]
    assert values["train"]["kid"] < values["noise"]["kid"]
    if space == "classifier":
        assert values["train"]["accuracy"] > 0.97 > 0.4 > values["noise"]["accuracy"]


def test_an_even_selection_of_a_split(digits: object) -> None:
    chosen = split_indices(digits, "train", 100)
    assert len(chosen) == 100
    assert chosen[0] == 0
    assert chosen.diff().min() >= digits.sizes["train"] // 100
    assert len(whole_split(digits, "test")[0]) == digits.sizes["test"]
    with pytest.raises(MetricError, match="has no validation split"):
        split_indices(digits, "validation")


def test_larger_images_have_networks_too() -> None:
    found = SmallClassifier(32, 5, Recipe(width=4))(noise(2, 32))
    assert found["features"].shape == (2, 64)
    assert found["logits"].shape == (2, 5)
    # Whatever side a data set has: halved while it is even.
    for side, dim in ((32, 64), (28, 64), (12, 64), (8, 32)):
        model = SmallAutoencoder(side, CodeRecipe(width=4)).eval()
        codes = model(noise(2, side))["features"]
        assert codes.shape == (2, dim)
        assert model.decoder(codes).shape == (2, 3, side, side)


# --- weights ------------------------------------------------------------------------------------


def test_absent_weights_offline_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(MetricError) as caught:
        create_features("inception-adm", cache=tmp_path)
    message = str(caught.value)
    for part in ("no route to host", "weights-inception-2015-12-05-6726825d.pth", "eval.inception_weights=FILE"):
        assert part in message
    assert "\n" not in message
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["lock"]


def test_a_check_before_the_run_refuses_absent_weights_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    monkeypatch.setattr(published, "hub_problem", lambda *args: "the hub cannot be reached")
    unreachable_reason.cache_clear()
    cache = f"paths.cache={tmp_path}"
    cases = {
        "weights-inception-2015.*no route to host.*eval.inception_weights=FILE": ["eval=inception"],
        "the hub cannot be reached.*eval.dinov2_weights=FILE": ["train.encoder=dinov2-vits14"],
    }
    for message, words in cases.items():
        with pytest.raises(MetricError, match=message):
            check_ready(small(tmp_path, cache, *words), 1, False)
    file = tmp_path / "weights" / published.URL.rsplit("/", 1)[1]
    file.parent.mkdir()
    file.touch()
    check_ready(small(tmp_path, cache, "eval=inception"), 1, False)
    unreachable_reason.cache_clear()


def test_a_download_is_checked_before_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: io.BytesIO(b"data"))
    digest = "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"
    target = tmp_path / "weights" / published.URL.rsplit("/", 1)[1]
    with pytest.raises(MetricError, match="its checksum differs"):
        published._published(tmp_path)
    assert not target.exists()
    monkeypatch.setattr(published, "SHA256", digest[:8])
    assert published._published(tmp_path).read_bytes() == b"data"
    target.write_bytes(b"else")
    with pytest.raises(MetricError, match="delete it and run again"):
        published._published(tmp_path)


def test_weights_files_are_not_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "boom",))

    path = tmp_path / "w.pth"
    torch.save({"a": Bomb()}, path)
    with pytest.raises(MetricError, match="is not readable as"):
        published.load_state(path, "weights", "key")
    assert not (tmp_path / "boom").exists()
    with pytest.raises(MetricError, match="No such file"):
        published.load_state(tmp_path / "none.pth", "weights", "key")


# --- the large networks, real architectures, random weights ---------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path = tmp_path_factory.mktemp("weights") / "none.pth"
    torch.save({}, path)
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        network = published.build_inception(path)
    return network, published.inception(network)


@pytest.fixture(scope="module")
def inception(both: tuple) -> object:
    return both[1]


@pytest.mark.slow
def test_inception_is_torch_fidelitys(both: tuple) -> None:
    network, inception = both
    found = inception(noise(2, 32))
    direct = network(noise(2, 32))
    assert torch.equal(found["features"], direct[0])
    assert torch.equal(found["logits"], direct[1])
    assert found["spatial"].shape == (2, 17 * 17 * 7)


@pytest.mark.slow
def test_spatial_features_are_rows_over_height_width_channel(both: tuple) -> None:
    kept, (network, inception) = {}, both
    hook = network.Mixed_6d.register_forward_hook(lambda m, i, o: kept.update(out=o))
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
    path = save_reference(tmp_path / "real.npz", inception, collect(inception, real.split(6), wanted), "noise")
    reference = load_reference(path, inception, rows=True, spatial=True)
    metrics = ("fd", "sfid", "is", "precision", "recall", "kid")
    meter = Meter(inception, metrics, EvalOptions(kid_subset_size=8, kid_subsets=4), reference)
    meter.update(fake[:6])
    meter.update(fake[6:])
    with pytest.warns(UserWarning, match="singular"):
        values = {r.key: r.value for r in meter.results()}
    assert set(values) == set(metrics)
    assert all(np.isfinite(v) for v in values.values())
    assert values["is"] >= 1
    rows = collect(inception, [fake], ("rows",))["rows"]
    moments = Moments(2048).update(rows).finish()
    with pytest.warns(UserWarning, match="singular"):
        direct = frechet_distance(*moments, reference.mu, reference.sigma)
    assert values["fd"] == pytest.approx(direct, rel=1e-6)


@pytest.mark.slow
def test_local_inception_weights_are_loaded(both: tuple, tmp_path: Path) -> None:
    path, (network, inception) = tmp_path / "inception.pth", both
    torch.save(network.state_dict(), path)
    again = create_features("inception-adm", EvalOptions(inception_weights=str(path)), cache=tmp_path)
    assert again.checksum == inception.checksum
    for state in ({"fc.weight": torch.zeros(3)}, {}):
        torch.save(state, path)
        with pytest.raises(MetricError, match="holds another network"):
            create_features("inception-adm", EvalOptions(inception_weights=str(path)), cache=tmp_path)


@pytest.mark.slow
def test_fd_dinov2_end_to_end(tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    name = "dinov2-vits14"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = timm.create_model(published.MODELS[name], num_classes=0, img_size=224)
    features = published.dinov2(name, network)
    assert features.dim == 384
    real, fake = noise(4, 32, 1), noise(4, 32, 2) // 2
    path = save_reference(tmp_path / "real.npz", features, collect(features, [real], ("moments", "rows")), "noise")
    reference = load_reference(path, features, rows=True)
    meter = Meter(features, ("fd", "kid"), EvalOptions(), reference)
    meter.update(fake)
    with pytest.warns(UserWarning, match="singular"):
        values = {r.key: r.value for r in meter.results()}
    assert values["fd"] > 0
    # The class token after the last norm, and the same weights from a local file.
    x = torch.nn.functional.interpolate(real.float(), size=224, mode="bicubic", antialias=True)
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 1, 3, 1, 1)
    x = (x.clamp(0, 255) / 255 - mean) / std
    token = network.forward_features(x)[:, 0]
    assert torch.allclose(features(real)["features"], token, atol=1e-5)
    local = tmp_path / "model.safetensors"
    save_file(network.state_dict(), local)
    again = create_features(name, EvalOptions(dinov2_weights=str(local)), cache=tmp_path)
    assert again.checksum == features.checksum
