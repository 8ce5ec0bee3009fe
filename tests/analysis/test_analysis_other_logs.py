"""Runs of other trainers: W&B exports and offline folders, TensorBoard event files, and what is missing in them."""

import json
import re
import sys

import pandas as pd
import pytest
import yaml
from analysis_runs import write

import analysis
from analysis.runs.cells import Study
from analysis.runs.other_logs import records
from analysis.tables.table import markdown

KNOWN = {"backbone": "dit", "size": "T/1", "data": "digits", "seed": 3, "train.batch": 64}
FID = "FID-50K (inception-adm)"
STEPS = (100, 200, 300)


def events(folder):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as log:
        for step in STEPS:
            log.add_scalar("train/loss", 1 / step, step, walltime=1e9 + step)
        log.add_scalar("fid", 12.5, 300, walltime=1e9 + 300)
        log.add_text("note", "no number", 1)


def offline(folder):
    (folder / "files").mkdir(parents=True)
    (folder / "run-abc.wandb").write_bytes(b":W&B\x00")
    config = {"wandb_version": 1, "_wandb": {"desc": None, "value": {}}, "lr_other": {"value": 3}}
    config |= {key: {"desc": None, "value": value} for key, value in KNOWN.items()}
    (folder / "files" / "config.yaml").write_text(yaml.safe_dump(config))
    last = {
        "_step": 300,
        "_runtime": 300.0,
        "train/loss": 1 / 300,
        "fid": 12.5,
        "_wandb": {"runtime": 1},
    }
    (folder / "files" / "wandb-summary.json").write_text(json.dumps(last))


def history(kind):
    rows = [{"_step": s, "_runtime": float(s), "train_loss": 1 / s, "fid": None} for s in STEPS]
    rows[-1]["fid"] = 12.5

    def make(folder):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(KNOWN | {"num_workers": 8}))
        if kind == "chart":
            lines = [
                "Step,mine - train/loss,mine - train/loss__MIN,mine - fid",
                *(f'"{s}","{1 / s}","0",""' for s in STEPS),
            ]
            (folder / "wandb_export_2026-01-01.csv").write_text(
                "\n".join(lines[:-1]) + f'\n"300","{1 / 300}","0","12.5"\n'
            )
        elif kind == "lines":
            (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif kind == "list":
            (folder / "history.json").write_text(json.dumps(rows))
        else:
            pd.DataFrame(rows).to_csv(folder / "history.csv")

    return make


@pytest.mark.parametrize(
    ("make", "trainer", "logged"),
    [
        (events, "TensorBoard", 3), (offline, "W&B", 1), (history("csv"), "W&B", 3), (history("chart"), "W&B", 3),
        (history("lines"), "W&B", 3), (history("list"), "W&B", 3),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning:tensorboard")
def test_another_trainers_run_stands_beside_ones_own(make, trainer, logged, tmp_path):
    write(tmp_path, "dit", "none", 3)
    make(tmp_path / "theirs")
    (tmp_path / "theirs" / "run.yaml").write_text(
        yaml.safe_dump({**KNOWN, "columns": {FID: "fid"}})
    )
    frame = analysis.load(tmp_path)
    assert frame.attrs["damaged"] == [] and len(frame) == 2
    row = frame[frame["run"] == "theirs"].iloc[0]
    assert (row["backbone"], row["size"], row["seed"], row["step"]) == ("dit", "T/1", 3, 300)
    assert (row["route"], row["variant"], row["config.trainer"]) == ("none", "dense", trainer)
    assert row[f"score.{FID}"] == 12.5 and frame.attrs["metrics"][FID]["better"] == "lower"
    curve = analysis.curves(frame)
    mine = curve[curve["run"] == "theirs"]
    assert list(mine["step"]) == list(STEPS)[-logged:]
    assert mine["loss"].iloc[-1] == pytest.approx(1 / 300)
    scored = analysis.scores(frame)
    assert list(scored[scored["run"] == "theirs"]["value"]) == [12.5]
    # One's own seed 3 and theirs are never one cell.
    (theirs,) = Study.of(frame, FID).bases
    assert list(theirs.dense.runs["run"]) == ["theirs"]
    # Their protocol is not known, and no heading says that it is none.
    assert "None" not in markdown(analysis.tables.make("all_scores", Study.of(frame, FID)))


@pytest.mark.parametrize(
    "files",
    [
        {"wandb_export_1.csv": "Step,a - train/loss\n1,3\n2,2\n", "wandb_export_2.csv": "Step,a - fid\n2,9\n"},
        {"history.csv": "global_step,train/loss,fid,x - y,z - y\n1,3,,,\n2,2,,,\n2,,9,,\n", "args.csv": "lr\n1\n"},
    ],
)  # fmt: skip
def test_all_tables_of_a_run_are_read_and_no_others(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**KNOWN, "columns": {FID: "fid"}}))
    frame = analysis.load(tmp_path)
    assert frame.attrs["damaged"] == [] and frame[f"score.{FID}"].item() == 9
    assert analysis.curves(frame)[["step", "loss"]].to_numpy().tolist() == [[1, 3], [2, 2]]


@pytest.mark.filterwarnings("ignore::UserWarning:tensorboard")
@pytest.mark.parametrize("kind", ["events", "charts"])
def test_of_several_names_of_one_step_the_one_that_was_asked_for_counts(kind, tmp_path):
    pytest.importorskip("tensorboard")
    logged = {"train/mse": 3, "train_loss": 9, "train/loss": 7, "counter": 50}
    if kind == "events":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as log:
            for place, (tag, value) in enumerate(logged.items()):
                log.add_scalar(tag, value, 5, walltime=1e9 + place)
    else:
        for tag, value in logged.items():
            head = tag.replace("/", "-")
            text = f"Step,counter,a - {tag}\n5,50,{value}\n"
            (tmp_path / f"wandb_export_{head}.csv").write_text(text)
    for columns, expected in (({}, (5, 7)), ({"loss": "train/mse", "step": "counter"}, (50, 3))):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**KNOWN, "columns": columns}))
        (line,) = records(tmp_path, "metrics.jsonl")
        assert (line["step"], line["loss"]) == expected


def test_a_file_of_another_kind_hides_no_runs_below_it(tmp_path):
    write(tmp_path / "runs")
    for name in ("history.txt", "history.md", "wandb_export_notes"):
        (tmp_path / name).write_text("mine")
    assert len(analysis.load(tmp_path)) == 1 and analysis.load(tmp_path).attrs["damaged"] == []


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"history.csv": "_step,loss\n1,2\n"}, "no backbone, size, data, seed; say it in .*run.yaml, such as {backbone: dit"),
        ({"history.csv": "_step,loss\n1,2\n", "config.json": '{"backbone": "dit", "size": "T/1", "seed": 1}'}, "has no data; say"),
        ({"history.csv": "loss\n1\n", "run.yaml": yaml.safe_dump(KNOWN)}, "no numbers by step"),
        ({"run-1.wandb": "x", "run.yaml": yaml.safe_dump(KNOWN)}, "history.csv"),
        ({"wandb_export_1.csv": "Step,a - x,b - x\n1,2,3\n", "run.yaml": yaml.safe_dump(KNOWN)}, "holds 2 runs"),
        ({f"wandb_export_{k}.csv": f"Step,{k} - x\n1,2\n" for k in "ab"} | {"run.yaml": yaml.safe_dump(KNOWN)}, "holds 2 runs"),
        ({"history.json": "[", "run.yaml": yaml.safe_dump(KNOWN)}, "history.json cannot be read"),
        ({"history.csv": "_step,loss\n1,2\n", "run.yaml": "[1]"}, "run.yaml holds no mapping"),
        ({"history.csv": "_step,l\n1,2\n", "run.yaml": yaml.safe_dump(KNOWN | {"size": "Q/9"})}, "its size cannot be read"),
        ({"history.csv": "_step,l\n1,2\n", "run.yaml": yaml.safe_dump(KNOWN | {"size": "huge", "backbone.depth": 12})}, "its size cannot be read"),
        ({"history.csv": "_step,l\n1,2\n", "run.yaml": yaml.safe_dump(KNOWN | {"columns": [1]})}, "columns must map"),
        ({"history.csv": "_step,l\n1,2\n", "run.yaml": yaml.safe_dump(KNOWN | {"route": "2-40"})}, "2-40: the model has 12 blocks"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_and_the_others_are_read(files, said, tmp_path):
    write(tmp_path)
    (tmp_path / "theirs").mkdir()
    for name, text in files.items():
        (tmp_path / "theirs" / name).write_text(text)
    frame = analysis.load(tmp_path)
    assert len(frame) == 1
    (damaged,) = frame.attrs["damaged"]
    assert re.search(said, damaged["reason"]), damaged["reason"]


def test_a_route_is_the_same_however_another_trainer_writes_it(tmp_path):
    for place, route in enumerate(("none", "auto", "2--4", "2-8", "0-6")):
        history("lines")(folder := tmp_path / str(place))
        (folder / "run.yaml").write_text(yaml.safe_dump({**KNOWN, "route": route, "columns": {FID: "fid"}}))
    frame = analysis.load(tmp_path)
    assert list(frame.sort_values("run")["route"]) == ["none", "2-8", "2-8", "2-8", "0-6"]
    rows = analysis.tables.make("route_placement", frame).rows
    assert {row.entries[0].text for row in rows} >= {"dense", "2-8", "0-6"}


def test_event_files_without_tensorboard_are_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(KNOWN))
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    (damaged,) = analysis.load(tmp_path).attrs["damaged"]
    assert "pip install tensorboard" in damaged["reason"]
