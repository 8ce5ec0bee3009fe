"""From a model to scores: what is recorded, what can be resumed, and what is refused before sampling."""

import pytest
import torch
from small import make_model_and_data, small

from backbones.cost import cost
from experiments.data import create
from experiments.evaluation import pipeline, read_shards, scoring
from experiments.evaluation.collect import collect
from experiments.evaluation.features import create_features
from experiments.evaluation.meters import AdherenceMeter, create_meters
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.reference import save_reference
from experiments.evaluation.sample_batches import sample_conditions
from experiments.evaluation.small_networks import checksum
from experiments.options.evaluation import MetricError
from experiments.runtime.files import default_cache


class Case:
    """A narrow model with random weights on digits."""

    def __init__(self, folder, *overrides):
        self.config = small(folder, "eval=digits", "eval.samples=40", "eval.batch=16", *overrides)
        self.model, self.dataset = make_model_and_data(self.config)
        self.model.eval()

    def score(self, **changes):
        found = scoring.score(self.model, self.config, self.dataset, step=7, **changes)
        # In the first features, where a metric is measured in several.
        return {s.key: s for s in reversed(found)}

    def run(self, out=None, **changes):
        options = scoring.options_for(self.config, **changes)
        pipe = SamplingPipeline.make(self.model, self.config)
        identity = checksum(self.model)
        return scoring.sample_and_score(pipe, self.config, self.dataset, options, step=7, out=out, identity=identity)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("runs"), "route=1-2", "guidance=cfg")


def test_a_score_says_all_that_is_needed_to_read_it(case):
    with pytest.warns(UserWarning, match="singular"):
        found = case.score()
    assert set(found) >= {"fd", "accuracy", "precision", "recall", "memorisation"}
    fd = found["fd"].to_dict()
    assert (fd["metric"], fd["n"]) == ("FD-40 (digits-classifier)", 40)
    assert fd["features"].startswith("digits-classifier@")
    assert fd["reference"].startswith("digits-test@")
    assert (fd["seed"], fd["step"], fd["better"]) == (100000, 7, "lower")
    assert (fd["guidance"], fd["sampler"]) == ("cfg scale=1.5", "heun steps=2")
    # Heun with 2 steps evaluates 3 times, CFG makes 2 passes of each.
    assert fd["macs_per_sample"] == 6 * cost(**case.model.config).macs_dense
    assert (found["accuracy"].reference, found["accuracy"].better) == (None, "higher")


def test_labels_are_balanced_or_drawn(case):
    for labels in ("balanced", "random"):
        options = scoring.options_for(case.config, labels=labels)
        seeds, device = torch.arange(400), torch.device("cpu")
        classes, _, _ = sample_conditions(case.dataset, case.model, options, seeds, device)
        assert (classes.bincount().tolist() == [40] * 10) is (labels == "balanced")
        assert len(classes.unique()) == 10


def test_an_interrupted_evaluation_goes_on_where_it_was(case, tmp_path, monkeypatch):
    metrics = ("accuracy", "kid")
    whole, _ = case.run(metrics=metrics)
    generate, calls = pipeline.generate, []

    def killed(*args, **kwargs):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args[4][0].item())
        return generate(*args, **kwargs)

    monkeypatch.setattr(pipeline, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        case.run(tmp_path, metrics=metrics)
    kept = sorted(p.name for p in tmp_path.rglob("*.npz"))
    assert kept == ["shard-00000.npz", "shard-00001.npz"]
    calls.clear()
    # A piece that was cut off on disk is made again; a whole one is not.
    first = next(tmp_path.rglob("shard-00000.npz"))
    first.write_bytes(first.read_bytes()[:200])
    resumed, store = case.run(tmp_path, metrics=metrics)
    assert calls == [100000, 100032]
    assert resumed == whole
    assert store is not None
    assert sum(len(images) for images, _, _ in read_shards(store.folder)) == 40
    # Samples of other settings are not taken for these.
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        case.run(tmp_path, metrics=metrics, seed=3)
    assert calls == [3, 19]


def test_samples_of_other_weights_are_not_scored(case, tmp_path):
    pipe = SamplingPipeline.make(case.model, case.config)
    options = scoring.options_for(case.config, metrics=("accuracy",), samples=10)
    folders = []
    for identity in ("trained once", "trained again"):
        _, store = scoring.sample_and_score(pipe, case.config, case.dataset, options, step=7, out=tmp_path, identity=identity)
        folders.append(store.folder)
    assert folders[0] != folders[1] and all(list(folder.glob("shard-*")) for folder in folders)


def test_what_cannot_be_measured_is_said_before_sampling(case, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "generate", None)
    with pytest.raises(MetricError, match="needs data=scenes, here are data=digits"):
        case.score(metrics=("adherence",))
    with pytest.raises(MetricError, match="with 3 neighbours need more images than that, got 3"):
        case.score(metrics=("recall",), samples=3)
    features = create_features("autoencoder", cache=default_cache(), dataset=case.dataset)
    three = collect(features, [case.dataset.to_pixels(case.dataset.batch(torch.arange(3)).x)], ("moments", "rows"))
    path = str(save_reference(tmp_path / "three.npz", features, three, "three"))
    with pytest.raises(MetricError, match="need more images than that, got 3"):
        case.score(metrics=("recall",), features=("autoencoder",), reference=path)
    monkeypatch.setattr("experiments.evaluation.meters.world", lambda: (0, 41))
    with pytest.raises(MetricError, match="40 images are fewer than 41 processes"):
        scoring.check(case.config, case.dataset)  # as before training


def test_a_model_that_diverged_is_named(case, tmp_path):
    broken = Case(tmp_path)
    with torch.no_grad():
        next(broken.model.parameters()).fill_(float("nan"))
    with pytest.raises(MetricError, match="the model samples NaN .* train.lr"):
        broken.score(metrics=("accuracy",))


def test_a_run_without_labels_is_scored_without_accuracy(tmp_path):
    plain = Case(tmp_path, "task=none", "guidance=none", "eval.samples=80")
    found = plain.score()
    assert "accuracy" not in found
    assert found["fd"].value > 0
    with pytest.raises(MetricError, match="unknown here"):
        plain.score(metrics=("accuracy",))


def test_scenes_are_scored_by_class_and_by_caption(tmp_path):
    for task, parts in (("class", {"adherence_shape"}), ("text", {"adherence_place"})):
        words = f"scale=small data=scenes size=T/8 task={task} guidance=none eval=scenes eval.samples=6 eval.batch=6"
        found = Case(tmp_path, *words.split()).score(metrics=("adherence",))
        assert set(found) >= {"adherence"} | parts
        assert found["adherence"].metric == "adherence-6 (scenes-probe)"
        assert 0 <= found["adherence"].value <= 1


def test_adherence_counts_add_up_over_batches():
    data = create({"name": "scenes"}, task="text")
    batch = data.batch(torch.arange(30), None, "test")
    images, captions = data.to_pixels(batch.x), [*batch.captions[1:11], *batch.captions[10:]]  # ten are wrong
    whole, parts = AdherenceMeter(), AdherenceMeter()
    whole.update(images, captions=captions)
    for cut in (slice(12), slice(12, 30)):
        parts.update(images[cut], captions=captions[cut])
    assert parts.results() == whole.results() and 0 < whole.results()[0].value < 0.9


def test_training_precision_does_not_reach_the_metrics(case):
    plain = case.dataset.to_pixels(case.dataset.batch(torch.arange(80)).x)
    options = scoring.options_for(case.config, metrics=("fd", "kid"))
    values = []
    for enabled in (False, True):
        meters = create_meters(options, case.dataset, scoring.cache_of(case.config))
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                for meter in meters:
                    meter.update(plain)
                values.append([r.value for meter in meters for r in meter.results(None)])
            assert torch.get_float32_matmul_precision() == "high"
        finally:
            torch.set_float32_matmul_precision(before)
    assert values[0] == values[1]
