"""Every reader of files with one small valid input each, and bytes that ought to do harm, for the safety tests."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import signal
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import yaml
from analysis_runs import write
from data_tools import latents, write_lightning, write_store, write_tars
from PIL import Image
from published_weights import published
from rich.console import Console
from safetensors.torch import save_file
from small import random_backbone

import analysis
import backbones
from analysis.measurements import similarity
from analysis.measurements.similarity import SimilarityFile
from analysis.runs import run_files
from backbones import import_weights
from experiments.config.compose import load
from experiments.data.latent_store import open_store
from experiments.data.registry import parse
from experiments.evaluation import read_shards, trained_model
from experiments.evaluation.images import Images
from experiments.evaluation.reference import load_reference
from experiments.runtime import checkpoint_files
from routing.errors import UserError
from sweeps.plan import cells, grid, resources
from sweeps.status import status, status_table
from sweeps.store.folder import JobBatch, Sweep, all_sweeps
from sweeps.store.planned_run import PlannedRun

LABELS = [0, 1, 2, 0, 1, 2]
_MAKE = "open({!r}, 'w').close()"


class Bomb:
    """Unpickling it creates a file: proof that foreign code ran."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (exec, (_MAKE.format(self.marker),))


class Hang(BaseException):
    """A reader took too long; no `except Exception` swallows it."""


@contextlib.contextmanager
def deadline(seconds=20):
    def ring(*_):
        raise Hang(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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


def make_tars(folder):
    write_tars(folder, latents(6, side=2), LABELS)
    read_everything(folder)  # writes the index


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


def make_samples(folder):
    (folder / "manifest.json").write_text(json.dumps({"count": 4, "shard": 2}))
    for k in range(2):
        arrays = {"images": np.zeros((2, 4, 4, 3), np.uint8), "seeds": np.arange(2)}
        np.savez(folder / f"shard-{k:05d}.npz", labels=np.zeros(2, np.int64), **arrays)


def read_samples(folder):
    list(read_shards(folder))


def make_similarity(folder):
    about = {key: "x" for key in ("run", "backbone", "size", "data", "weights")}
    protocol = {**about, "route": "none", "levels": [1.0], "samples": 4}
    SimilarityFile(np.eye(3), protocol).save(folder / "similarity.npz")


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


def make_sweep(folder):
    sweep = Sweep(folder, "g")
    runs = []
    for name in ("r0", "r1"):
        place = str(folder / name)
        runs.append(PlannedRun(name, "train", name, "experiments.run:main", (), True, place, 10, {"seed": name[1]}))
        (folder / name).mkdir()
    sweep.add("g", runs)
    sweep.intend(JobBatch("b", "debug", "debug", ["r0", "r1"], 0.0, "c"))
    sweep.submitted("b", {"r0": "1", "r1": "2"})
    sweep.note("r0", "start", step=0, rank=0, pid=1)
    sweep.note("r0", "end", how="done", step=10, rank=0)
    sweep.note("r1", "end", how="failed", step=2, rank=0, error="it broke", where="x:1")
    done = {"status": "done", "step": 10, "images_per_s": 5.0, "scores": {"fd": 3.0}}
    (folder / "r0" / "summary.json").write_text(json.dumps(done))
    (folder / "r1" / "status.json").write_text(json.dumps({"status": "failed", "step": 2, "time": 5.0}))


def read_sweep(folder):
    for sweep in all_sweeps(folder):
        rows, _ = status.statuses(sweep)
        status_table.plain(rows)
        Console(file=io.StringIO(), width=100).print(status_table.table("g", rows, 100))
        status_table.overview(sweep, rows)
        json.dumps(status_table.as_json(sweep, rows, ""))


def make_grid(folder):
    (folder / "grid.yaml").write_text("title: t\naxes:\n  backbone: [dit, mamba]\nseeds: [0]\n")
    (folder / "resources.yaml").write_text("kind: local\ntime: 60\nscales:\n  tiny: {time: 30}\n")


def read_grid(folder):
    cells.expand(grid.load(str(folder / "grid.yaml")), "tiny")


def read_resources(folder):
    resources.load(str(folder / "resources.yaml"))


READERS = {
    "checkpoint": Reader(make_checkpoint, each(read_unverified, read_checkpoint), ("checkpoints/*/*",)),
    "exported weights": Reader(make_export, each(read_export, read_pretrained, read_metadata), ("model.safetensors",)),
    "weights of others": Reader(make_foreign_weights, read_foreign_weights, ("weights.*",)),
    "latent store": Reader(make_store, each(read_everything, read_description), ("manifest.json", "shard-*")),
    "tars": Reader(make_tars, read_everything, ("*.tar", ".latent-index")),
    "LightningDiT's shards": Reader(make_lightning, read_everything, ("*.safetensors", "latents_stats.pt")),
    "reference": Reader(make_reference, read_reference, ("reference.npz",)),
    "images": Reader(make_images, each(read_batch, read_pictures), ("batch.npz", "pictures/*.png")),
    "shards of samples": Reader(make_samples, read_samples, ("manifest.json", "shard-*")),
    "similarity": Reader(make_similarity, read_similarity, ("similarity.npz",)),
    "run folders": Reader(make_runs, read_runs, ("*/*.yaml", "*/*.json", "*/*.jsonl", "*/evaluations/*")),
    "sweep": Reader(make_sweep, read_sweep, (".sweeps/g/*.json*", ".sweeps/g/attempts/*", "r*/*.json")),
    "grid and resources": Reader(make_grid, each(read_grid, read_resources), ("*.yaml",)),
}


def damage_targets(folder, files):
    """Return the files of a valid input that may be damaged."""
    paths = sorted({path for pattern in files for path in folder.glob(pattern) if path.is_file()})
    assert paths, f"nothing below {folder} matches {files}"
    return paths


# --- mutations -----------------------------------------------------------------------------------------

ODD = (
    None, True, False, 0, -1, 1, 3, 10**12, 2**60, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e308, float("nan"), float("inf"),
    "", "x", "1", "none", "..", "../../x", "a\0b", "[", [], [1], [[]], [None], [-1, -1], {}, {"a": 1}, {"a": {"b": []}},
    10**90, "@RAW@", "@RAW@",
)  # fmt: skip
# What no parser's value can be written as: it takes the place of @RAW@ in the text.
RAW = ("[" * 200 + "]" * 200, "[" * 100_000, "9" * 5000, "-1e999", "[" * 60 + "1" + "]" * 60)


def raw(random, text):
    """Return a text with its marks replaced by what is too deep or too long."""
    chosen = random.choice(RAW)
    for mark in ('\\"@RAW@\\"', '"@RAW@"', "'@RAW@'"):
        text = text.replace(mark, chosen)
    return text.encode()


def mutate_value(random, value):
    """Return a JSON value with one place replaced, dropped or doubled."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(sorted(value))
        if random.random() < 0.1:
            return {other: value[other] for other in value if other != key}
        return {**value, key: mutate_value(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        change = random.choice((value[at : at + 1] * 2, [], *[[mutate_value(random, value[at])]] * 6))
        return [*value[:at], *change, *value[at + 1 :]]
    if isinstance(value, str) and value[:1] == "{" and random.random() < 0.8:
        # JSON text inside of JSON: metadata of weights.
        return json.dumps(mutate_value(random, json.loads(value)))
    return random.choice(ODD)


def mutate_bytes(random, content):
    """Return bytes that are made up, cut, lengthened, shortened, overwritten or flipped."""
    kind = random.randrange(6)
    data = bytearray(content)
    at = random.randrange(len(data) + 1)
    if kind == 0:
        data = random.randbytes(random.choice((0, 1, 7, 8, 9, 100, 600)))
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at:at] = random.choice((random.randbytes(8), data[at : at + 512]))
    elif kind == 3:
        del data[at : at + random.choice((1, 4, 64, 512))]
    elif kind == 4:
        data[at : at + 8] = random.choice((b"\xff" * 8, bytes(8), struct.pack("<Q", 2**60)))
    elif data:
        # The head is what readers decide by: half of all flips are there.
        end = random.choice((len(data), min(len(data), 256)))
        for _ in range(random.randint(1, 4)):
            data[random.randrange(end)] = random.randrange(256)
    return bytes(data)


def mutate(random, path, content):
    """Return a damaged version of a valid file, by its format or by its bytes alone."""
    by_format = {".json": mutate_json, ".jsonl": mutate_jsonl, ".yaml": mutate_yaml, ".safetensors": mutate_safetensors}
    if path.suffix not in by_format or random.random() < 0.35:
        return mutate_bytes(random, content)
    return by_format[path.suffix](random, content)


def mutate_json(random, content):
    return raw(random, json.dumps(mutate_value(random, json.loads(content))))


def mutate_jsonl(random, content):
    lines = content.splitlines()
    at = random.randrange(len(lines))
    lines[at] = mutate_json(random, lines[at])
    return b"\n".join(lines)


def mutate_yaml(random, content):
    return raw(random, yaml.safe_dump(mutate_value(random, yaml.safe_load(content))))


def mutate_safetensors(random, content):
    (length,) = struct.unpack("<Q", content[:8])
    header = mutate_json(random, content[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def npy_header(shape, dtype="<f4"):
    """Return the head of an `.npy` file that claims a shape."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()
