"""Every reader of files with one small valid input each, and bytes that ought to do harm, for the safety tests."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from analysis_runs import similarity_map, write
from data_tools import latents, write_lightning, write_store
from PIL import Image
from published_weights import published
from safetensors.torch import save_file
from small import random_backbone

import analysis
import backbones
from analysis.measurements import similarity
from analysis.runs import run_files
from backbones import import_weights
from experiments.config.compose import load
from experiments.data.latent_store import open_store
from experiments.data.registry import parse
from experiments.evaluation import trained_model
from experiments.evaluation.images import Images
from experiments.evaluation.reference import load_reference
from experiments.runtime import checkpoint_files
from routing.errors import UserError

LABELS = [0, 1, 2, 0, 1, 2]
_MAKE = "open({!r}, 'w').close()"


class Bomb:
    """Unpickling it creates a file: proof that foreign code ran."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (exec, (_MAKE.format(self.marker),))


class Memory:
    """Peak of resident memory from here on, in MB (Linux; 0 elsewhere)."""

    def __enter__(self):
        self.start = self._read("VmRSS")
        if self.start:
            Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
        return self

    def __exit__(self, *error):
        self.grown = self._read("VmHWM") - self.start

    @staticmethod
    def _read(key):
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return 0
        return int(next(line.split()[1] for line in lines if line.startswith(key))) // 1024


def pickles(marker):
    """Return one harmful file content for each format that can carry a pickle."""
    bomb = Bomb(marker)
    contents = {f"pickle-{protocol}": pickle.dumps(bomb, protocol=protocol) for protocol in (0, 5)}
    for name, as_zip in (("torch", True), ("torch-legacy", False)):
        stream = io.BytesIO()
        state = {"mean": bomb, "std": bomb, "state_dict": bomb, "encoder.conv_in.weight": bomb}
        torch.save(state, stream, _use_new_zipfile_serialization=as_zip)
        contents[name] = stream.getvalue()
    objects = np.array([bomb, bomb], dtype=object)
    stream = io.BytesIO()
    np.save(stream, objects, allow_pickle=True)
    contents["npy"] = stream.getvalue()
    # The arrays that any reader asks for.
    keys = "mu sigma rows n features name protocol cosine arr_0 arr_1 images seeds labels tar offset header state"
    stream = io.BytesIO()
    np.savez(stream, **dict.fromkeys(keys.split(), objects))
    contents["npz"] = stream.getvalue()
    contents["yaml"] = f"seed: !!python/object/apply:builtins.exec [{json.dumps(_MAKE.format(str(marker)))}]\n".encode()
    return contents


# --- readers: each makes valid files below a folder and reads them as the program does ----------------


class Reader(NamedTuple):
    """One reader of the suite; all are in `READERS`."""

    make: Callable[[Path], None]  # writes valid files below a folder
    read: Callable[[Path], object]  # reads them; must raise nothing but UserError
    files: tuple[str, ...]  # patterns of the files that may be damaged


def each(*reads):
    """Return a reader that calls several, each also after one that refused."""

    def read(folder):
        refusals = []
        for one in reads:
            try:
                one(folder)
            except UserError as error:
                refusals.append(str(error))
        if refusals:
            raise UserError(refusals[0])

    return read


def _model():
    return random_backbone("dit", depth=2, input_size=8, in_channels=1, num_classes=3)


def _config():
    return load(["backbone.depth=2", "backbone.width=16", "route=none"])


def make_checkpoint(folder):
    model = _model()
    tensors = {
        f"{prefix}.{key}": tensor.clone() for prefix in ("ema", "model") for key, tensor in model.state_dict().items()
    }
    state = {"step": 3, "config": _config().to_dict(), "model": model.config, "data": {}}
    checkpoint_files.write(folder, 3, tensors, state)


def read_checkpoint(folder):
    trained_model.load_model(folder, device="cpu")


def read_unverified(folder):
    """Read a checkpoint as if its checksums held."""
    path = next((folder / "checkpoints").iterdir())
    tensors, state = checkpoint_files.read(path)
    ema = {key.removeprefix("ema."): tensor for key, tensor in tensors.items() if key.startswith("ema.")}
    trained_model.build_model(state, ema, str(path), "cpu")


def make_export(folder):
    model = _model()
    trained_model.export(folder / "model.safetensors", model, model.state_dict(), _config(), 3, {})


def read_export(folder):
    trained_model.load_model(folder / "model.safetensors", device="cpu")


def read_pretrained(folder):
    backbones.Backbone.from_pretrained(folder / "model.safetensors")


def read_metadata(folder):
    run_files.model_arguments(folder)


def make_foreign_weights(folder):
    state = published("dit")
    torch.save({"model": state}, folder / "weights.pt")
    save_file(state, folder / "weights.safetensors")


def read_foreign_weights(folder):
    def load(name):
        return lambda folder: import_weights.load(folder / name, "dit", heads=2)

    each(load("weights.pt"), load("weights.safetensors"))(folder)


def read_everything(folder):
    store = open_store(folder, verify=False)
    index = torch.arange(min(store.count, 64))
    store.latents(index)
    if store.has_flips:
        store.latents(index, torch.ones(len(index), dtype=torch.bool))
    if store.text is not None:
        store.text_rows(index, torch.zeros(len(index), dtype=torch.int64))


def read_description(folder):
    options = {"name": "latents", "path": str(folder)}
    assert parse(options).describe()["shape"]
    parse(options).fingerprint()


def make_store(folder):
    text = (torch.zeros(6, 2, 3, 4), [["a cat", "a dog"]] * 6)
    array = latents(6, side=2)
    write_store(folder, array, LABELS, flips=array + 1, per_file=3, text=text)


def make_lightning(folder):
    write_lightning(folder, latents(6, side=2), latents(6, side=2), LABELS)


class Features:
    """Stands for a feature network: statistics are read for it, nothing is computed."""

    name, dim, checksum, identity = "tiny", 4, "0123456789abcdef", "tiny@01234567"


def make_reference(folder):
    rows = np.random.default_rng(0).normal(size=(8, 4))
    np.savez(
        folder / "reference.npz", mu=rows.mean(0), sigma=np.cov(rows.T), n=np.int64(8),
        rows=rows.astype(np.float32), features=np.str_("tiny@01234567"), name=np.str_("test"),
    )  # fmt: skip


def read_reference(folder):
    load_reference(folder / "reference.npz", Features(), rows=True)


def make_images(folder):
    images = np.zeros((8, 4, 4, 3), np.uint8)
    np.savez_compressed(folder / "batch.npz", arr_0=images, arr_1=np.zeros(8, np.int64))
    (folder / "pictures").mkdir()
    for i in range(2):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(folder / "pictures" / f"{i}.png")


def read_batch(folder):
    images = Images(folder / "batch.npz")
    images.labels()
    list(images.batches(range(min(images.n, 64))))


def read_pictures(folder):
    images = Images(folder / "pictures")
    list(images.batches(range(images.n)))


def make_similarity(folder):
    similarity_map(np.eye(3), route="none").save(folder / "similarity.npz")


def read_similarity(folder):
    similarity.read(folder / "similarity.npz")


def make_runs(folder):
    run = write(folder, evaluations=2, train__steps=40)
    lines = (run / "scores.jsonl").read_text().splitlines()
    (run / "evaluations").mkdir()
    (run / "evaluations" / "a.json").write_text(json.dumps({"scores": [json.loads(lines[0])]}))
    live = write(folder, seed=1, evaluations=2, train__steps=40)
    (live / "summary.json").unlink()
    (live / "status.json").write_text(json.dumps({"status": "running", "step": 3, "steps": 40}))


def read_runs(folder):
    with warnings.catch_warnings():  # runs and scores that cannot be read are left out and named
        warnings.filterwarnings("ignore", r"\d+ damaged run folders were left out|dit-T1-")
        frame = analysis.load(folder)
        analysis.curves(frame)
        analysis.scores(frame)


READERS = {
    "checkpoint": Reader(make_checkpoint, each(read_unverified, read_checkpoint), ("checkpoints/*/*",)),
    "exported weights": Reader(make_export, each(read_export, read_pretrained, read_metadata), ("model.safetensors",)),
    "weights of others": Reader(make_foreign_weights, read_foreign_weights, ("weights.*",)),
    "latent store": Reader(make_store, each(read_everything, read_description), ("manifest.json", "shard-*")),
    "LightningDiT's shards": Reader(make_lightning, read_everything, ("*.safetensors", "latents_stats.pt")),
    "reference": Reader(make_reference, read_reference, ("reference.npz",)),
    "images": Reader(make_images, each(read_batch, read_pictures), ("batch.npz", "pictures/*.png")),
    "similarity": Reader(make_similarity, read_similarity, ("similarity.npz",)),
    "run folders": Reader(make_runs, read_runs, ("*/*.yaml", "*/*.json", "*/*.jsonl", "*/evaluations/*")),
}


def damage_targets(folder, files):
    """Return the files of a valid input that may be damaged."""
    paths = sorted({path for pattern in files for path in folder.glob(pattern) if path.is_file()})
    assert paths, f"nothing below {folder} matches {files}"
    return paths
