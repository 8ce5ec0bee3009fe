"""Random and damaged input to the grammar of routes, the configuration and every reader: one sentence, no hang, no flood.

SAFETY_FUZZ_EXAMPLES=500 pytest tests/test_safety_fuzz.py    looks further; the default is the same few every time.
"""

from __future__ import annotations

import copy
import io
import json
import mmap
import os
import random
import shutil
import struct
import tarfile
import zipfile

import hostile
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from analysis.runs.run_files import Damaged, read_lines
from backbones.parsing import Malformed, json_of, yaml_of
from experiments.config.compose import load
from experiments.config.schema import Config
from experiments.runtime import records
from routing.errors import UserError
from routing.route import Route, RouteSchedule

EXAMPLES = int(os.environ.get("SAFETY_FUZZ_EXAMPLES", "0"))
BOUND_MB = 400  # above what is in use when a reader starts; its input is a few MB at most


def few(count):
    return settings(
        max_examples=EXAMPLES or count,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def answers(read, *words):
    """Call a reader: it returns or says one sentence, in time and within the bound."""
    message = None
    with hostile.Memory() as memory, hostile.deadline(20):
        try:
            read(*words)
        except UserError as error:
            message = str(error)
    assert memory.grown < BOUND_MB, f"{memory.grown} MB"
    assert message is None or message.strip()
    return message


def test_the_bound_is_seen():
    with hostile.Memory() as memory:
        # Mapped anew: what the C library has kept of earlier tests would not be seen to grow.
        block = mmap.mmap(-1, 2**29)
        block[:: mmap.PAGESIZE] = b"1" * (2**29 // mmap.PAGESIZE)
    assert block[0] == ord("1")
    assert memory.grown > 400 or not memory.start


# --- grammar and configuration --------------------------------------------------------------------------

ROUTES = st.one_of(
    st.text(alphabet="0123456789-@.,+/:autone ", max_size=24),
    st.text(max_size=12),
    st.sampled_from(["9" * 5000, "2-8@" + "1" * 5000, "0-1," * 5000, "2-8@1e999", "2-8@nan", "-" * 999, "2\u00b2-8", "\u0662-\u0668"]),
)  # fmt: skip


@few(60)
@given(ROUTES, st.integers(1, 64))
def test_routes(text, depth):
    def read():
        route = Route.parse(text).resolve(depth)
        assert Route.parse(str(route)) == route

    answers(read)
    answers(lambda: RouteSchedule.parse(text).resolve(depth))


@pytest.fixture(scope="module")
def resolved():
    return load(["eval=none"]).to_dict()


@few(40)
@given(st.integers(0, 2**32))
def test_saved_configurations(resolved, seed):
    values = hostile.mutate_value(random.Random(seed), copy.deepcopy(resolved))

    def read():
        config = Config.from_dict(values)
        assert Config.from_dict(config.to_dict()).to_dict() == config.to_dict()
        assert "/" not in config.name

    answers(read)


# --- readers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A folder with a reader's valid files, by the reader's name."""
    folders = {}

    def get(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("valid")
            hostile.READERS[name].make(folders[name])
        return folders[name]

    return get


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("name", hostile.READERS)
def test_readers(name, valid, tmp_path):
    reader, base = hostile.READERS[name], valid(name)
    paths = [path.relative_to(base) for path in hostile.damage_targets(base, reader.files)]
    contents = {path: (base / path).read_bytes() for path in paths}
    folder = tmp_path / "files"

    @few(6)
    @given(st.sampled_from(paths), st.integers(0, 2**32))
    def read_damaged(path, seed):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        (folder / path).write_bytes(hostile.mutate(random.Random(seed), path, contents[path]))
        answers(reader.read, folder)

    read_damaged()


@few(30)
@given(st.binary(max_size=300), st.integers(0, 60))
def test_half_written_lines_are_left_out(tmp_path_factory, tail, cut):
    whole = b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n'
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    path.write_bytes(whole + tail)
    # What follows may be whole JSON that is no record; the two before it are never lost.
    assert [line.get("step") for line in records.read_jsonl(path)][:2] == [1, 2]
    try:
        assert [line.get("step") for line in read_lines(path)][:2] == [1, 2]
    except Damaged as error:
        assert "line" in str(error)
    path.write_bytes(whole[:cut])
    steps = [line["step"] for line in read_lines(path)]
    assert steps == [line["step"] for line in records.read_jsonl(path)] == [1, 2][: (cut >= 24) + (cut >= 50)]


# --- files that claim more than they are ----------------------------------------------------------------

HUGE = {"dtype": "F32", "shape": [2**58], "data_offsets": [0, 2**60]}


def tar_header(size, kind):
    info = tarfile.TarInfo("0.latent.npy")
    info.size, info.type = size, kind.encode()
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(2048)


def claim(path):
    """Return a small file of a format that claims to hold an exabyte."""
    if path.suffix == ".safetensors":
        header = json.dumps({"latents": HUGE, "labels": HUGE}).encode()
        return struct.pack("<Q", len(header)) + header + bytes(64)
    if path.suffix == ".tar":
        return tar_header(2**60, "0")
    stream = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(stream, "w") as claims:
        for name in archive.namelist():
            array, dtype = io.BytesIO(), "|u1" if name == "arr_0.npy" else "<f4"
            shape = {"descr": dtype, "fortran_order": False, "shape": (2**20, 2**20, 2**20, 3)}
            np.lib.format.write_array_header_1_0(array, shape)
            claims.writestr(name, array.getvalue() + bytes(64))
    return stream.getvalue()


@pytest.mark.parametrize("name", sorted(set(hostile.READERS) - {"run folders"}))
def test_files_that_claim_more_than_they_hold(name, valid, tmp_path):
    folder = shutil.copytree(valid(name), tmp_path / "claims")
    for path in hostile.damage_targets(folder, ("**/*.safetensors", "**/*.npz", "*.tar")):
        path.write_bytes(claim(path))
    assert answers(hostile.READERS[name].read, folder)


@pytest.mark.parametrize(("size", "kind"), [(2**60, "x"), (2**40, "L")])
def test_extended_tar_headers_that_claim_a_lot(size, kind, tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_header(size, kind))
    assert answers(hostile.read_everything, tmp_path)


@pytest.mark.parametrize("change", [{"num_classes": 10**12}, {"text": [10**9, 10**6]}])
def test_descriptions_of_models_that_no_memory_holds(change, valid, tmp_path):
    path = shutil.copytree(valid("exported weights"), tmp_path / "copy") / "model.safetensors"
    with safe_open(path, framework="pt") as handle:
        metadata = handle.metadata()
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    metadata["model"] = json.dumps(json.loads(metadata["model"]) | change)
    save_file(tensors, path, metadata)
    assert answers(hostile.read_export, path.parent)
    assert "it describes a larger model" in answers(hostile.read_pretrained, path.parent)


# --- JSON and YAML --------------------------------------------------------------------------------------

JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**99), 10**99) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@few(40)
@given(JSONS, st.integers(1, 20))
def test_what_is_within_the_bounds_reads_as_it_was_written(value, depth):
    for _ in range(depth):
        value = [value]
    assert json_of(json.dumps(value).encode()) == value
    text = yaml.safe_dump(value, allow_unicode=False)
    assert yaml_of(text) == yaml.safe_load(text)


BEYOND = ["[" * 200 + "]" * 200, "[" * 100_000, "9" * 5000]
LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else 'x' * 9)}]\n" for i in range(12))
NO_YAML = ["- " * 30_000, "&a [*a]", LAUGHS, "!!int x", "2020-13-45"]


def test_what_is_beyond_them_is_one_sentence():
    for content in [*BEYOND, "1, 2", ""]:
        with pytest.raises(Malformed, match="file is not JSON"):
            json_of(content, "file")
    for content in [*BEYOND, *NO_YAML]:
        with pytest.raises(Malformed, match="file is not YAML"):
            yaml_of(content, "file")
