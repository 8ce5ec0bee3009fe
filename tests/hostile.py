"""Every reader of files with one small valid input each, and bytes that ought to do harm, for the safety tests."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import pickle
import signal
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from data_tools import latents, write_lightning, write_store, write_tars
from safetensors.torch import save_file

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


def pickles(marker):
    """Return one harmful file content for each format that can carry a pickle."""
    bomb = Bomb(marker)
    found = {f"pickle-{p}": pickle.dumps(bomb, protocol=p) for p in (0, 5)}
    for name, new in (("torch", True), ("torch-legacy", False)):
        stream = io.BytesIO()
        state = {"mean": bomb, "std": bomb, "state_dict": bomb, "encoder.conv_in.weight": bomb}
        torch.save(state, stream, _use_new_zipfile_serialization=new)
        found[name] = stream.getvalue()
    objects = np.array([bomb, bomb], dtype=object)
    stream = io.BytesIO()
    np.save(stream, objects, allow_pickle=True)
    found["npy"] = stream.getvalue()
    keys = "mu sigma mu_s sigma_s rows n features name protocol cosine arr_0 arr_1 images seeds labels"
    stream = io.BytesIO()
    np.savez(stream, **dict.fromkeys([*keys.split(), "tar", "offset", "header", "state"], objects))
    found["npz"] = stream.getvalue()
    command = json.dumps(_MAKE.format(str(marker)))
    found["yaml"] = f"seed: !!python/object/apply:builtins.exec [{command}]\n".encode()
    found["yaml-nested"] = f"runs:\n  a: !!python/object/new:exec [{command}]\n".encode()
    return found


class Features:
    """Stands for a feature network: statistics are read for it, nothing is computed."""

    name, dim, checksum = "tiny", 4, "0123456789abcdef"

    def __call__(self, images):
        return {"features": images.float().mean((2, 3))[:, [0, 1, 2, 0]]}


# --- readers: each makes valid files below a folder and reads them as the program does ----------------


@dataclass(frozen=True)
class Reader:
    """One reader of the suite.

    Attributes:
        make: Writes valid files below a folder.
        read: Reads them; must raise nothing but UserError.
        files: Patterns of the files that may be damaged.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], object]
    files: tuple[str, ...]


READERS: dict[str, Reader] = {}


def reader(name, make, *files):
    def register(function):
        READERS[name] = Reader(make, function, files)
        return function

    return register


def _model():
    import backbones

    with torch.random.fork_rng(devices=[]):
        return backbones.create("dit", "T/2", depth=2, width=16, heads=2, input_size=8, in_channels=1, num_classes=3)


def _described():
    from experiments.config.compose import load

    return load(["backbone.depth=2", "backbone.width=16", "route=none"]).to_dict()


def make_checkpoint(folder):
    from experiments.runtime import checkpoint_files

    model = _model()
    tensors = {f"{p}.{k}": v.clone() for p in ("ema", "model") for k, v in model.state_dict().items()}
    state = {"step": 3, "config": _described(), "model": model.config, "data": {}}
    checkpoint_files.write(folder, 3, tensors, state)


@reader("checkpoint", make_checkpoint, "checkpoints/*/*")
def read_checkpoint(folder):
    from experiments.evaluation import trained_model

    trained_model.load_model(folder, device="cpu")


@reader("unverified checkpoint", make_checkpoint, "checkpoints/*/state.*")
def read_unverified(folder):
    from experiments.evaluation import trained_model
    from experiments.runtime import checkpoint_files

    path = next((folder / "checkpoints").iterdir())
    tensors, state = checkpoint_files.read(path)
    chosen = {k.removeprefix("ema."): v for k, v in tensors.items() if k.startswith("ema.")}
    trained_model.build_model(state, chosen, str(path), "cpu")


def make_export(folder):
    from experiments.config.compose import load
    from experiments.evaluation import trained_model

    model = _model()
    config = load(["backbone.depth=2", "backbone.width=16", "route=none"])
    trained_model.export(folder / "model.safetensors", model, model.state_dict(), config, 3, {})


@reader("exported weights", make_export, "model.safetensors")
def read_export(folder):
    from experiments.evaluation import trained_model

    trained_model.load_model(folder / "model.safetensors", device="cpu")


@reader("pretrained", make_export, "model.safetensors")
def read_pretrained(folder):
    from backbones import Backbone

    Backbone.from_pretrained(folder / "model.safetensors")


@reader("metadata of weights", make_export, "model.safetensors")
def read_metadata(folder):
    from analysis import run_files

    run_files.model_arguments(folder)


def make_foreign_weights(folder):
    from published_weights import published

    state = published("dit")
    torch.save({"model": state}, folder / "weights.pt")
    save_file(state, folder / "weights.safetensors")


@reader("weights.pt of others", make_foreign_weights, "weights.pt")
def read_foreign_pt(folder):
    from backbones import import_weights as weights

    weights.load(folder / "weights.pt", "dit", heads=2)


@reader("weights.safetensors of others", make_foreign_weights, "weights.safetensors")
def read_foreign_safetensors(folder):
    from backbones import import_weights as weights

    weights.load(folder / "weights.safetensors", "dit", heads=2)


def read_everything(folder):
    from experiments.data.latent_store import open_store

    store = open_store(folder, verify=False)
    index = torch.arange(min(store.count, 64))
    store.latents(index)
    if store.has_flips:
        store.latents(index, torch.ones(len(index), dtype=torch.bool))
    if store.text is not None:
        store.text_rows(index, torch.zeros(len(index), dtype=torch.int64))


def read_facts(folder):
    from experiments.data.registry import describe, fingerprint

    options = {"name": "latents", "path": str(folder)}
    assert describe(options)["shape"]
    fingerprint(options)


def make_store(folder):
    text = (torch.zeros(6, 2, 3, 4), [["a cat", "a dog"]] * 6)
    array = latents(6, side=2)
    write_store(folder, array, LABELS, flips=array + 1, per_file=3, text=text)


READERS["latent store"] = Reader(make_store, read_everything, ("manifest.json", "shard-*"))


READERS["facts of a store"] = Reader(make_store, read_facts, ("manifest.json", "shard-*"))

READERS["tars"] = Reader(lambda folder: write_tars(folder, latents(6, side=2), LABELS), read_everything, ("*.tar",))


def make_index(folder):
    write_tars(folder, latents(6, side=2), LABELS)
    read_everything(folder)


READERS["index of tars"] = Reader(make_index, read_everything, (".latent-index",))
READERS["LightningDiT's shards"] = Reader(
    lambda folder: write_lightning(folder, latents(6, side=2), latents(6, side=2), LABELS),
    read_everything,
    ("*.safetensors", "latents_stats.pt"),
)


def make_reference(folder):
    rows = np.random.default_rng(0).normal(size=(8, 4))
    np.savez(
        folder / "reference.npz", mu=rows.mean(0), sigma=np.cov(rows.T), n=np.int64(8),
        rows=rows.astype(np.float32), features=np.str_("tiny@01234567"), name=np.str_("test"),
    )  # fmt: skip
    images = np.zeros((8, 4, 4, 3), np.uint8)
    np.savez_compressed(folder / "batch.npz", arr_0=images, arr_1=np.zeros(8, np.int64))


@reader("reference", make_reference, "reference.npz")
def read_reference(folder):
    from experiments.evaluation.reference import load_reference

    load_reference(folder / "reference.npz", Features(), rows=True)


@reader("batch of images", make_reference, "batch.npz")
def read_images(folder):
    from experiments.evaluation.images import Images

    images = Images(folder / "batch.npz")
    images.labels()
    for _ in images.batches(range(min(images.n, 64))):
        pass


def make_pictures(folder):
    from PIL import Image

    for i in range(2):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(folder / f"{i}.png")


@reader("folder of pictures", make_pictures, "*.png")
def read_pictures(folder):
    from experiments.evaluation.images import Images

    images = Images(folder)
    for _ in images.batches(range(images.n)):
        pass


def make_samples(folder):
    (folder / "manifest.json").write_text(json.dumps({"count": 4, "shard": 2}))
    for k in range(2):
        arrays = {"images": np.zeros((2, 4, 4, 3), np.uint8), "seeds": np.arange(2)}
        np.savez(folder / f"shard-{k:05d}.npz", labels=np.zeros(2, np.int64), **arrays)


@reader("shards of samples", make_samples, "manifest.json", "shard-*")
def read_samples(folder):
    from experiments.evaluation import read_shards

    for _ in read_shards(folder):
        pass


def make_similarity(folder):
    from analysis.similarity import SimilarityFile

    about = {key: "x" for key in ("run", "backbone", "size", "data", "weights")}
    protocol = {**about, "route": "none", "levels": [1.0], "samples": 4}
    SimilarityFile(np.eye(3), protocol).save(folder / "similarity.npz")


@reader("similarity", make_similarity, "similarity.npz")
def read_similarity(folder):
    from analysis import similarity

    similarity.read(folder / "similarity.npz")


def make_scales(folder):
    about = {key: "x" for key in ("run", "backbone", "size", "data", "route")} | {"step": 1, "seed": 0}
    row = {"pair": "dense", "level": None, "plain": 1.0}
    found = {"format": "tread-suite-guidance-scale/1", **about, "notes": [], "rows": [row]}
    (folder / "guidance_scale.json").write_text(json.dumps(found))


@reader("guidance scale", make_scales, "guidance_scale.json")
def read_stored_scales(folder):
    from analysis.figures.effective_scale import effective_scale as draw
    from analysis.tables.guidance_scale import read_scales, scale_table

    found = read_scales(folder / "guidance_scale.json")
    scale_table([found]), scale_table([found], levels=True), draw([found])


def _digits(split):
    images = torch.arange(8 * 3 * 64, dtype=torch.int64).remainder(255).to(torch.uint8)
    return images.view(8, 3, 8, 8), torch.arange(8) % 2


def make_classifier(folder):
    from experiments.evaluation import small_networks

    recipe = small_networks.Recipe(width=2, dim=2, epochs=1)
    build = functools.partial(small_networks.SmallClassifier, 8, 2, recipe)
    small_networks.load_or_make(folder / "classifiers", "digits", [], recipe, build, _digits)


@reader("cached classifier", make_classifier, "classifiers/*.safetensors")
def read_classifier(folder):
    make_classifier(folder)


def make_runs(folder):
    from analysis_runs import write

    run = write(folder, evaluations=2, train__steps=40)
    lines = (run / "scores.jsonl").read_text().splitlines()
    (run / "evaluations").mkdir()
    (run / "evaluations" / "a.json").write_text(json.dumps({"scores": [json.loads(lines[0])]}))
    live = write(folder, seed=1, evaluations=2, train__steps=40)
    (live / "summary.json").unlink()
    (live / "status.json").write_text(json.dumps({"status": "running", "step": 3, "steps": 40}))


@reader("run folders", make_runs, "*/*.yaml", "*/*.json", "*/*.jsonl", "*/evaluations/*")
def read_runs(folder):
    import analysis

    with warnings.catch_warnings():  # runs and scores that cannot be read are left out and named
        warnings.filterwarnings("ignore", r"\d+ damaged run folders were left out|dit-T1-")
        frame = analysis.load(folder)
        analysis.curves(frame)
        analysis.scores(frame)


def make_sweep(folder):
    from sweeps.store.folder import JobBatch, Sweep
    from sweeps.store.planned_run import PlannedRun

    runs = []
    for seed in range(2):
        run = PlannedRun(f"r{seed}", "train", f"seed={seed}", "experiments.run:main", (), True, str(folder / f"r{seed}"), 10, {"seed": str(seed)})  # fmt: skip
        runs.append(run)
        (folder / run.name).mkdir()
    sweep = Sweep(folder, "g")
    sweep.add("g", runs)
    sweep.intend(JobBatch("b", "debug", "debug", ["r0", "r1"], 0.0, "c"))
    sweep.submitted("b", {"r0": "1", "r1": "2"})
    for run in runs:
        sweep.note(run.name, "start", step=0, rank=0, pid=1)
    sweep.note("r0", "end", how="done", step=10, rank=0)
    sweep.note("r1", "end", how="failed", step=2, rank=0, error="it broke", where="x:1")
    done = {"status": "done", "step": 10, "images_per_s": 5.0, "scores": {"fd": 3.0}}
    (folder / "r0" / "summary.json").write_text(json.dumps(done))
    (folder / "r1" / "status.json").write_text(json.dumps({"status": "failed", "step": 2, "time": 5.0}))  # fmt: skip


@reader("sweep", make_sweep, ".sweeps/g/*.json*", ".sweeps/g/attempts/*", "r*/*.json")
def read_sweep(folder):
    from rich.console import Console

    from sweeps.status import status, status_table
    from sweeps.store.folder import all_sweeps

    for sweep in all_sweeps(folder):
        rows, _ = status.statuses(sweep)
        status_table.plain(rows)
        Console(file=io.StringIO(), width=100).print(status_table.table("g", rows, 100))
        status_table.overview(sweep, rows)
        json.dumps(status_table.as_json(sweep, rows, ""))


def make_grid(folder):
    (folder / "grid.yaml").write_text("title: t\naxes:\n  backbone: [dit, mamba]\nseeds: [0]\n")
    (folder / "resources.yaml").write_text("kind: local\ntime: 60\nscales:\n  tiny: {time: 30}\n")


@reader("grid of a sweep", make_grid, "grid.yaml")
def read_grid(folder):
    from sweeps.plan import cells, grid

    found = grid.load(str(folder / "grid.yaml"))
    cells.expand(found, "tiny")


@reader("resources of a sweep", make_grid, "resources.yaml")
def read_resources(folder):
    from sweeps.plan import resources

    resources.load(str(folder / "resources.yaml"))


def make_metrics(folder):
    lines = [json.dumps({"step": s, "loss": 1.0}) for s in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@reader("metrics of a run that resumes", make_metrics, "metrics.jsonl")
def read_metrics(folder):
    from experiments.runtime import records

    records.read_jsonl(folder / "metrics.jsonl")
    records.cut_jsonl(folder / "metrics.jsonl", 2)


def make_notes(folder):
    images = [{"id": i, "file_name": f"{i}.png"} for i in range(2)]
    notes = [{"id": i, "image_id": i, "caption": "a cat"} for i in range(2)]
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": notes}))
    lines = [json.dumps({"file_name": "0.png", "captions": ["a", "b"]})]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    names = {"info": {"features": {"label": {"names": ["cat", "dog"]}}}}
    (folder / "huggingface.json").write_text(json.dumps(names))
    summary = {"status": "done", "name": "r", "step": 2, "scores": {"fd": 1.5}, "loss": 0.5, "wall_s": 2.0, "images_per_s": 3.0}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "lock").write_text(json.dumps({"host": "h", "pid": 1}))


@reader("captions, names of classes, summaries", make_notes, "*.json*")
def read_notes(folder):
    from types import SimpleNamespace

    from experiments.data import image_sources, table_source
    from experiments.runtime import console
    from experiments.training import session
    from routing.errors import UserError

    table_source._class_names(
        SimpleNamespace(metadata={b"huggingface": (folder / "huggingface.json").read_bytes()}), "label"
    )
    if session.read_summary(folder) is not None:
        session.show_results(console.Console(quiet=True), folder)
    for path in sorted(folder.glob("captions.*")):
        with contextlib.suppress(UserError):
            image_sources._read_captions(path)


def damage_targets(folder, files):
    """Return the files of a valid input that may be damaged."""
    found = sorted({p for pattern in files for p in folder.glob(pattern) if p.is_file()})
    assert found, f"nothing below {folder} matches {files}"
    return found


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
        rest = {k: v for k, v in value.items() if k != key}
        turn = random.random()
        if turn < 0.1:
            return rest
        if turn < 0.15:
            return {**rest, f"{key}x": value[key]}
        return {**value, key: mutate_value(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        turn = random.random()
        if turn < 0.15:
            return value[:at] + value[at + 1 :]
        if turn < 0.25:
            return [*value, value[at]]
        return [*value[:at], mutate_value(random, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and value[:1] == "{" and random.random() < 0.8:
        # JSON text inside of JSON: metadata of weights.
        with contextlib.suppress(ValueError):
            return json.dumps(mutate_value(random, json.loads(value)))
    return random.choice(ODD)


def mutate_bytes(random, content):
    """Return bytes that are cut, flipped, filled, doubled or made up."""
    kind = random.randrange(7)
    if kind == 0:
        return random.randbytes(random.choice((0, 1, 7, 8, 9, 100, 600)))
    if kind == 1:
        return content[: random.randrange(len(content) + 1)]
    data = bytearray(content)
    at = random.randrange(len(data) + 1)
    if kind == 2:
        data[at:at] = random.randbytes(random.choice((1, 2, 8, 512)))
    elif kind == 3:
        del data[at : at + random.choice((1, 4, 64, 512))]
    elif kind == 4:
        piece = data[at : at + 512]
        data[at:at] = piece
    elif kind == 5:
        data[at : at + 8] = random.choice((b"\xff" * 8, bytes(8), struct.pack("<Q", 2**60)))
    else:
        # The head is what readers decide by: half of all flips are there.
        most = len(data) if random.random() < 0.5 else min(len(data), 256)
        for _ in range(random.randint(1, 4)):
            if most:
                data[random.randrange(most)] = random.randrange(256)
    return bytes(data)


def mutate(random, path, content):
    """Return a damaged version of a valid file, by its format or by its bytes alone."""
    if random.random() < 0.35:
        return mutate_bytes(random, content)
    try:
        if path.suffix == ".json":
            return raw(random, json.dumps(mutate_value(random, json.loads(content))))
        if path.suffix == ".jsonl":
            lines = content.splitlines()
            at = random.randrange(len(lines))
            lines[at] = raw(random, json.dumps(mutate_value(random, json.loads(lines[at]))))
            return b"\n".join(lines)
        if path.suffix == ".yaml":
            import yaml

            return raw(random, yaml.safe_dump(mutate_value(random, yaml.safe_load(content))))
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", content[:8])
            header = raw(random, json.dumps(mutate_value(random, json.loads(content[8 : 8 + length]))))
            return struct.pack("<Q", len(header)) + header + content[8 + length :]
        if path.suffix == ".npz":
            return mutate_npz(random, content)
    except (ValueError, KeyError):
        pass
    return mutate_bytes(random, content)


def mutate_npz(random, content):
    """Damage one array of an archive, with checksums that hold: what a reader meets after unzipping."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        names = old.namelist()
        chosen = random.choice(names)
        for name in names:
            data = old.read(name)
            if name == chosen:
                turn = random.random()
                if turn < 0.1:
                    continue
                if turn < 0.6:
                    array = random.choice((
                        np.zeros(0), np.zeros(()), np.zeros((2, 2)), np.full(4, np.nan), np.str_("x"), np.zeros(3, np.int64),
                        np.full((8, 4), 1e308), np.array([-1, 10**12]), np.zeros((1, 0, 3)), np.zeros(2, "m8[s]"), np.zeros(2, complex),
                    ))  # fmt: skip
                    piece = io.BytesIO()
                    np.save(piece, array)
                    data = piece.getvalue()
                else:
                    data = mutate_bytes(random, data)
            new.writestr(name, data)
    return stream.getvalue()


def npy_header(shape, dtype="<f4"):
    """Return the head of an `.npy` file that claims a shape."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()
