"""Feature extractors: the data set's own two networks, and the real Inception and DINOv2 with random weights."""

import io
import urllib.error
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_tools import pictures
from safetensors.torch import save_file
from small import small

from experiments.data import create
from experiments.data.downloads import unreachable_reason
from experiments.evaluation import create_features
from experiments.evaluation import features as extractors
from experiments.evaluation import published_networks as published
from experiments.evaluation.collect import collect
from experiments.evaluation.images import split_indices, whole_split
from experiments.evaluation.meters import Meter
from experiments.evaluation.reference import heldout_reference, load_reference, save_reference
from experiments.evaluation.small_networks import (
    CodeRecipe,
    NetworkPlan,
    Recipe,
    SmallAutoencoder,
    SmallClassifier,
    checksum,
    load_or_make,
)
from experiments.options.evaluation import EvalOptions, MetricError
from experiments.preflight import check_ready
from experiments.runtime.files import default_cache


@pytest.fixture(scope="module")
def digits():
    return create({"name": "digits"})


@pytest.fixture(scope="module")
def classifier(digits):
    return create_features("digits-classifier", cache=default_cache(), dataset=digits)


@pytest.fixture(scope="module")
def autoencoder(digits):
    return create_features("autoencoder", cache=default_cache(), dataset=digits)


def test_no_feature_of_the_two_networks_is_dead(digits, classifier, autoencoder):
    """So that the covariance of the held-out split has full rank."""
    features = classifier(whole_split(digits, "test")[0])["features"]
    assert torch.linalg.matrix_rank(torch.cov(features.double().T)).item() == classifier.dim == 64
    codes = autoencoder(whole_split(digits, "train")[0])["features"]
    # A code half as long as the image; no number of it outweighs the others, none is dead.
    assert codes.shape[1] == autoencoder.dim == 32
    assert 0.5 < codes.var(dim=0).min() < codes.var(dim=0).max() < 2


def plan_of(kind, fingerprint="a"):
    recipe = Recipe(epochs=1, width=4)
    build = partial(SmallClassifier, 8, 10, recipe)
    if kind == "autoencoder":
        recipe = CodeRecipe(steps=3, width=4, batch=16)
        build = partial(SmallAutoencoder, 8, recipe)
    return NetworkPlan("digits", kind, 8, [fingerprint], recipe, build)


@pytest.mark.parametrize("kind", ["classifier", "autoencoder"])
def test_a_network_is_trained_once_and_where_its_file_is_broken_again_to_the_same_weights(tmp_path, kind):
    calls = []

    def splits(name):
        calls.append(name)
        return pictures(48), torch.arange(48) % 10

    def get(fingerprint="a"):
        return load_or_make(tmp_path, plan_of(kind, fingerprint), splits)

    first = get()
    assert first.fresh and not first.model.training and not get().fresh
    assert get("b").path != first.path
    calls.clear()
    first.path.write_bytes(first.path.read_bytes()[:100])
    torch.manual_seed(2)  # the global state has no effect, and stays as it is
    state = torch.get_rng_state()
    assert get().fresh
    assert calls == ["train", "test"]
    assert checksum(get().model) == checksum(first.model)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_images_and_no_data_are_refused(classifier):
    with pytest.raises(MetricError, match="takes images of 8x8 pixels, got 16x16"):
        classifier(pictures(2, 16))
    with pytest.raises(MetricError, match="trained on a data set's images, and none is given"):
        create_features("autoencoder", cache="x")


def test_a_held_out_reference_is_computed_once(digits, classifier, autoencoder, tmp_path):
    first = heldout_reference(digits, classifier, tmp_path)
    assert first.n == digits.sizes["test"]
    (path,) = (tmp_path / "references").iterdir()
    stamp = path.stat().st_mtime_ns
    assert heldout_reference(digits, classifier, tmp_path).checksum == first.checksum
    assert path.stat().st_mtime_ns == stamp
    # Its name does not depend on the last digits of the file, which differ between machines.
    with np.load(path) as arrays:
        changed = {**arrays, "mu": arrays["mu"] + 1e-13}
    np.savez(path, **changed)
    assert heldout_reference(digits, classifier, tmp_path).label == first.label
    path.write_bytes(b"broken")
    assert np.array_equal(heldout_reference(digits, classifier, tmp_path).mu, first.mu)
    assert heldout_reference(digits, autoencoder, tmp_path).label != first.label


def test_other_images_under_the_same_name_have_their_own_reference(digits, classifier, tmp_path, monkeypatch):
    checksums = set()
    for fingerprint in ("before", "after"):
        monkeypatch.setattr(type(digits), "pixels_fingerprint", fingerprint)
        checksums.add(heldout_reference(digits, classifier, tmp_path).checksum)
    assert len(checksums) == len(list((tmp_path / "references").iterdir())) == 2


def test_an_even_selection_of_a_split(digits):
    chosen = split_indices(digits, "train", 100)
    assert (len(chosen), chosen[0]) == (100, 0)
    assert chosen.diff().min() >= digits.sizes["train"] // 100
    with pytest.raises(MetricError, match="has no validation split"):
        split_indices(digits, "validation")


def test_images_of_any_side_have_an_autoencoder():
    """They are halved while their side is even."""
    for side, dim in ((32, 64), (28, 64), (12, 64), (8, 32)):
        model = SmallAutoencoder(side, CodeRecipe(width=4)).eval()
        codes = model(pictures(2, side))["features"]
        assert codes.shape == (2, dim) and model.decoder(codes).shape == (2, 3, side, side)


# --- weights ------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch):
    def fail(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    monkeypatch.setattr(published, "hub_problem", lambda *args: "the hub cannot be reached")
    unreachable_reason.cache_clear()
    yield
    unreachable_reason.cache_clear()


@pytest.mark.usefixtures("offline")
def test_absent_weights_offline_are_one_sentence_before_a_run_too(tmp_path):
    inception = r"weights-inception-2015-12-05-6726825d\.pth.*no route to host.*eval.inception_weights=FILE"
    with pytest.raises(MetricError, match=inception):
        create_features("inception-adm", cache=tmp_path)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["lock"]
    cache = f"paths.cache={tmp_path}"
    dinov2 = "the hub cannot be reached.*eval.dinov2_weights=FILE"
    for message, word in ((inception, "eval=inception"), (dinov2, "train.encoder=dinov2-vits14")):
        with pytest.raises(MetricError, match=message):
            check_ready(small(tmp_path, cache, word), 1, False)
    file = tmp_path / "weights" / published.INCEPTION_FILE
    file.touch()
    check_ready(small(tmp_path, cache, "eval=inception"), 1, False)


def test_a_download_is_checked_before_it_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: io.BytesIO(b"data"))
    digest = "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"
    target = tmp_path / "weights" / published.INCEPTION_FILE
    with pytest.raises(MetricError, match="its checksum differs"):
        published.download_inception(tmp_path)
    assert not target.exists()
    monkeypatch.setattr(published, "INCEPTION_SHA256", digest[:8])
    assert published.download_inception(tmp_path).read_bytes() == b"data"
    target.write_bytes(b"else")
    with pytest.raises(MetricError, match="delete it, and it is downloaded again"):
        published.download_inception(tmp_path)


def test_weights_files_are_not_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "boom",))

    path = tmp_path / "w.pth"
    torch.save({"a": Bomb()}, path)
    with pytest.raises(MetricError, match="is not readable as"):
        published.read_inception(path)
    assert not (tmp_path / "boom").exists()


# --- the large networks, real architectures, random weights ---------------------------------------


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path = tmp_path_factory.mktemp("weights") / "none.pth"
    torch.save({}, path)
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        return published.build_inception(path)


@pytest.fixture(scope="module")
def inception(network):
    return extractors.inception(network)


@pytest.mark.slow
def test_inception_is_torch_fidelitys(network, inception):
    kept = {}
    hook = network.Mixed_6d.register_forward_hook(lambda m, i, o: kept.update(out=o))
    images = pictures(2, 32)
    outputs, (features, logits) = inception(images), network(images)
    hook.remove()
    assert torch.equal(outputs["features"], features) and torch.equal(outputs["logits"], logits)
    # mixed_6/conv is the first branch of the block: the first channels of what it returns. Rows run over height,
    # width, channel.
    whole = kept["out"]
    assert whole.shape == (2, 768, 17, 17) and outputs["spatial"].shape == (2, 17 * 17 * 7)
    table = outputs["spatial"].view(2, 17, 17, 7)
    for y, x, channel in ((0, 0, 0), (3, 11, 6), (16, 2, 4)):
        assert torch.equal(table[:, y, x, channel], whole[:, channel, y, x])


@pytest.mark.slow
def test_every_inception_metric_end_to_end(inception, tmp_path):
    real, fake = pictures(12, 32, 1), pictures(10, 32, 2) // 2
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


@pytest.mark.slow
def test_local_inception_weights_are_loaded(network, inception, tmp_path):
    path = tmp_path / "inception.pth"
    torch.save(network.state_dict(), path)
    again = create_features("inception-adm", EvalOptions(inception_weights=str(path)), cache=tmp_path)
    assert again.checksum == inception.checksum
    torch.save({"fc.weight": torch.zeros(3)}, path)
    with pytest.raises(MetricError, match="holds another network"):
        create_features("inception-adm", EvalOptions(inception_weights=str(path)), cache=tmp_path)


@pytest.mark.slow
def test_dinov2s_features_are_the_class_token_after_the_last_norm(tmp_path):
    import timm

    name = "dinov2-vits14"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = timm.create_model(published.DINOV2_MODELS[name], num_classes=0, img_size=224)
    features, images = extractors.dinov2(name, network), pictures(4, 32, 1)
    assert features.dim == 384
    x = torch.nn.functional.interpolate(images.float(), size=224, mode="bicubic", antialias=True)
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 1, 3, 1, 1)
    token = network.forward_features((x.clamp(0, 255) / 255 - mean) / std)[:, 0]
    assert torch.allclose(features(images)["features"], token, atol=1e-5)
    local = tmp_path / "model.safetensors"
    save_file(network.state_dict(), local)
    again = create_features(name, EvalOptions(dinov2_weights=str(local)), cache=tmp_path)
    assert again.checksum == features.checksum
