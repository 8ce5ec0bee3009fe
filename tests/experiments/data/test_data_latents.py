import json
import tarfile
import threading

import numpy as np
import pytest
import torch
from data_tools import (
    add,
    latents,
    refused,
    write_imported,
    write_lightning,
    write_store,
    write_tars,
)
from small import small

from experiments import prepare
from experiments.config import load as load_config
from experiments.data import Prefetch, create
from experiments.data.import_latents import import_latents, latent_rows
from experiments.data.latent_options import LatentsOptions
from experiments.training.dry_run import dry_run
from experiments.training.session import train
from routing.rng import Draws

COUNT = 13


def load(path, task="class", **options):
    return create({"name": "latents", "path": path, **options}, task=task)


@pytest.fixture
def labels():
    return [(7 * i) % 5 for i in range(COUNT)]


# --- the project's own store -------------------------------------------------------------------


def test_samples_are_shifted_and_scaled(tmp_path, labels):
    z = latents(COUNT)
    data = load(write_store(tmp_path / "s", z, labels))
    index = torch.tensor([12, 0, 5, 5, 7])
    batch = data.batch(index, Draws(0, 0, torch.arange(5)))
    torch.testing.assert_close(batch.x, (torch.from_numpy(z)[index] - 0.25) * 0.5)
    assert batch.y.tolist() == [labels[i] for i in index]
    assert torch.equal(data.condition(index, "train").y, batch.y)
    assert data.size == COUNT and data.num_classes == 5 and data.class_names[4] == "class 4"
    assert data.reads_disk and data.sigma_data == 0.5 and data.shape == (4, 8, 8)


def test_moments_are_sampled_anew_each_step_and_repeatably(tmp_path):
    moments = latents(COUNT, channels=8)
    moments[:, 4:] = -2.0
    data = load(write_store(tmp_path / "s", moments, kind="moments"), task="none")
    index = torch.arange(COUNT)
    draws = [Draws(3, step, index) for step in (0, 1)]
    first, second = (data.batch(index, d).x for d in draws)
    assert not torch.equal(first, second)
    assert torch.equal(first, data.batch(index, Draws(3, 0, index)).x)
    noise = draws[0].normal("moments", (4, 8, 8))
    expected = (torch.from_numpy(moments[:, :4]) + noise * torch.tensor(-1.0).exp() - 0.25) * 0.5
    torch.testing.assert_close(first, expected)
    # Rank 1 of two processes sees what one process sees.
    part = data.batch(index[7:], Draws(3, 0, index[7:])).x
    assert torch.equal(part, first[7:])
    assert torch.equal(data.batch(index, None).x[3:], data.batch(index[3:], None).x)


def test_stored_flips(tmp_path, labels):
    z = latents(COUNT)
    path = write_store(tmp_path / "s", z, labels, flips=-z)
    index = torch.arange(COUNT)
    draws = Draws(0, 9, index)
    flip = draws.uniform("flip", 1)[:, 0] < 0.5
    assert flip.any() and not flip.all()
    x = load(path).batch(index, draws).x
    sign = torch.where(flip, -1.0, 1.0).view(-1, 1, 1, 1)
    torch.testing.assert_close(x, (torch.from_numpy(z) * sign - 0.25) * 0.5)
    straight = (torch.from_numpy(z) - 0.25) * 0.5
    torch.testing.assert_close(load(path, flip="none").batch(index, draws).x, straight)
    torch.testing.assert_close(load(path).batch(index, None).x, straight)
    mirrored = load(path, flip="mirror").batch(index, draws).x
    expected = torch.where(flip.view(-1, 1, 1, 1), straight.flip(-1), straight)
    torch.testing.assert_close(mirrored, expected)


def test_held_out_samples_are_never_trained_on(tmp_path):
    z = latents(COUNT)
    path = write_store(tmp_path / "s", z)
    data = load(path, task="none", held_out=4)
    assert data.sizes == {"train": 9, "test": 4}
    rows = [data.batch(torch.arange(n), None, s).x for s, n in data.sizes.items()]
    together = {tuple(r.flatten().tolist()) for r in torch.cat(rows)}
    assert len(together) == COUNT
    again = load(path, task="none", held_out=4).batch(torch.arange(4), None, "test").x
    assert torch.equal(rows[1], again)
    refused(lambda: load(path, task="none", held_out=13), "held_out=13", "13 samples")
    refused(lambda: load(path, task="none").batch(torch.arange(1), None, "test"), "no test split")


def test_the_rows_held_out_are_the_same_for_every_run_of_a_store(tmp_path):
    """Runs of all versions share them: other rows would have been trained on."""
    z = np.arange(40, dtype=np.float32).reshape(40, 1, 1, 1).repeat(4, 1)
    data = load(write_store(tmp_path / "s", z, scale_factor=1.0, shift_factor=0.0), task="none", held_out=10)
    held_out = data.batch(torch.arange(10), None, "test").x[:, 0].flatten()
    assert held_out.tolist() == [0, 5, 9, 10, 13, 15, 24, 28, 36, 39]


def test_second_store_is_the_test_split(tmp_path, labels):
    train = write_store(tmp_path / "a", latents(COUNT), labels)
    test = write_store(tmp_path / "b", latents(3, seed=1), [0, 1, 2])
    data = load(train, test=str(test))
    assert data.sizes == {"train": COUNT, "test": 3} and data.num_classes == 5
    assert data.fingerprint != load(train).fingerprint
    other = write_store(tmp_path / "c", latents(3, side=4), [0, 1, 2])
    refused(lambda: load(train, test=str(other)), "one shape")
    scaled = write_imported(tmp_path / "d", latents(3, seed=1), [0, 1, 2])
    refused(lambda: load(train, test=str(scaled)), "scaled latents and", "one scale (data.scaled")
    assert load(train, test=str(scaled), scaled="no").sizes["test"] == 3
    other_vae = write_store(tmp_path / "e", latents(3), [0, 1, 2], scale_factor=0.13025)
    refused(lambda: load(train, test=str(other_vae)), "holds 0.13025 and", "one scale factor of the VAE")


def test_classes_of_the_second_store_are_told_by_their_names(tmp_path, labels):
    train = write_store(tmp_path / "a", latents(COUNT), labels)
    index = torch.arange(3)

    def opened(*classes):
        test = write_store(tmp_path / "b", latents(3, seed=1), [0, 1, 2], classes=classes)
        return load(train, test=str(test))

    data = opened("class 1", "class 3", "class 4")  # two have no picture held out
    assert data.batch(index, None, "test").y.tolist() == data.condition(index).y.tolist() == [1, 3, 4]
    assert data.num_classes == 5
    data = opened("ant", "bee", "cat")  # other words for the same: the numbers say it
    assert data.condition(index).y.tolist() == [0, 1, 2]
    refused(lambda: opened("class 1", "class 0", "fox"), "lacks, such as ['fox']")


def test_captions(tmp_path):
    text = torch.randn(COUNT, 2, 77, 6)
    captions = [[f"first of {i}", f"another, \u00e9 {i}"] for i in range(COUNT)]
    path = write_store(tmp_path / "s", latents(COUNT), text=(text, captions))
    data = load(path, task="text")
    index = torch.tensor([11, 2, 2, 7])
    draws = Draws(0, 0, torch.arange(4))
    caption_number = (draws.uniform("caption", 1)[:, 0] * 2).long()
    batch = data.batch(index, draws)
    assert data.text == (77, 6) and data.num_classes == 0
    assert torch.equal(batch.text, text[index, caption_number])
    assert batch.captions == [captions[i][k] for i, k in zip(index, caption_number, strict=True)]
    condition = data.condition(index, "train")
    assert condition.captions == [captions[i][0] for i in index]
    assert torch.equal(condition.text, text[index, 0])
    assert data.prompts(torch.tensor([0, 12, 13])).captions == [captions[i][0] for i in (0, 12, 0)]
    held = load(path, task="text", held_out=2)
    assert len(set(held.prompts(torch.arange(50)).captions)) == 2
    refused(lambda: data.encode_text(["a dog"]), "nowhere/clip", "hf download")
    refused(lambda: load(path, task="class"), "without labels")
    train(small(tmp_path, "data=latents", f"data.path={path}", "size=T/2", "task=text", "route=0-1"), quiet=True)


def test_other_pixels_of_the_same_store_have_another_fingerprint(tmp_path, labels):
    path = write_store(tmp_path / "s", latents(COUNT), labels)
    plain = load(path)
    assert plain.pixels_fingerprint == plain.fingerprint
    changes = ({"vae": "a"}, {"vae": "b"}, {"vae_dtype": "bfloat16"}, {"held_out": 3}, {"held_out": 4})
    fingerprints = {load(path, **change).pixels_fingerprint for change in changes}
    assert len(fingerprints | {plain.fingerprint}) == 6


def test_damaged_and_missing_stores_are_named(tmp_path, labels):
    path = write_store(tmp_path / "s", latents(COUNT), labels)
    load(path, verify=True)
    shard = path / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    load(path)
    refused(lambda: load(path, verify=True), "shard-00001.safetensors has changed")
    shard.unlink()
    refused(lambda: load(path), "shard-00001.safetensors is missing")
    (tmp_path / "pictures" / "n01").mkdir(parents=True)
    refused(lambda: load(tmp_path / "pictures"), "found n01; from images", "prepare.py")


def test_labels_that_are_no_classes_are_named(tmp_path, labels):
    path = write_store(tmp_path / "outside", latents(COUNT), labels)
    refused(lambda: load(path, num_classes=3), "label 4, outside 0..2", "data.num_classes=5")
    path = write_imported(tmp_path / "from_one", latents(4), [1, 2, 3, 1])
    with pytest.warns(UserWarning, match="smallest label is 1, so class 0 has no sample"):
        assert load(path).num_classes == 4


def test_a_dry_run_refuses_what_the_run_refuses_of_the_contents(tmp_path):
    path = write_store(tmp_path / "s", latents(6))
    config = load_config([f"data.path={path}", "data=latents", "data.num_classes=3", "size=T/2", "dry=true"])
    refused(lambda: dry_run(config), "without labels")


# --- foreign layouts ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tars", "npy", "edm"])
def test_latents_of_other_projects_are_imported(tmp_path, labels, vae, kind, capsys):
    z, source, out = latents(COUNT, channels=8), tmp_path / "source", tmp_path / "out"
    if kind == "tars":
        write_tars(source, z, labels)
        with tarfile.open(source / "shard-000000.tar", "a") as archive:
            add(archive, "README", b"no sample, nor what macOS leaves")
            add(archive, "._000000000.latent.npy", b"x")
    for number, values in enumerate(z if kind != "tars" else ()):
        name = f"{labels[number]}/{number:04}.npy" if kind == "npy" else f"00000/img-mean-std-{number:08}.npy"
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(source / name, values[None] if kind == "npy" else np.concatenate([values[:4], np.exp(values[4:] / 2)]))
    if kind == "edm":
        pairs = [[f"00000/img-mean-std-{number:08}.npy", label] for number, label in enumerate(labels)]
        (source / "dataset.json").write_text(json.dumps({"labels": pairs}))
    assert prepare.main([str(source), str(out), "--shard", "5"]) == 0
    assert f"{COUNT} latents" in capsys.readouterr().out
    data = load(out)
    order = sorted(range(COUNT), key=lambda i: (labels[i], i)) if kind == "npy" else range(COUNT)
    index = torch.arange(COUNT)
    assert data.batch(index).y.tolist() == [labels[i] for i in order] and data._stores["train"].kind == "moments"
    torch.testing.assert_close(data._stores["train"].latents(index), torch.from_numpy(z[list(order)]))
    assert prepare.main([str(source), str(out)]) == 2 and "is not empty" in capsys.readouterr().err


def test_imported_samples_are_scaled_already(tmp_path, labels):
    z, index = latents(COUNT), torch.tensor([12, 0, 5, 5, 7])
    path = write_imported(tmp_path / "s", z, labels)
    assert torch.equal(load(path).batch(index, None).x, torch.from_numpy(z)[index])
    # A half-scaled store: told that it is not scaled, it is multiplied by SD's factor.
    torch.testing.assert_close(load(path, scaled="no").batch(index, None).x, torch.from_numpy(z)[index] * 0.18215)


def test_other_contents_of_the_same_size_are_other_data(tmp_path, labels):
    def fingerprint(name, z, kinds):
        return load(write_lightning(tmp_path / name, z, -z, kinds)).fingerprint

    z = latents(COUNT)
    first = fingerprint("first", z, labels)
    assert fingerprint("copy", z, labels) == first
    assert first not in (fingerprint("values", latents(COUNT, seed=1), labels), fingerprint("labels", z, labels[::-1]))


def test_maskdit_moments(tmp_path, labels):
    z, index = latents(COUNT, channels=8), torch.arange(COUNT)
    draws = Draws(0, 0, index)
    mean, log_variance = torch.from_numpy(z).chunk(2, 1)
    expected = mean + (log_variance / 2).exp() * draws.normal("moments", (4, 8, 8))
    for field in ("latent.npy", "latent"):
        data = load(write_imported(tmp_path / field, z, labels, field=field))
        assert data.shape == (4, 8, 8)
        torch.testing.assert_close(data.batch(index, draws).x, expected * 0.18215)


def test_latents_that_cannot_be_imported_are_named(tmp_path, labels):
    z = latents(COUNT)
    tars = write_tars(tmp_path / "a", z, labels)
    refused(lambda: load(tars), "found shard-000000.tar", "prepare.py")
    refused(LatentsOptions(path=str(tars)).check_files, "found shard-000000.tar")  # a dry run says so too

    def imported(path):
        import_latents(latent_rows(path, "*"), tmp_path / "out", 5)

    tar = tars / "shard-000001.tar"
    whole = tar.read_bytes()
    for size in (2000, 512 + 1536):  # inside of a latent, between two members
        tar.write_bytes(whole[:size])
        refused(lambda: imported(tars), "shard-000001.tar is truncated")
        refused(lambda: load(tmp_path / "out"), "has not finished here")
    refused(lambda: imported(write_tars(tmp_path / "b", z[:4], [1, 2, None, 3])), "labels of all or none")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/0.npy").write_bytes(b"no array")
    refused(lambda: imported(tmp_path / "c"), "0.npy is no .npy array")
    assert latent_rows(write_tars(tmp_path / "d", [b"x"], None, field="jpg", encode=bytes), "*") is None


def test_lightningdit_shards(tmp_path, labels):
    z, f = latents(COUNT, channels=32, side=4), latents(COUNT, channels=32, side=4, seed=1)
    path = write_lightning(tmp_path / "l", z, f, labels)
    data = load(path)
    assert data.shape == (32, 4, 4) and data.num_classes == 5
    index = torch.tensor([12, 0, 5, 5, 7, 1, 2])
    draws = Draws(0, 4, torch.arange(7))
    flip = (draws.uniform("flip", 1)[:, 0] < 0.5).view(-1, 1, 1, 1)
    assert flip.any() and not flip.all()
    z, f = torch.from_numpy(z), torch.from_numpy(f)
    mean, std = z.mean((0, 2, 3), keepdim=True), z.std((0, 2, 3), keepdim=True)
    expected = (torch.where(flip, f[index], z[index]) - mean) / std
    batch = data.batch(index, draws)
    torch.testing.assert_close(batch.x, expected)
    assert batch.y.tolist() == [labels[i] for i in index]
    half = load(path, scale="std").batch(index, draws).x
    torch.testing.assert_close(half, expected * 0.5)


def test_lightningdit_without_statistics(tmp_path, labels):
    z = latents(COUNT, channels=32, side=4) * 3 + 1
    path = write_lightning(tmp_path / "l", z, z.copy(), labels, stats=False)
    refused(lambda: load(path), "data.scale=std", "data.scale_factor")
    x = load(path, scale="std").batch(torch.arange(COUNT), None).x
    assert x.mean((0, 2, 3)).abs().max() < 1e-4
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.full((32,), 0.5))
    torch.testing.assert_close(load(path, scale_factor=2.0).batch(torch.arange(3), None).x, torch.from_numpy(z[:3]) * 2)


# --- prefetch ----------------------------------------------------------------------------------


def plan(step):
    index = torch.tensor([step % COUNT, (step * 5) % COUNT])
    return index, Draws(0, step, torch.arange(2))


def test_prefetch_gives_what_batch_gives(tmp_path, labels):
    data = load(write_store(tmp_path / "s", latents(COUNT), labels, flips=latents(COUNT, seed=2)))
    before = threading.active_count()
    for step, batch in zip(range(4, 20), Prefetch(data, plan, 4), strict=False):
        expected = data.batch(*plan(step))
        assert torch.equal(batch.x, expected.x) and torch.equal(batch.y, expected.y)
    for batch in Prefetch(data, plan):
        assert len(batch.x) == 2
        break
    assert threading.active_count() == before

    def plan_beyond(step):  # an error is raised where its batch is asked for
        return (torch.tensor([99]), plan(step)[1]) if step == 3 else plan(step)

    batches = iter(Prefetch(data, plan_beyond))
    for _ in range(3):
        next(batches)
    refused(lambda: next(batches), "samples 99 to 99 of the train split")


# --- pixels ------------------------------------------------------------------------------------


def test_without_their_vae_latents_train_and_say_what_is_missing(tmp_path, labels, vae, capsys):
    path = write_store(tmp_path / "s", latents(COUNT), labels)
    data = load(path)
    assert not data.can_decode
    assert "nowhere/vae" in data.cannot_decode and "hf download" in data.cannot_decode
    refused(lambda: data.to_pixels(torch.zeros(1, 4, 8, 8)), "no pixels", "data.vae=FOLDER")
    wide = write_lightning(tmp_path / "l", latents(4, 32), latents(4, 32), [0, 1, 2, 3])
    assert "does not say which VAE" in load(wide).cannot_decode
    refused(lambda: load(wide, vae=str(vae)).to_pixels(torch.zeros(1, 32, 8, 8)), "has 4 channels and the latents 32")
    words = ["data=latents", f"data.path={path}", "size=T/2", "eval=inception", "train.final_samples=true"]
    folder = train(small(tmp_path, *words))
    assert "no pictures and no scores in this run: the weights of nowhere/vae" in capsys.readouterr().out
    assert not (folder / "samples/final.png").exists() and not (folder / "scores.jsonl").exists()


def test_pixels_are_rounded_and_types_agree(tmp_path, labels, vae):
    from experiments.data.encoders import Autoencoder

    store = write_store(tmp_path / "s", latents(COUNT) * 3, labels)
    data = load(store, vae=str(vae), decode_batch=4)
    assert data.can_decode
    x = data.batch(torch.arange(9), None).x
    pixels = data.to_pixels(x)
    assert pixels.shape == (9, 3, 64, 64) and pixels.dtype == torch.uint8
    network = Autoencoder(str(vae)).network
    z = x / 0.5 + 0.25
    exact = (network.decode(z).sample + 1) * 127.5
    error = (pixels.double() - exact.clamp(0, 255).double()).abs()
    assert float(error.max()) <= 0.502
    half = load(store, vae=str(vae), vae_dtype="bfloat16").to_pixels(x)
    assert half.dtype == torch.uint8
    difference = (half.double() - pixels.double()).abs()
    assert float(difference.mean()) < 2 and abs(float((half.double() - pixels.double()).mean())) < 0.5


def test_scaled_foreign_latents_decode_to_the_same_pixels(tmp_path, labels, vae):
    z = latents(COUNT)
    scaled = load(write_imported(tmp_path / "a", z * np.float32(0.18215), labels), vae=str(vae))
    raw = load(write_imported(tmp_path / "b", z, labels), vae=str(vae), scaled="no")
    index = torch.arange(3)
    a, b = (d.to_pixels(d.batch(index, None).x).int() for d in (scaled, raw))
    assert (a - b).abs().max() <= 1


@pytest.mark.gpu
def test_latents_on_the_gpu(tmp_path, labels):
    path = write_store(tmp_path / "s", latents(COUNT, channels=8), labels, kind="moments")
    cpu, gpu = load(path), create({"name": "latents", "path": str(path)}, device="cuda")
    for step, batch in zip(range(5), Prefetch(gpu, plan), strict=False):
        expected = cpu.batch(*plan(step))
        assert batch.x.device.type == "cuda"
        torch.testing.assert_close(batch.x.cpu(), expected.x, atol=1e-6, rtol=1e-6)


def test_an_import_does_not_touch_a_prepared_store_and_replaces_one_that_was_cut_off(tmp_path, labels):
    z, out = latents(COUNT), tmp_path / "store"
    tars, plan = write_tars(tmp_path / "tars", z, labels), out / "plan.json"
    out.mkdir()
    plan.write_text('{"size": 32}')  # of a store that `prepare` made of pictures
    refused(lambda: import_latents(latent_rows(tars, "*"), out, 5), "holds latents", "give a new folder")
    assert [path.name for path in out.iterdir()] == ["plan.json"]
    plan.write_text("{}\n")  # of an import that was cut off
    (out / "shard-00099.safetensors").write_bytes(b"of an earlier import")
    assert import_latents(latent_rows(tars, "*"), out, 5) == COUNT
    assert not (out / "shard-00099.safetensors").exists() and load(out).sizes["train"]
