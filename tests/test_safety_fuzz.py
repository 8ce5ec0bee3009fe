"""Random and damaged input to the grammar of routes, the configuration and every reader: one sentence, no hang, no flood.

SAFETY_FUZZ_EXAMPLES=500 pytest tests/test_safety_fuzz.py    looks further; the default is the same few every time.
"""

from __future__ import annotations

import copy
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
from data_tools import latents, npy, write_store
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


KEYS = ["seed", "route", "train.lr", "backbone", "size", "train.betas", "data.name", "paths.runs", "", "=", "hydra.run.dir"]
VALUES = ["", "[]", "{}", "null", "1e999", "-1", "nan", "${seed}", "${oc.env:HOME}", "'", '"', "[1", "{a", "\\", "../x", "a,b", "@"]


@few(10)
@given(st.sampled_from(KEYS), st.one_of(st.sampled_from(VALUES), st.text(max_size=8)))
def test_overrides(key, value):
    answers(load, ["eval=none", f"{key}={value}"])


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


@pytest.fixture
def copy_of(valid, tmp_path):
    """A copy of a reader's valid files that a test may damage."""
    return lambda name: shutil.copytree(valid(name), tmp_path / name)


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
HUGE_TENSORS = json.dumps({name: HUGE for name in ("latents", "labels", "encoder.conv_in.weight")}).encode()
DEEP = b"[" * 200_000


@pytest.mark.parametrize("name", ["checkpoint", "exported weights", "weights of others", "latent store", "LightningDiT's shards"])
def test_headers_that_claim_a_lot(name, valid, tmp_path):
    headers = {
        "long": struct.pack("<Q", 2**60),
        "huge": struct.pack("<Q", len(HUGE_TENSORS)) + HUGE_TENSORS,
        "deep": struct.pack("<Q", len(DEEP)) + DEEP,
    }
    for claim, content in headers.items():
        folder = shutil.copytree(valid(name), tmp_path / claim)
        for path in hostile.damage_targets(folder, ("**/*.safetensors",)):
            path.write_bytes(content + bytes(64))
        assert answers(hostile.READERS[name].read, folder), claim


def test_a_manifest_that_claims_too_many_samples(tmp_path):
    write_store(tmp_path, latents(6, side=2), [0, 1, 2, 0, 1, 2])
    path = tmp_path / "manifest.json"
    values = json.loads(path.read_text())
    values["shards"][0]["count"] += 10**30 - values["count"]
    values["count"] = 10**30
    path.write_text(json.dumps(values))
    assert "expected latents" in answers(hostile.read_everything, tmp_path)
    path.write_text(json.dumps({"count": 10**15, "shard": 1}))
    assert "has 0 of" in answers(hostile.read_samples, tmp_path)


ARRAYS = {"reference": "reference.npz", "images": "batch.npz", "similarity": "similarity.npz", "shards of samples": "shard-00000.npz"}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("shape", [(2**31, 2**31, 2**31, 3), (-1, 4)])
def test_arrays_that_claim_a_lot(name, shape, copy_of):
    folder = copy_of(name)
    path = folder / ARRAYS[name]
    with zipfile.ZipFile(path) as archive:
        arrays = archive.namelist()
    with zipfile.ZipFile(path, "w") as archive:
        for array in arrays:
            dtype = "|u1" if array == "arr_0.npy" else "<f4"
            archive.writestr(array, hostile.npy_header(shape, dtype) + bytes(64))
    assert answers(hostile.READERS[name].read, folder)


@pytest.mark.slow
def test_a_zip_bomb(copy_of):
    """A few hundred KB that unpack to 600 MB."""
    folder = copy_of("reference")
    path = folder / "reference.npz"
    with np.load(path, allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files if key != "rows"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, value in arrays.items():
            archive.writestr(f"{key}.npy", npy(value))
        with archive.open("rows.npy", "w") as handle:
            handle.write(hostile.npy_header((600 * 2**18, 1)))
            for _ in range(600):
                handle.write(bytes(2**20))
    assert path.stat().st_size < 2 * 2**20
    assert answers(hostile.READERS["reference"].read, folder)


@pytest.mark.parametrize(("size", "kind"), [(2**60, "x"), (2**40, "L"), (2**33, "0")])
def test_tar_members_that_claim_a_lot(size, kind, tmp_path):
    info = tarfile.TarInfo("0.latent.npy")
    info.size, info.type = size, kind.encode()
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    assert answers(hostile.read_everything, tmp_path)


@pytest.mark.parametrize("change", [{"depth": 10**9}, {"num_classes": 10**12}, {"text": [10**9, 10**6]}])
def test_descriptions_of_models_that_no_memory_holds(change, copy_of):
    folder = copy_of("exported weights")
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as handle:
        metadata = handle.metadata()
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    metadata["model"] = json.dumps(json.loads(metadata["model"]) | change)
    save_file(tensors, path, metadata)
    assert answers(hostile.read_export, folder) and answers(hostile.read_pretrained, folder)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


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


BEYOND = [*hostile.RAW[:3], '{"a":' * 100 + "1" + "}" * 100]
NO_YAML = ["- " * 30_000, "&a [*a]", LAUGHS, "!!int x", "!!timestamp x", "2020-13-45", "0x" + "f" * 5000, "? " * 300]


def test_what_is_beyond_them_is_one_sentence():
    for content in [*BEYOND, "1, 2", ""]:
        with pytest.raises(Malformed, match="file is not JSON"):
            json_of(content, "file")
    for content in [*BEYOND, *NO_YAML]:
        with pytest.raises(Malformed, match="file is not YAML"):
            yaml_of(content, "file")
