import errno
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from data_tools import write_tars
from PIL import Image
from small import ROOT, small, two_ranks

from experiments import prepare
from experiments.data import DataError, create
from experiments.data.encoders import Autoencoder
from experiments.data.latent_store import open_store
from experiments.data.open_source import open_source
from experiments.data.raw_images import center_crop
from experiments.runtime import console
from experiments.runtime.locks import locked
from experiments.training.session import train
from routing.rng import Draws

SIZE = 64
CLASSES, LABELS = ("animals", "grey", "things"), [0, 0, 1, 1, 2, 2, 2]  # of `pictures`


def arguments(source, out, vae, *more):
    options = ["--size", SIZE, "--shard", 3, "--batch", 2, "--device", "cpu"]
    return [str(word) for word in (source, out, "--vae", vae, *options, *more)]


def run(source, out, vae, *more):
    return prepare.main(arguments(source, out, vae, *more))


def content(out):
    return {p.name: p.read_bytes() for p in sorted(out.iterdir()) if p.suffix != ".txt"}


def fails(capsys, code, *words):
    assert code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    for word in words:
        assert word in error, error


def test_photographs_become_a_store_that_trains(folder, tmp_path, vae, capsys):
    out = tmp_path / "out"
    assert run(folder, out, vae, "--dtype", "float32", "--verify") == 0
    output = capsys.readouterr()
    assert "7 images as moments of 4x8x8, mirrored too" in output.out and "classes   3" in output.out
    assert "images 7/7" in output.err and not list(out.glob(".*"))
    data = create({"name": "latents", "path": str(out)}, task="class")
    assert data.size == 7 and data.class_names == CLASSES
    assert data.shape == (4, 8, 8) and data.can_decode
    batch = data.batch(torch.arange(7), Draws(0, 0, torch.arange(7)))
    assert batch.y.tolist() == LABELS
    assert data.to_pixels(batch.x).shape == (7, 3, SIZE, SIZE)

    # What lies there is what the autoencoder says of each picture, straight and mirrored.
    network = Autoencoder(str(vae))
    store = open_store(out)
    for flip in (False, True):
        rows = store.latents(torch.arange(7), torch.full((7,), flip))
        for row, path in zip(rows, sorted(folder.rglob("*.png")), strict=True):
            crop = torch.from_numpy(center_crop(Image.open(path), SIZE).copy()).permute(2, 0, 1)
            expected = network.encode((crop.flip(-1) if flip else crop)[None])[0]
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)
    mean, log_variance = store.latents(torch.arange(7)).double().chunk(2, 1)
    torch.testing.assert_close(store.mean.double(), mean.mean((0, 2, 3)), atol=1e-4, rtol=1e-4)
    second = (mean.square() + log_variance.exp()).mean((0, 2, 3)) - mean.mean((0, 2, 3)).square()
    torch.testing.assert_close(store.std.double(), second.sqrt(), atol=1e-4, rtol=1e-4)

    words = ["data=latents", f"data.path={out}", "size=T/2", "route=0-1", "train.final_samples=true"]
    with Image.open(train(small(tmp_path, *words), quiet=True) / "samples/final.png") as grid:
        assert min(grid.size) >= SIZE


def test_samples_halves_and_no_flips(folder, tmp_path, vae):
    moments, sample = tmp_path / "m", tmp_path / "s"
    assert run(folder, moments, vae, "--dtype", "float32") == 0
    assert run(folder, sample, vae, "--kind", "sample", "--no-flips", "--limit", 5) == 0
    store = open_store(sample)
    assert store.kind == "sample" and not store.has_flips and store.count == 5
    rows = store.latents(torch.arange(5))
    assert rows.dtype == torch.float16
    mean, log_variance = open_store(moments).latents(torch.arange(5)).chunk(2, 1)
    z = (rows.float() - mean) / (log_variance / 2).exp()
    assert abs(float(z.mean())) < 0.15 and abs(float(z.std()) - 1) < 0.1
    data = create({"name": "latents", "path": str(sample)}, task="none")
    torch.testing.assert_close(data.batch(torch.arange(5), None).x, rows.float() * 0.18215)


def test_a_kill_loses_one_shard_and_a_rerun_continues(folder, tmp_path, vae, monkeypatch, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run(folder, whole, vae) == 0

    class Killed(BaseException):
        pass

    def killed(self, done):
        if done > 4:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(console.Progress, "update", killed)
        with pytest.raises(Killed):
            run(folder, out, vae)
    files = ["lock", "plan.json", "shard-00000.json", "shard-00000.safetensors"]
    assert [path.name for path in sorted(out.iterdir())] == files
    # What a kill inside a write leaves behind: a temporary file, or a shard without its note.
    left = out / ".shard-00001-abcd1234.tmp.safetensors"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))  # it is removed once it is a day old
    (out / "shard-00001.safetensors").write_bytes(b"half")
    with pytest.raises(DataError, match="has not finished here"):
        open_store(out)
    first = (out / "shard-00000.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert run(folder, out, vae) == 0
    assert "3 shards, 1 finished before" in capsys.readouterr().err
    assert (out / "shard-00000.safetensors").stat().st_mtime_ns == first
    assert content(out) == content(whole)
    # A third time there is nothing left to do, and a shard that is cut, lost or has a damaged note is made again.
    assert run(folder, out, vae) == 0
    (out / "shard-00000.safetensors").write_bytes(b"half")
    (out / "shard-00001.safetensors").unlink()
    note = json.loads((out / "shard-00002.json").read_text())
    (out / "shard-00002.json").write_text(json.dumps(note | {"count": "3"}))
    assert run(folder, out, vae) == 0
    assert content(out) == content(whole)


def one_of_two_processes(monkeypatch, rank):
    """What torchrun sets for one of its two processes."""
    group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    for name, value in (group | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)


def test_two_processes_make_the_same_store_and_a_second_launch_is_refused(folder, tmp_path, vae, monkeypatch, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(folder, one, vae) == 0
    with locked(two):
        fails(capsys, run(folder, two, vae), "is being written by process", "type the command again")
        assert not (two / "plan.json").exists()
        one_of_two_processes(monkeypatch, rank=1)  # of the launch whose first process holds it
        assert run(folder, two, vae) == 0
    assert sorted(path.name for path in two.glob("shard-*.json")) == ["shard-00001.json"]
    assert not (two / "manifest.json").exists()
    one_of_two_processes(monkeypatch, rank=0)
    assert run(folder, two, vae) == 0
    assert content(one) == content(two)


def test_unreadable_pictures_are_listed_and_skipped(folder, tmp_path, vae, capsys):
    (folder / "animals/broken.jpg").write_bytes(b"\xff\xd8\xff no picture")
    whole = (folder / "grey/camera.png").read_bytes()
    (folder / "grey/cut.png").write_bytes(whole[: len(whole) // 3])
    odd = folder / os.fsdecode(b"odd\xfe")  # no UTF-8; a class without a readable picture
    odd.mkdir()
    (odd / "0.png").write_bytes(b"")
    out = tmp_path / "out"
    assert run(folder, out, vae) == 0
    assert "skipped   3" in capsys.readouterr().out
    listed = [line.split("\t") for line in (out / "skipped.txt").read_text().splitlines()]
    assert [name for name, _ in listed] == ["animals/broken.jpg", "grey/cut.png", r"odd\udcfe/0.png"]
    assert all(reason for _, reason in listed)
    store = open_store(out)
    assert store.count == 7 and store.labels.tolist() == [0, 0, 1, 1, 3, 3, 3]
    assert store.classes == ("animals", "grey", r"odd\udcfe", "things")


def test_a_full_disk_loses_nothing(folder, tmp_path, vae, monkeypatch, capsys):
    whole, out, write = tmp_path / "whole", tmp_path / "out", Path.write_bytes
    more = ("--size", 256, "--shard", 2, "--no-flips")
    assert run(folder, whole, vae, *more) == 0

    def limited(self, data):
        room = 100_000 - sum(path.stat().st_size for path in out.glob("*"))
        write(self, data[:room])
        if len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", limited)
        fails(capsys, run(folder, out, vae, *more), "the disk is full", "run the same command again to resume")
    assert not list(out.glob(".*")) and not (out / "manifest.json").exists()
    assert run(folder, out, vae, *more) == 0
    assert "4 shards, 2 finished before" in capsys.readouterr().err
    assert content(out) == content(whole)


# --- sources -----------------------------------------------------------------------------------


def write_pictures(folder, pictures, labels, **texts):
    """Write tars of encoded pictures."""
    return write_tars(folder, list(pictures.values()), labels, field="png", encode=bytes, **texts)


def write_table(path, pictures, **columns):
    """Write a parquet table as the `datasets` library does, with the names of the classes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": picture, "path": name} for name, picture in pictures.items()]
    table = pa.table({"image": images, "label": LABELS[: len(images)], **columns})
    info = {"info": {"features": {"label": {"names": CLASSES, "_type": "ClassLabel"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, path, row_group_size=2, compression="none")


def test_tars_and_tables_give_what_the_folder_gives(folder, pictures, tmp_path, vae):
    captions, table = [f"caption {i}" for i in range(7)], tmp_path / "train-0.parquet"
    # A field of the name `image` is no picture: the one with a picture's suffix is.
    tars = write_pictures(tmp_path / "tars", pictures, LABELS, txt=captions, image=captions)
    write_table(table, pictures, caption=captions)
    write_table(tmp_path / "test-0.parquet", dict(list(pictures.items())[:2]))
    assert run(folder, tmp_path / "a", vae) == run(tars, tmp_path / "b", vae) == 0
    assert run(tmp_path, tmp_path / "c", vae, "--files", "train-*.parquet") == 0
    for shard in (tmp_path / "a").glob("shard-*.safetensors"):
        for out in ("b", "c"):
            assert (tmp_path / out / shard.name).read_bytes() == shard.read_bytes()
    assert [open_store(tmp_path / out).classes for out in "abc"] == [CLASSES, ("0", "1", "2"), CLASSES]
    assert run(table, tmp_path / "c", vae) == 0  # the same source as one file
    for source in (open_source(tars), open_source(table)):
        assert source.captioned and [raw.captions for raw in source.read(2, 6)] == [(text,) for text in captions[2:6]]


@pytest.mark.parametrize("kind", ["folder", "tars", "table"])
def test_images_that_were_replaced_are_encoded_again(pictures, tmp_path, vae, kind, capsys):
    def write(images):
        source = tmp_path / "images"
        if kind == "tars":
            return write_pictures(source, images, LABELS)
        if kind == "table":
            write_table(tmp_path / "images.parquet", images)
            return tmp_path / "images.parquet"
        for name, data in images.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(data)
        return source

    # A download that is broken, in the last of three shards, and its repair of the same size.
    last = "things/house.png"
    assert run(write(pictures | {last: b"<html>".ljust(len(pictures[last]))}), tmp_path / "out", vae) == 0
    assert "skipped   1" in capsys.readouterr().out
    first = (tmp_path / "out/shard-00000.safetensors").stat().st_mtime_ns
    source = write(pictures)
    assert run(source, tmp_path / "out", vae) == run(source, tmp_path / "fresh", vae) == 0
    assert "images of" in capsys.readouterr().err
    assert content(tmp_path / "out") == content(tmp_path / "fresh")
    assert (tmp_path / "out/skipped.txt").read_text() == ""
    assert kind == "table" or (tmp_path / "out/shard-00000.safetensors").stat().st_mtime_ns == first
    note = tmp_path / "out/shard-00000.json"
    note.write_text(json.dumps({key: value for key, value in json.loads(note.read_text()).items() if key != "source"}))
    assert run(source, tmp_path / "out", vae) == 0  # as after an earlier version
    assert "1 shards of an earlier version are kept" in capsys.readouterr().err


def test_another_preparation_in_the_same_folder_is_refused(folder, tmp_path, vae, capsys):
    out = tmp_path / "out"
    assert run(folder, out, vae) == 0
    before = content(out)
    fails(capsys, run(folder, out, vae, "--dtype", "float32"), "dtype 'float16' instead of 'float32'")
    (folder / "grey/coins.png").rename(folder / "grey/money.png")
    fails(capsys, run(folder, out, vae), "another list of images")
    assert content(out) == before
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "thesis.tex").write_text("x")
    fails(capsys, run(folder, busy, vae), "is not empty")


# --- captions ----------------------------------------------------------------------------------


def text_encoder(folder, family):
    """Write a small CLIP or T5 with random weights and a tokenizer of five words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "</s>", "<unk>", "a", "cat", "picture", "number"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    if family == "clip":
        layers = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=len(words), **layers))
    else:
        layers = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
        model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=len(words), **layers))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def coco(folder, tmp_path, pictures):
    """COCO's annotation layout: images with ids, captions that point to them, out of order."""
    notes = [
        {"id": 10 * k + i, "image_id": 500 - i, "caption": f"a {'cat' if k else 'picture'} number {i}"}
        for i in range(len(pictures))
        for k in (1, 0)
    ]
    images = [{"id": 500 - i, "file_name": name} for i, name in enumerate(pictures)]
    path = tmp_path / "captions.json"
    path.write_text(json.dumps({"images": images, "annotations": notes}))
    return path


@pytest.mark.parametrize("family", ["clip", "t5"])
def test_captions_are_embedded(folder, coco, tmp_path, vae, family, capsys, monkeypatch):
    encoder = text_encoder(tmp_path / "encoder", family)
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)  # a store is read from elsewhere: its encoder is kept in full
    more = ("--captions", coco, "--text", "encoder", "--captions-per-image", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert run(folder, out, vae, *more) == 0
        assert f"captions  [3, 77, 8] by {encoder}" in capsys.readouterr().out
        data = create({"name": "latents", "path": str(out)}, task="text")
        index = torch.arange(7)
        batch = data.batch(index, Draws(0, 0, index))
        assert data.text == (77, 8) and batch.text.shape == (7, 77, 8) and batch.y is None
        first = data.condition(index, "train")
        assert first.captions == [f"a picture number {i}" for i in range(7)]
        assert any(c.startswith("a cat") for c in batch.captions)
        again = data.encode_text(batch.captions)
    torch.testing.assert_close(batch.text, again, atol=2e-3, rtol=2e-3)
    assert not torch.equal(batch.text[0], batch.text[1])
    with pytest.raises(DataError, match="without labels"):
        create({"name": "latents", "path": str(out)}, task="class")


def test_lines_of_captions_are_read_whatever_is_in_them(pictures, tmp_path):
    for i, content in enumerate(list(pictures.values())[:2]):
        (tmp_path / f"{i}.png").write_bytes(content)
    rows = [("0.png", "ends\u2028here"), ("1.png", " a"), ("0.png", "again")]
    lines = [json.dumps({"file_name": name, "caption": text}, ensure_ascii=False) for name, text in rows]
    (tmp_path / "captions.jsonl").write_text("\n \n".join(lines) + "\n", encoding="utf-8")
    source = open_source(tmp_path, captions=tmp_path / "captions.jsonl")
    assert [raw.captions for raw in source.read(0, 2)] == [("ends\u2028here", "again"), ("a",)]


def test_missing_captions_are_named(folder, coco, tmp_path, vae, capsys):
    encoder = text_encoder(tmp_path / "encoder", "t5")
    extra = folder / "grey/extra.png"
    extra.write_bytes((folder / "grey/coins.png").read_bytes())
    more = ("--captions", coco, "--text", encoder)
    message = "no caption for grey/extra.png (images without a caption: 1)"
    fails(capsys, run(folder, tmp_path / "a", vae, *more), message)
    fails(capsys, run(folder, tmp_path / "c", vae, "--text", encoder), "give them with --captions")


# --- the command -------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_for_real_under_torchrun_and_continued(folder, tmp_path, vae):
    whole, out = tmp_path / "whole", tmp_path / "out"
    # One thread as below: sums in another order would differ in the last bit.
    assert run(folder, whole, vae, "--shard", 1) == 0
    script = str(ROOT / "experiments/prepare.py")
    words = arguments(folder, out, vae, "--shard", 1, "--threads", 1)
    single = {**os.environ, "OMP_NUM_THREADS": "1"}
    one = subprocess.Popen([sys.executable, script, *words], stderr=subprocess.DEVNULL, env=single)
    deadline = time.monotonic() + 120
    while not (out / "shard-00001.json").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    one.send_signal(signal.SIGKILL)
    one.wait()
    finished = len(list(out.glob("shard-*.json")))
    assert finished >= 2
    done = subprocess.run(two_ranks(script, *words), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("7 images as moments") >= 1
    assert content(out) == content(whole)


def test_latents_that_are_not_finite_are_refused(folder, tmp_path, vae, capsys):
    from diffusers import AutoencoderKL

    network = AutoencoderKL.from_pretrained(vae)
    network.quant_conv.bias.data.fill_(1e5)
    network.save_pretrained(tmp_path / "other")
    code = run(folder, tmp_path / "out", tmp_path / "other", "--dtype", "float16")
    fails(capsys, code, "animals/cat.png has latents that are not finite in", "another --vae")
    assert not (tmp_path / "out" / "manifest.json").exists()
