"""Latent stores and foreign data sets written by hand to their published layouts, for tests."""

import hashlib
import io
import json
import struct
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from experiments.data import DataError
from experiments.data.import_latents import import_latents, latent_rows


def refused(call, *words):
    """Assert that a call raises a `DataError` of one line that contains all words."""
    with pytest.raises(DataError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def add(archive, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def picture(path, colour=(90, 90, 90), side=8):
    """Write a picture of one colour whose left column is darker, so that mirroring it shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((side, side, 3), colour, np.uint8)
    pixels[:, 0] //= 2
    Image.fromarray(pixels).save(path)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def idx(values):
    """An IDX file of bytes, as MNIST's."""
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return head + values.astype(np.uint8).tobytes()


def latents(count, channels=4, side=8, seed=0):
    return np.random.default_rng(seed).normal(size=(count, channels, side, side)).astype(np.float32)


def write_tars(folder, arrays, labels, per_tar=5, field="latent.npy", encode=npy, **texts):
    """WebDataset: consecutive members of one key are one sample; `cls` is a number in digits, `texts` are more fields."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(arrays), per_tar):
        with tarfile.open(folder / f"shard-{start // per_tar:06d}.tar", "w") as archive:
            for i in range(start, min(start + per_tar, len(arrays))):
                add(archive, f"{i:09d}.{field}", encode(arrays[i]))
                if labels is not None and labels[i] is not None:
                    add(archive, f"{i:09d}.cls", str(labels[i]).encode())
                for name, values in texts.items():
                    add(archive, f"{i:09d}.{name}", values[i].encode())
    return folder


def write_imported(folder, arrays, labels, **more):
    """The same as shards, as prepare imports them."""
    import_latents(latent_rows(write_tars(folder.with_name(f"{folder.name}-tars"), arrays, labels, **more), "*"), folder, 5)
    return folder


def write_lightning(folder, arrays, flips, labels, per_file=6, stats=True):
    """LightningDiT: `latents_rank00_shard000.safetensors` with three tensors, and latents_stats.pt."""
    folder.mkdir(parents=True, exist_ok=True)
    for k, start in enumerate(range(0, len(arrays), per_file)):
        stop = start + per_file
        save_file(
            {
                "latents": torch.from_numpy(arrays[start:stop]),
                "latents_flip": torch.from_numpy(flips[start:stop]),
                "labels": torch.tensor(labels[start:stop]),
            },
            folder / f"latents_rank00_shard{k:03d}.safetensors",
        )
    if stats:
        data = torch.from_numpy(arrays)
        mean, std = data.mean((0, 2, 3), keepdim=True), data.std((0, 2, 3), keepdim=True)
        torch.save({"mean": mean, "std": std}, folder / "latents_stats.pt")
    return folder


def write_store(folder, arrays, labels=None, kind="sample", flips=None, per_file=6, text=None, **manifest):
    """A store as prepare writes it, made from arrays alone; `manifest` replaces its entries."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for k, start in enumerate(range(0, len(arrays), per_file)):
        part = slice(start, start + per_file)
        tensors = {"latents": torch.from_numpy(arrays[part])}
        if flips is not None:
            tensors["latents_flip"] = torch.from_numpy(flips[part])
        if labels is not None:
            tensors["labels"] = torch.tensor(labels[part])
        if text is not None:
            embeddings, captions = text
            flat = [c.encode() for row in captions[part] for c in row]
            tensors["text"] = embeddings[part].clone()
            tensors["captions"] = torch.tensor(list(b"".join(flat)), dtype=torch.uint8)
            ends = torch.tensor([len(c) for c in flat]).cumsum(0)
            tensors["caption_ends"] = ends.view(-1, embeddings.shape[1])
        file = folder / f"shard-{k:05d}.safetensors"
        save_file(tensors, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shards.append({"file": file.name, "count": len(arrays[part]), "bytes": file.stat().st_size, "sha256": digest})
    channels = arrays.shape[1] // (2 if kind == "moments" else 1)
    contents = {
        "format": "tread-latents/1",
        "kind": kind,
        "shape": [channels, *arrays.shape[2:]],
        "count": len(arrays),
        "flips": flips is not None,
        "labels": labels is not None,
        "classes": [] if labels is None else [f"class {k}" for k in range(max(labels) + 1)],
        "text": None if text is None else {"encoder": "nowhere/clip", "shape": list(text[0].shape[1:])},
        "vae": "nowhere/vae",
        "scale_factor": 0.5,
        "shift_factor": 0.25,
        "image_size": 64,
        "mean": [0.0] * channels,
        "std": [1.0] * channels,
        "source": "test",
        "skipped": 0,
        "shards": shards,
    }
    (folder / "manifest.json").write_text(json.dumps(contents | manifest))
    return folder
