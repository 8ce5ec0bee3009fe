"""experiments/sample.py: what it writes, its pictures among them, from what, and what it says when it cannot."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from data_tools import latents, write_lightning, write_store
from evaluation_tools import export_weights
from PIL import Image
from small import ROOT, two_ranks

from backbones.ops import native
from experiments import sample
from experiments.config.compose import load
from experiments.data import create
from experiments.data.data_options import DataError
from experiments.evaluation import trained_model
from experiments.evaluation.decoder import create_decoder
from experiments.evaluation.pictures import GAP, image_grid, save_gif, save_png
from experiments.evaluation.sample_request import (
    parse_captions,
    parse_classes,
    parse_numbers,
    plan_request,
)
from experiments.options.roles import ConfigError
from experiments.runtime.command import run_command


def export(path, *overrides):
    words = ["data=digits", "backbone.depth=4", "route=1-2", "sampler.steps=3"]
    return export_weights(path, load([*words, *overrides]))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return export(tmp_path_factory.mktemp("weights") / "model.safetensors")


def run(*args):
    return run_command(sample.main, [str(a) for a in args])


def test_writes_pngs_a_grid_and_an_npz(weights, tmp_path, capsys):
    out = tmp_path / "out"
    common = [weights, "--batch", 2, "--device", "cpu"]
    assert run(*common, "--classes", "3,7", "--seeds", "0-4", "--out", out) == 0
    said = capsys.readouterr().out
    assert "step 7" in said and "M MACs per image" in said and str(out / "samples.npz") in said
    names = sorted(p.name for p in (out / "png").iterdir())
    assert len(names) == 10 and names[0] == "class0003_seed000000.png"
    with np.load(out / "samples.npz", allow_pickle=False) as data:
        images, labels = data["arr_0"], data["arr_1"]
    assert images.shape == (10, 8, 8, 3) and images.dtype == np.uint8
    assert labels.tolist() == [3] * 5 + [7] * 5
    with Image.open(out / "png/class0007_seed000002.png") as image:
        assert np.array_equal(np.asarray(image), images[7])
    with Image.open(out / "grid.png") as grid:
        # Two rows of five tiles of 6 x 8 pixels, gaps of 2, and a margin with the classes' names.
        assert grid.height == 2 * 50 + 2 and grid.width > 5 * 50 + 2
    assert not list((out / "shards").glob("shard-*"))
    # An image of a seed and class is the same in every request; the grid is whole without PNGs.
    again = tmp_path / "again"
    assert run(*common, "--classes", "7,3", "--seeds", "3,2", "--pngs", 1, "--out", again) == 0
    assert np.array_equal(np.load(again / "samples.npz")["arr_0"], images[[8, 7, 3, 2]])
    assert [path.name for path in (again / "png").iterdir()] == ["class0007_seed000003.png"]
    with Image.open(again / "grid.png") as grid:
        assert grid.height == 2 * 50 + 2


def test_the_same_command_again_is_done_and_another_is_refused(weights, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [weights, "--seeds", "0-2", "--out", out, "--device", "cpu"]
    assert run(*arguments) == 0
    stamp = (out / "samples.npz").stat().st_mtime_ns
    assert run(*arguments) == 0
    assert (out / "samples.npz").stat().st_mtime_ns == stamp
    # A kill between the whole npz and the last shard's removal leaves shards: they go now.
    (out / "shards" / "shard-00000.npz").write_bytes(b"")
    assert run(*arguments) == 0 and not list(out.glob("shards/*.npz"))
    # Pictures that are not there, or that the first call was not asked for, come out of the npz.
    first = {path: path.read_bytes() for path in (out / "grid.png", *out.glob("png/*.png"))}
    for again in (first, list(first)[:1], list(first)[1:2]):
        for path in again:
            path.unlink()
        capsys.readouterr()
        assert run(*arguments) == 0
        assert "(3 of 3)" in capsys.readouterr().out
        assert {path: path.read_bytes() for path in first} == first
    assert run(*arguments, "--scale", 3) == 2
    wanted = f"{out}/ holds other samples (they differ in guidance.scale): add --out FOLDER or delete {out}/"
    assert wanted in capsys.readouterr().err


def test_samplers_steps_and_weak_checkpoints(weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(native, "start_build", lambda report: report("building the CPU kernels ..."))
    weak = export(tmp_path / "weak.safetensors", "backbone.depth=3")
    arguments = [weights, "--classes", "1", "--seeds", "0-1", "--device", "cpu", "--steps", 4]
    auto = ["--guidance", "autoguidance", f"guidance.checkpoint={weak}", "--scale", 2]
    assert run(*arguments, *auto, "--out", tmp_path / "a", "--sampler", "ddim") == 0
    said = capsys.readouterr().out
    assert "building the CPU kernels ..." in said
    assert "ddim, 4 steps, 4 evaluations" in said and "8 passes in 8 batches" in said
    former = ["sampler.reuse=null", "sampler.reuse_every=2", "--guidance", "none"]
    assert run(*arguments, "--out", tmp_path / "b", *former) == 0
    assert "(linear layers" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "b/shards/manifest.json").read_text())
    assert manifest["sampler"]["reuse_every"] == 2  # as samples of earlier versions have it


def test_text_model(tmp_path, capsys):
    path = export(tmp_path / "text.safetensors", "data=scenes", "task=text", "size=T/4")
    out = tmp_path / "out"
    words = "a red circle; a blue square"
    assert run(path, "--captions", words, "--seeds", "0-1", "--out", out, "--device", "cpu") == 0
    assert sorted(p.name for p in (out / "png").iterdir())[0] == "caption000_seed000000.png"
    assert run(path, "--out", tmp_path / "b", "--device", "cpu") == 2
    assert "give --captions" in capsys.readouterr().err


def test_a_run_that_trained_no_null_class_has_no_cfg(tmp_path, capsys):
    dense = export(tmp_path / "dense.safetensors", "route=none", "train.label_drop=0")
    assert run(dense, "--seeds", "0", "--device", "cpu", "--out", tmp_path / "out", "--guidance", "cfg") == 2
    assert "train.label_drop=0" in capsys.readouterr().err


def test_the_grid_shows_the_first_seeds_of_every_class():
    request = plan_request(range(400), [0, 1], None, ("cat", "dog"))
    assert request.grid == {*range(16), *range(400, 416)} and request.columns == 16
    assert request.row_names == ["cat", "dog"] and len(request.names) == 800


def test_numbers_and_classes():
    assert parse_numbers("0-2, 9", "--seeds") == [0, 1, 2, 9]
    names = ("cat", "dog", "great ape")
    assert parse_classes("dog,0,great ape", 3, names) == [1, 0, 2]
    assert parse_classes("all", 3, names) == [0, 1, 2]
    with pytest.raises(ConfigError, match="did you mean dog"):
        parse_classes("dgo", 3, names)
    with pytest.raises(ConfigError, match="has no classes"):
        parse_classes("1", 0)


ONE_TO_TEN = tuple(map(str, range(1, 11)))


@pytest.mark.parametrize(
    ("text", "names", "classes"),
    [
        ("1,2,3", ONE_TO_TEN, [0, 1, 2]),
        ("1-3", ONE_TO_TEN, [0, 1, 2]),  # the same as 1,2,3
        ("10", ONE_TO_TEN, [9]),
        ("1-2", ("01", "02"), [0, 1]),
        ("all", ONE_TO_TEN, list(range(10))),
        ("all", ("all", "cat"), [0]),
        ("3-5", ("3-5", "cat"), [0]),
        ("0-1", ("3-5", "cat"), [0, 1]),
        ("salt, pepper", ("salt", "salt, pepper"), [1]),
        ("0-2", (), [0, 1, 2]),
    ],
)
def test_a_word_is_a_name_before_it_is_a_number(text, names, classes):
    assert parse_classes(text, len(names) or 10, names) == classes


@pytest.mark.parametrize("text", ["0", "0-9", "1,11"])
def test_a_number_that_is_no_name_is_refused_where_names_are_numbers(text):
    with pytest.raises(ConfigError, match="no class is called"):
        parse_classes(text, 10, ONE_TO_TEN)


def test_captions_stand_in_the_argument_or_in_a_file(tmp_path):
    assert parse_captions("a; b ;") == ["a", "b"]
    file = tmp_path / "captions.txt"
    file.write_text("one\n\ntwo\n")
    assert parse_captions(str(file)) == ["one", "two"]
    file.write_bytes("caf\u00e9".encode("latin-1"))
    for unreadable in (file, tmp_path / "none.txt"):
        with pytest.raises(ConfigError, match="expected text in UTF-8"):
            parse_captions(str(unreadable))


@pytest.mark.slow
def test_two_processes_share_the_work(weights, tmp_path):
    words = [str(weights), "--seeds=0-1100", "--steps=1", "--guidance=none", "--pngs=0", "--device=cpu"]
    assert run(*words, f"--out={tmp_path / 'one'}") == 0
    call = two_ranks(str(ROOT / "experiments" / "sample.py"), *words, f"--out={tmp_path / 'two'}")
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ADM's evaluator") == 1
    with np.load(tmp_path / "one/samples.npz") as a, np.load(tmp_path / "two/samples.npz") as b:
        assert np.array_equal(a["arr_0"], b["arr_0"]) and np.array_equal(a["arr_1"], b["arr_1"])


@pytest.mark.parametrize("layout", ["store", "lightningdit"])
def test_weights_of_latents_are_sampled_where_the_latents_are_not(layout, vae, tmp_path, capsys):
    store, labels = tmp_path / "store", [k % 3 for k in range(8)]
    if layout == "store":
        write_store(store, latents(8), labels)
    else:
        write_lightning(store, 3 * latents(8) + 1, latents(8), labels)
    weights = export(
        tmp_path / "model.safetensors", "data=latents", f"data.path={store}", f"data.vae={vae}",
        "size=T/2", "eval=none",
    )  # fmt: skip
    loaded = trained_model.load_model(weights, device="cpu")
    there = create(loaded.config.data)
    x = torch.randn(2, *there.shape, generator=torch.Generator().manual_seed(0))
    wanted = there.to_pixels(x)
    shutil.rmtree(store)
    alone = create_decoder(loaded, {}, "cpu")
    assert torch.equal(alone.to_pixels(x), wanted)
    # The conversion matters: the numbers as they are give other pictures.
    assert not torch.equal(alone._autoencoder.decode(x), wanted)
    with pytest.raises(DataError, match="the weights come without their latents"):
        alone.batch(torch.arange(1), None)
    out = tmp_path / "out"
    assert run(weights, "--classes", "1", "--seeds", "0-1", "--out", out, "--device", "cpu") == 0
    assert np.load(out / "samples.npz")["arr_0"].shape == (2, 64, 64, 3)
    assert run(weights, "data.vae=nowhere/vae", "--out", tmp_path / "no", "--device", "cpu") == 2
    assert "the weights of nowhere/vae are not on this machine" in capsys.readouterr().err


def images(n, size=8):
    values = torch.arange(n, dtype=torch.uint8).reshape(-1, 1, 1, 1) + 1
    return values.expand(n, 3, size, size).contiguous()


def test_grid_is_row_major_and_enlarged_by_a_whole_factor():
    picture = image_grid(images(5), columns=3)
    assert picture.shape == (2 * (48 + GAP) + GAP, 3 * (48 + GAP) + GAP, 3)
    for i in range(5):
        top, left = (i // 3) * 50 + GAP, (i % 3) * 50 + GAP
        assert (picture[top : top + 48, left : left + 48] == i + 1).all()
    assert (picture[50 + GAP :, 2 * 50 + GAP :] == 255).all()  # a place without an image


def test_a_gif_of_pngs_stays_longer_on_its_last_frame(tmp_path):
    frames = [tmp_path / f"{i}.png" for i in range(4)]
    for i, path in enumerate(frames):
        save_png(image_grid(images(2 * i + 1) * 40, columns=3), path)
    save_gif(frames, tmp_path / "progress.gif", seconds=0.1)
    with Image.open(tmp_path / "progress.gif") as gif:
        assert gif.n_frames == 4 and gif.size == (152, 152) and gif.info["loop"] == 0
        durations = []
        for frame in range(4):
            gif.seek(frame)
            durations.append(gif.info["duration"])
    assert durations == [100, 100, 100, 400]
