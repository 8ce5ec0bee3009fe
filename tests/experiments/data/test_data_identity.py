"""Which data a run is of: not how their path is typed, but what lies there, also after it has changed in place."""

import json
import os
import shutil

import numpy as np
import pytest
from data_tools import latents, write_lightning, write_store
from PIL import Image
from small import small

from experiments.runtime import digest
from experiments.runtime.checkpoint_files import CheckpointError, describe_files
from experiments.runtime.digest import File, content_digest, picture_ends, sampled
from experiments.runtime.run_folder import step_folder
from experiments.training.session import train
from routing.errors import UserError


def bitmaps(folder, value):
    """Pictures whose files have one size, whatever they show."""
    for name in ("cat/0", "cat/1", "cat/2", "dog/0", "dog/1", "dog/2"):
        path = folder / f"{name}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(0).integers(0, 30, (16, 16, 3))
        Image.fromarray((noise + value).astype(np.uint8)).save(path)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """One of each kind of data in the current folder."""
    monkeypatch.chdir(tmp_path)
    z = latents(12)
    bitmaps(tmp_path / "pictures", 20)
    write_lightning(tmp_path / "shards", z, -z, [0, 1, 2] * 4)
    write_lightning(tmp_path / "held_out", z[:3], -z[:3], [0, 1, 2])
    write_store(tmp_path / "prepared", z, [0, 1, 2] * 4)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    for name in ("reference.npz", "weights.pt"):
        (tmp_path / name).write_bytes(b"content")
    return tmp_path


LATENTS = ("data=latents", "data.path=shards", "size=T/2")


@pytest.mark.parametrize(
    ("words", "key", "path"),
    [
        (("data=folder",), "data.path", "pictures"),
        (LATENTS, "data.path", "shards"),
        (LATENTS, "data.path", "prepared"),
        (LATENTS, "data.test", "held_out"),
        (LATENTS, "data.vae", "vae"),
        ((*LATENTS, "eval=inception"), "eval.reference", "reference.npz"),
        ((*LATENTS, "eval=inception"), "eval.inception_weights", "weights.pt"),
        ((*LATENTS, "eval=inception"), "eval.dinov2_weights", "weights.pt"),
    ],
)
def test_a_path_spelled_in_other_ways_is_one_run_and_other_contents_are_another(data, words, key, path):
    (data / "link").symlink_to(path)
    spellings = (path, f"./{path}", f"{path}/" if (data / path).is_dir() else path, str(data / path), "link", f"vae/../{path}")
    names = {small(data, *words, f"{key}={spelling}").name for spelling in spellings}
    assert len(names) == 1
    changed = next(file for file in (data / path).rglob("*") if file.is_file()) if (data / path).is_dir() else data / path
    changed.write_bytes(changed.read_bytes() + b" ")
    assert small(data, *words, f"{key}={path}").name not in names


def replace_pictures(data):
    bitmaps(data / "pictures", 200)


def replace_shards(data):
    write_lightning(data / "shards", latents(12, seed=1), latents(12, seed=2), [0, 1, 2] * 4, stats=False)


def replace_held_out(data):
    write_lightning(data / "held_out", latents(3, seed=1), latents(3, seed=2), [0, 1, 2], stats=False)


def replace_prepared(data):  # without its manifest
    other = write_store(data / "other", latents(12, seed=1), [0, 1, 2] * 4)
    for shard in other.glob("*.safetensors"):
        shutil.copy(shard, data / "prepared" / shard.name)


@pytest.mark.parametrize(
    ("words", "replace"),
    [
        (("data=folder", "data.path=pictures", "size=T/8"), replace_pictures),
        (LATENTS, replace_shards),
        ((*LATENTS, "data.test=held_out"), replace_held_out),
        (("data=latents", "data.path=prepared", "size=T/2"), replace_prepared),
    ],
)
def test_a_run_does_not_resume_on_data_that_were_replaced_under_the_same_names_and_sizes(data, words, replace):
    config = small(data, *words)
    train(config, quiet=True)
    before = (config.folder / "summary.json").read_bytes()
    replace(data)
    for steps in (6, 9):  # finished, or to be trained further
        with pytest.raises(CheckpointError, match=f"was trained on other data: .* move {config.folder} away"):
            train(small(data, *words, f"train.steps={steps}"), quiet=True)
    assert (config.folder / "summary.json").read_bytes() == before


def change_state(checkpoint, change):
    """Change what an intact checkpoint says of its run."""
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"files": describe_files(checkpoint)}))


def test_a_run_of_an_earlier_version_is_named_with_its_mv_and_carried_on(data):
    words = (*LATENTS, "data.test=./held_out")
    config = small(data, *words)
    train(config, quiet=True)

    def as_typed(state):  # what earlier versions wrote
        del state["data_digest"]
        state["hashed"]["data"].update(path="shards/", test="held_out")

    change_state(step_folder(config.folder, 6), as_typed)
    former = config.folder.with_name(f"{config.name.rpartition('-')[0]}-01234567")
    config.folder.rename(former)
    longer = small(data, *words, "train.steps=9")
    with pytest.raises(UserError, match=f"{former} is this run, at step 6, .*: mv {former} {config.folder} carries it on"):
        train(longer, quiet=True)
    assert small(data, *words, "seed=1").name and not config.folder.exists()
    former.rename(config.folder)
    train(longer, quiet=True)
    metrics = (config.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [2, 4, 6, 8, 9]
    saved = json.loads((step_folder(config.folder, 9) / "state.json").read_text())
    assert len(saved["data_digest"]) == 64  # accepted without one, and stored


def test_a_digest_follows_ends_and_samples_of_files_and_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "file"
    content = bytearray(os.urandom(5 << 20))
    path.write_bytes(content)
    first, ends = sampled(path), picture_ends(path)
    for position in (0, len(content) - 1):
        changed = content.copy()
        changed[position] ^= 1
        path.write_bytes(changed)
        assert sampled(path) != first and picture_ends(path) != ends
    path.write_bytes(content)
    assert sampled(path) == first and picture_ends(path) == ends
    files = [File("a", str(path), sampled), File("gone", str(tmp_path / "gone"), picture_ends)]
    value = content_digest(files, tmp_path / "cache")
    monkeypatch.setattr(digest, "_digest_of", None)
    assert content_digest(files, tmp_path / "cache") == value
    monkeypatch.undo()
    path.write_bytes(content[::-1])
    assert content_digest(files, tmp_path / "cache") != value
