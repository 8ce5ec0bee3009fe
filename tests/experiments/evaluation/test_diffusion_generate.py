"""Seeded generation: the same seed is the same image, in any batch, on any rank, after any kill."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from small import ROOT, random_backbone

from experiments.diffusion import create_guidance, create_objective, create_sampler
from experiments.evaluation import (
    SamplingPipeline,
    generate,
    generate_shards,
    generation,
    labels_from_seeds,
    read_shards,
    write_npz,
)
from experiments.evaluation.collect import full_precision
from experiments.evaluation.images import Images
from experiments.options.roles import ConfigError


def parts(sampler="churn", guidance="routed", steps=3):
    path = create_objective("edm")
    walk = create_sampler({"name": sampler, "steps": steps}, path)
    return path, walk, create_guidance(guidance, route="1-2")


@pytest.mark.parametrize(("family", "guidance"), [("dit", "cfg"), ("mamba", "routed"), ("rwkv", "routed")])
def test_an_image_belongs_to_its_seed(family, guidance):
    # Churn draws noise in every step, routed guidance tokens in every pass, labels come from seeds.
    model, rest = random_backbone(family), parts(guidance=guidance)
    seeds = torch.arange(100, 107)
    whole = generate(model, *rest, seeds, batch=4)
    assert whole.shape == (7, 2, 4, 4)
    # The same batch size: bit for bit, with other neighbours in another place.
    shuffled = torch.tensor([3, 6, 0, 5, 1, 2, 4])
    assert torch.equal(generate(model, *rest, seeds[shuffled], batch=4), whole[shuffled])
    # Another batch size: to the rounding of matrix products.
    again = generate(model, *rest, seeds, batch=3)
    assert (again - whole).abs().max() <= 1e-4 * whole.abs().max()
    assert not torch.allclose(whole[0], whole[1])


@pytest.mark.parametrize(("family", "dtype", "close"), [("dit", torch.float64, 1e-4), ("mamba", torch.bfloat16, 0.1)])
def test_a_model_of_another_type_is_sampled(family, dtype, close):
    text = {"num_classes": 0, "text": (3, 6)}
    for options, given in [({}, {}), (text, {"text": torch.randn(4, 3, 6), "labels": None})]:
        seeds, rest = torch.arange(4), parts("euler", "routed" if not options else "cfg")
        usual = generate(random_backbone(family, **options), *rest, seeds, **given)
        model = random_backbone(family, **options).to(dtype)
        found = generate(model, *rest, seeds, **given)
        assert found.dtype == torch.float32
        assert 0 < (found - usual).abs().max() <= close * usual.abs().max()


def test_a_bfloat16_model_is_told_the_very_step():
    told = []

    def net(x, t):
        told.append((x.dtype, t.tolist()))
        return x

    net.dtype = torch.bfloat16
    create_objective("ddpm").predict(net, torch.zeros(1, 1, 2, 2), torch.tensor([997.0]))
    assert told == [(torch.bfloat16, [997.0])]


@pytest.mark.parametrize(("family", "guidance"), [("dit", "cfg"), ("mamba", "none"), ("rwkv", "apg")])
def test_a_batch_is_sampled_in_parts_that_fit_into_the_cache(family, guidance, monkeypatch):
    model, rest, sizes = random_backbone(family), parts(guidance=guidance), []
    seeds = torch.arange(50, 61)
    whole = generate(model, *rest, seeds, batch=11)
    model.register_forward_hook(lambda m, args, out: sizes.append(len(args[0])))
    # 16 tokens of width 32; guidance doubles a pass, so that it holds half as many images.
    monkeypatch.setattr(generation, "_CACHED_VALUES", 8 * 16 * 32)
    monkeypatch.setattr(generation, "_FEWEST_IMAGES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    again = generate(model, *rest, seeds, batch=11)
    # 11 images in 2 parts of 6, or in 3 of 4: the last part is filled up.
    assert max(sizes) == (6 if guidance == "none" else 8)
    assert len(sizes) % (2 if guidance == "none" else 3) == 0
    assert (again - whole).abs().max() <= 1e-4 * whole.abs().max()
    # An image still belongs to its seed, bit for bit.
    assert torch.equal(generate(model, *rest, seeds.flip(0), batch=11), again.flip(0))


def test_labels_from_seeds():
    seeds = torch.arange(3000)
    labels = labels_from_seeds(seeds, 5)
    assert torch.equal(labels[10:20], labels_from_seeds(seeds[10:20], 5))
    assert (labels.bincount() - 600).abs().max() < 5 * (3000 * 0.2 * 0.8) ** 0.5
    assert torch.equal(labels_from_seeds(seeds, 5, "balanced"), seeds % 5)
    assert labels_from_seeds(seeds, 0) is None


def test_labels_must_fit_the_model():
    wrong = [
        (random_backbone(), {"labels": torch.tensor([1, 7])}, "class 7: expected 0..4, or 5 for no class"),
        (random_backbone(), {"labels": torch.tensor([1, 2, 3])}, "labels for 3 images, and 2 seeds"),
        (random_backbone(num_classes=0), {"labels": torch.tensor([1, 1])}, "has no classes"),
    ]
    for model, conditions, message in wrong:
        with pytest.raises(ConfigError, match=message):
            generate(model, *parts("euler", "none"), torch.arange(2), **conditions)


def test_unconditional_and_text_models():
    assert generate(random_backbone(num_classes=0), *parts("euler", "none"), torch.arange(2)).isfinite().all()
    model, rest = random_backbone(num_classes=0, text=(3, 6)), parts("euler", "cfg")
    text = torch.randn(2, 3, 6)
    both = generate(model, *rest, torch.tensor([1, 1]), text=text)
    assert not torch.allclose(both[0], both[1])
    none = generate(model, *rest, torch.tensor([1, 1]))
    assert torch.allclose(none[0], none[1], atol=1e-5)


def test_progress_callbacks_and_modes():
    model, seen, rest = random_backbone().train(), [], parts("euler", "none")
    images = generate(model, *rest, torch.arange(5), batch=2, progress=lambda *args: seen.append(args))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert model.training and not images.requires_grad
    assert generate(model, *rest, torch.arange(0)).shape == (0, 2, 4, 4)


# ----------------------------------------------------------------------------------------- shards


def pixels(x):
    return (x[:, :1].clamp(-1, 1) * 127 + 128).to(torch.uint8).expand(-1, 3, -1, -1)


def make(folder, n=11, **options):
    settings = {"shard": 4, "batch": 2, "to_pixels": pixels, "settings": {"weights": "a"}, **options}
    pipeline = SamplingPipeline(random_backbone(), *parts("euler", "cfg"))
    return generate_shards(folder, pipeline, torch.arange(n), **settings)


def contents(folder):
    return [np.concatenate(column) for column in zip(*read_shards(folder), strict=True)]


def test_shards_and_adms_npz_hold_every_image_once(tmp_path):
    paths = make(tmp_path / "a")
    assert [p.name for p in paths] == [f"shard-0000{k}.npz" for k in range(3)]
    images, seeds, labels = contents(tmp_path / "a")
    assert images.shape == (11, 4, 4, 3) and images.dtype == np.uint8
    assert seeds.tolist() == list(range(11))
    assert labels.tolist() == labels_from_seeds(torch.arange(11), 5).tolist()
    whole = generate(random_backbone(), *parts("euler", "cfg"), torch.arange(11), batch=2)
    assert np.array_equal(images, pixels(whole).permute(0, 2, 3, 1).numpy())
    pieces = ((images, labels) for images, _, labels in read_shards(tmp_path / "a"))
    write_npz(pieces, 11, tmp_path / "samples.npz")
    with np.load(tmp_path / "samples.npz", allow_pickle=False) as data:
        assert sorted(data) == ["arr_0", "arr_1"] and data["arr_0"].dtype == np.uint8
        assert np.array_equal(data["arr_0"], images) and np.array_equal(data["arr_1"], labels)
    batch = Images(tmp_path / "samples.npz")
    assert batch.n == 11 and batch.labels().tolist() == labels.tolist()
    part = torch.cat(list(batch.batches(range(4, 9), batch=2)))
    assert np.array_equal(part.permute(0, 2, 3, 1).numpy(), images[4:9])


def test_a_killed_call_goes_on(tmp_path):
    class Killed(Exception):
        pass

    def kill(done, total):
        if done >= 6:
            raise Killed

    with pytest.raises(Killed):
        make(tmp_path / "a", progress=kill)
    assert len(list((tmp_path / "a").glob("shard-*.npz"))) == 1
    assert not list((tmp_path / "a").glob(".*"))
    with pytest.raises(ConfigError, match="has 1 of 3 shards; run the sampling command again"):
        contents(tmp_path / "a")
    first = (tmp_path / "a/shard-00000.npz").stat().st_mtime_ns
    seen = []
    make(tmp_path / "a", progress=lambda *args: seen.append(args))
    assert (tmp_path / "a/shard-00000.npz").stat().st_mtime_ns == first
    assert seen[0] == (4, 11) and seen[-1] == (11, 11)
    assert len(set(seen)) == len(seen), "the end of a shard was said twice"
    make(tmp_path / "b")
    assert all(map(np.array_equal, contents(tmp_path / "a"), contents(tmp_path / "b")))


def test_a_folder_of_other_samples_is_refused(tmp_path):
    make(tmp_path)
    for change in ({"settings": {"weights": "b"}}, {"n": 12}, {"labels": "balanced"}, {"batch": 3}):
        with pytest.raises(ConfigError, match="holds other samples .they differ in"):
            make(tmp_path, **change)
    with pytest.raises(ConfigError, match="not a folder of samples"):
        list(read_shards(tmp_path / "none"))


@pytest.mark.slow
def test_sigkill_at_any_moment_costs_one_shard(tmp_path):
    code = f"""
        import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(Path(__file__).parent)!r}]
        from test_diffusion_generate import make
        make({str(tmp_path / "a")!r}, n=400)
    """
    for wait in (0.5, 0.3):
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
        while not list((tmp_path / "a").glob("shard-*.npz")):
            assert process.poll() is None, "it ended before its first shard"
            time.sleep(0.02)
        time.sleep(wait)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    make(tmp_path / "a", n=400)
    make(tmp_path / "b", n=400)
    assert all(map(np.array_equal, contents(tmp_path / "a"), contents(tmp_path / "b")))


@pytest.mark.gpu
@pytest.mark.parametrize("guidance", ["cfg", "routed"])
def test_a_gpu_makes_the_same_image_to_rounding(guidance):
    model, rest, seeds = random_backbone(), parts(guidance=guidance), torch.arange(4)
    with full_precision():
        here = generate(model, *rest, seeds, batch=4)
        there = generate(model.cuda(), *rest, seeds, batch=4)
    assert there.is_cuda
    assert (there.cpu() - here).abs().max() <= 2e-3 * here.abs().max()
