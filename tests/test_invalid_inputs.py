"""Invalid input over the whole surface: exit code 2, one line on stderr that names the key or file and its value.

The rows are in tests/data/invalid_inputs.tsv: a command, its words as typed in a shell, a file that is written to the
current folder first (NAME: content, with \\n between lines), and what the line must name.
"""

from __future__ import annotations

import csv
import os
import shlex
import shutil

import analysis_runs
import numpy as np
import pyarrow.parquet
import pytest
import torch
from data_tools import latents, picture, write_lightning, write_store
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import make_model_and_data, small
from suite import DATA

import routing.check.__main__ as check
from analysis import command as analysis_command
from experiments import bench, evaluate, export, prepare, run, sample
from experiments.components import describe_data
from experiments.evaluation import trained_model
from experiments.runtime.command import run_command
from experiments.training.session import train
from sweeps import command as sweeps_command

COMMANDS = {
    "run": lambda words: run_command(run.main, words),
    "sample": lambda words: run_command(sample.main, words),
    "evaluate": lambda words: run_command(evaluate.main, words),
    "export": lambda words: run_command(export.main, words),
    "prepare": prepare.main,
    "bench": lambda words: run_command(bench.main, words),
    "sweeps": sweeps_command.main,
    "analysis": analysis_command.main,
    "check": check.main,
}
MODEL = """
def three(): return 3
def needs(model): return model
def broken(): raise TypeError("of the user's own code")
"""


def read_rows():
    with (DATA / "invalid_inputs.tsv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


ROWS = read_rows()


def spoil_weights(source, target, value):
    """Write weights again with one tensor full of a value."""
    with safe_open(source, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(source)
    list(tensors.values())[-1].fill_(value)
    save_file(tensors, target, metadata)


def damaged(bad, weights):
    """Write damaged and unsuitable files."""
    shutil.copy(weights, bad / "cut.safetensors")
    with (bad / "cut.safetensors").open("r+b") as handle:
        handle.truncate(500)
    for name, value in (("nan", float("nan")), ("large", 1e5)):
        spoil_weights(weights, bad / f"{name}.safetensors", value)
    save_file({"x": torch.zeros(1)}, bad / "unknown.safetensors")
    for name in ("one.txt", "bad.tar", "bad.parquet", "notzip.npz", "bad.tar.gz", "mixed/z.tar", "store/manifest.json"):
        (bad / name).parent.mkdir(exist_ok=True)
        (bad / name).write_bytes(b"nonsense" * 200)
    pyarrow.parquet.write_table(pyarrow.table({"number": [1, 2]}), bad / "numbers.parquet")
    np.savez(bad / "pickle.npz", arr_0=np.array([{"a": 1}], dtype=object))
    torch.save({"a": print}, bad / "pickle.pt")
    (bad / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (bad / "model.py").write_text(MODEL)
    (bad / "syntax.py").write_text("def build(:\n")
    for name in ("one.png", "mixed/a.png", "beside/0.png", "beside/cat/0.png", "unlike/train/cat/0.png", "unlike/test/0.png"):
        picture(bad / name)
    for number in range(5):
        picture(bad / "pictures" / f"{number}.png")
        picture(bad / "sides" / f"{number}.png", side=8 + number)


def pipes(root):
    """Write pipes without a writer in place of files: opening one would wait for ever."""
    names = ["weights.safetensors", "weights.pth", "reference.npz", "captions.json", "captions.txt", "tars/0.tar", "tables/0.parquet"]
    names += ["shards/a.safetensors", "statistics/latents_stats.pt", *(f"pictures/{number}.png" for number in range(5))]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(root / name)
    save_file({"latents": torch.zeros(8, 4, 8, 8), "labels": torch.arange(8)}, root / "statistics" / "a.safetensors")


@pytest.fixture(scope="session")
def places(tmp_path_factory, vae):
    """What the words of a row may name in braces."""
    root = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREAD_NATIVE", "0")  # no kernels are compiled for one run
        run_folder = train(small(root / "runs", "train.final_samples=true", "train.steps=1"), quiet=True)
    shutil.copytree(run_folder, root / "runs" / "copy")
    text = small(root, "data=scenes", "task=text", "size=T/8")
    model, dataset = make_model_and_data(text)
    trained_model.export(root / "text.safetensors", model, model.state_dict(), text, 7, describe_data(dataset))
    records = root / "records"
    analysis_runs.write_pairs(records, seeds=1)
    for name in ("bad", "empty", "pipes"):
        (root / name).mkdir()
    damaged(root / "bad", run_folder / "model.safetensors")
    pipes(root / "pipes")
    labels, arrays = [0, 1, 2, 3] * 3, latents(12)
    stores = {
        "store": write_store(root / "store", arrays, labels),
        "unlabelled": write_store(root / "unlabelled", arrays),
        "lightning": write_lightning(root / "lightning", arrays, -arrays, labels, stats=False),
        "cut_store": write_store(root / "cut_store", arrays, labels),
        "gap_store": write_store(root / "gap_store", arrays, labels),
        "unfinished": write_store(root / "unfinished", arrays, labels),
    }
    with (root / "cut_store" / "shard-00001.safetensors").open("r+b") as handle:
        handle.truncate(500)
    (root / "gap_store" / "shard-00001.safetensors").unlink()
    (root / "unfinished" / "manifest.json").rename(root / "unfinished" / "plan.json")
    return {
        "run": run_folder,
        "runs": root / "runs",
        "text": root / "text.safetensors",
        "records": records,
        "bad": root / "bad",
        "pipes": root / "pipes",
        "tmp": root / "empty",
        "vae": vae,
        "surrogate": "\udcff",  # a byte that is no UTF-8, as Python decodes it
        "deep": "[" * 200,
        "many": list(range(1000)),
    } | stores


def filled(text, places):
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", str(place))
    return text


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['command']} {row['file'] or row['words']}"[:80] for row in ROWS])
def test_invalid_input_is_one_line_that_names_it(row, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words, names = (shlex.split(filled(row[column], places)) for column in ("words", "names"))
    if row["file"]:
        name, content = row["file"].split(": ", 1)
        (tmp_path / name).write_text(filled(content.replace("\\n", "\n"), places) + "\n")
    code = COMMANDS[row["command"]](words)
    out, err = capsys.readouterr()
    assert code == 2, (out, err)
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert not [name for name in names if name not in lines[0]], err
    written = {path.name for path in tmp_path.rglob("*")} - {row["file"].split(": ")[0]}
    assert not written & {"metrics.jsonl", "samples", ".sweeps", "evaluations", "x.safetensors"}, "nothing may have been started"
