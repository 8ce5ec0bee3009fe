"""Import latents of other projects from tars, folders of .npy files and EDM's folders.

Samples are taken as multiplied by the VAE's scale factor, as the TREAD release and fast-DiT store
them; moments (8 channels) as the VAE makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from backbones.parsing import check_file
from backbones.weights.files import save_tensors
from experiments.data.class_folders import LABEL_FILE, class_of_each, edm_labels
from experiments.data.data_options import PICTURES, DataError, first_line, require
from experiments.data.open_source import list_files
from experiments.data.tars import LATENT_FIELDS, latent_header, read_label, samples_of, walk
from experiments.runtime.files import atomic_path, atomic_write

Row: TypeAlias = tuple[np.ndarray, int | None]  # values (C, H, W) and label

# In plan.json until an import has ended: the store is unfinished.
_UNFINISHED = "{}\n"


def latent_rows(path: Path, pattern: str) -> Iterator[Row] | None:
    """Return the latents at `path`, in files that match a pattern; None if it holds images."""
    files = [path] if path.is_file() else sorted(list_files(path, pattern))
    if any(file.suffix.lower() in PICTURES for file in files):
        return None
    tars = [file for file in files if file.suffix == ".tar"]
    # The files of a sample may be neighbours, or sorted by field.
    if tars and any(member.field in LATENT_FIELDS for member in walk(tars[0])):
        return _tar_rows(tars)
    arrays = [file for file in files if file.suffix == ".npy"]
    return _array_rows(path, arrays) if arrays else None


def _tar_rows(tars: list[Path]) -> Iterator[Row]:
    for path in tars:
        with path.open("rb") as archive:
            for key, fields in samples_of(path).items():
                name = f"{path}: {key}"
                dtype, shape, offset = latent_header(archive, fields, name)
                archive.seek(offset)
                values = np.fromfile(archive, dtype, int(np.prod(shape)))
                yield values.reshape(shape), read_label(archive, fields, name)


def _array_rows(root: Path, files: list[Path]) -> Iterator[Row]:
    """Yield the arrays of a folder; labels are those of dataset.json, or class folders."""
    names = [file.relative_to(root).as_posix() for file in files]
    labels = edm_labels(root / LABEL_FILE, names) or [None] * len(names)
    if labels[0] is None and any("/" in name for name in names):
        labels = class_of_each(root, names)[1]
    for file, label in zip(files, labels, strict=True):
        try:
            check_file(file)
            values = np.load(file, allow_pickle=False)
            values = values.reshape(values.shape[-3:])
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{file} is no .npy array: {first_line(error)}") from None
        if file.name.startswith("img-mean-std-"):  # of EDM2, which stores no log variance
            mean, deviation = np.split(values, 2)
            values = np.concatenate([mean, 2 * np.log(np.maximum(deviation, 1e-10))])
        yield values, label


def import_latents(rows: Iterator[Row], out: Path, shard: int) -> int:
    """Write latents as shards of so many rows, which data=latents reads; return their number.

    Raises:
        DataError: The folder holds other latents already.
    """
    plan, shards = out / "plan.json", list(out.glob("*.safetensors"))
    # An import that was cut off begins anew.
    cut_off = plan.is_file() and plan.read_text() == _UNFINISHED
    require(cut_off or not (plan.exists() or shards), f"{out} holds latents; give a new folder")
    for path in shards:
        path.unlink()
    atomic_write(plan, _UNFINISHED)
    count = 0
    for number in itertools.count():
        part = list(itertools.islice(rows, shard))
        if not part:
            break
        values, labels = zip(*part, strict=True)
        shapes = {array.shape for array in values}
        labelled = {label is not None for label in labels}
        require(
            len(shapes) == len(labelled) == 1,
            f"latents {count} to {count + len(part) - 1} have the shapes {sorted(shapes)}, and "
            f"labels: {sorted(labelled)}; expected one shape, and labels of all or none",
        )
        tensors = {"latents": torch.from_numpy(np.stack(values))}
        if labelled == {True}:
            tensors["labels"] = torch.tensor(labels)
        scaled = "no" if values[0].shape[0] == 8 else "yes"
        with atomic_path(out / f"shard-{number:05d}.safetensors") as temporary:
            save_tensors(temporary, tensors, {"scaled": scaled})
        count += len(part)
    plan.unlink()
    return count
