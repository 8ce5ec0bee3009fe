"""Wrong input over the whole surface: exit code 2, one sentence on stderr, nothing on stdout, nothing started."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from small import small

from analysis import command as analysis_command
from experiments import bench, evaluate, prepare, run, sample
from experiments.runtime.command import run_command
from experiments.training.session import train
from sweeps import command as sweeps_command

COMMANDS = {
    "run": lambda words: run_command(run.main, words),
    "sample": lambda words: run_command(sample.main, words),
    "evaluate": lambda words: run_command(evaluate.main, words),
    "bench": lambda words: run_command(bench.main, words),
    "prepare": prepare.main,
    "sweeps": sweeps_command.main,
    "analysis": analysis_command.main,
}


# Words and a part of the message. {run}: a finished run, {bad}: a folder of damaged things, {tmp}: empty,
# {pipes}: pipes without a writer in place of files, which opening would wait for.
TABLES = {
    "run": [
        # --- keys and groups
        ("backbone=mmaba", "did you mean mamba?"),
        ("rote=2-8", "did you mean route"),
        ("train.learning_rate=1", "did you mean train.lr?"),
        ("objective.name=flow", "objective.name=flow: expected objective=flow"),
        ("+objective.name=flow", "+objective.name=flow: expected objective=flow"),
        ("scale.name=small", "expected scale=small"),
        ("data.path=nowhere", "data=fashion, data=folder and data=latents have it"),
        ("--dry-rum", "did you mean --dry-run?"),
        ("backbone=dit,mamba", "expected one value; -m runs each"),
        ("seed=0,1,2", "seed=0,1,2: expected one value; -m runs each of several\n"),
        ("seed=1,", "seed=1,: expected one value\n"),
        ("train.betas=0.9,0.95", 'a list is typed as "train.betas=[0.9,0.95]"'),
        ("paths.runs=a,b", "one with commas: \"paths.runs='a,b'\""),
        ("-m route=none,2-8 route=4-8", "-m: route is given twice"),
        ("-sc query=bash", "expected key=value, got '-sc'"),
        ("data=cifar10", "did you mean data=torchvision data.set=CIFAR10?"),
        ("data=imagenet", "for pictures of your own, type data=folder data.path=DIR"),
        ("data=torchvision data.set=CIFAR", "did you mean CIFAR10 or CIFAR100?"),
        # --- types and ranges
        ("seed=-3", "expected an integer >= 0 and <= 2,147,483,647"),
        ("paths.runs=", "paths.runs= is empty"),
        ("paths.runs=/proc/x", "cannot be used"),
        ("train.betas=[0.9,1.0]", "expected a list of 2, each a number >= 0 and < 1"),
        ("init=nowhere", "does not exist"),
        ("init={bad}/cut.safetensors", "no complete safetensors file"),
        ("init={run}@x", "whole number"),
        ("train.muon_lr=0.02", "train.muon_lr=0.02: expected train.optimizer=muon"),
        ("init={run}/*", "; expected exactly one"),
        ("experiment=finetune", "name it with init=RUN"),
        # --- routes
        ("route=8-2", "try route=2-8"),
        ("route=2-8@0,5", "decimal point"),
        ("routing.selection=quad route=2-8", "0.75"),
        ("routing.learned=fuse", "route=auto"),
        # --- sizes and families
        ("size=Q/2", "expected one of T, M, S"),
        ("size=S/3", "expected a patch of 1, 2, 4, 8, 16, 32"),
        ("backbone.width=50", "multiple of 16"),
        ("backbone=mamba backbone.scan=spiral", "zigzag"),
        ("backbone.decoder={width: 32, heads: 5}", "backbone.decoder.heads=5: expected a divisor of width=32, such as 4"),
        ("backbone.decoder={depth: 1} objective=ddpm sampler=ddim", "objective=edm"),
        # --- alignment
        ("train.teacher_block=3", "train.teacher_block=3: expected train.encoder=ema"),
        ("train.encoder=ema train.teacher_block=12", "expected an integer >= 0 and <= 11"),
        ("backbone.align={block:3}", "backbone.align with train.encoder=none: expected train.encoder to be one of"),
        ("train.encoder=ema backbone.align={channels:8}", "expected channels=64, the features of train.encoder=ema"),
        ("train.encoder=ema backbone.align={block:1}", "as in backbone.align={block:1,channels:64}"),
        # --- objectives, guidance, scores, data
        ("task=text", "captions"),
        ("guidance=routed", "route"),
        ("guidance=routed route=1-2 guidance.route=2-80", "guidance.strong=0.5 on route 2-80: "),
        ("guidance=autoguidance", "checkpoint"),
        ("guidance=routed route=1-2 guidance.weak=1", "guidance.weak=1.0: expected a rate >= 0 and < 1, or a schedule"),
        ("objective=ddpm sampler=ddim sampler.steps=1001", "sampler.steps=1001: expected at most objective.steps=1000"),
        ("objective=ddpm sampler=sde sampler.last=mean", "sampler.last=mean: expected euler for objective=ddpm"),
        ("train.graphs=true route=1-2 routing.random_end=true", "expected routing.random_end=false"),
        ("data=latents", "data.path"),
        ("data=latents data.path={tmp}", "latent"),
        ("data=latents data.path={tmp} data.test=a data.held_out=5", "data.held_out=5: expected 0 with data.test=a"),
        ("data=latents data.path={bad}/store", "manifest"),
        ("data=latents data.path={pipes}/shards size=T/2", "a.safetensors"),
        ("data=latents data.path={pipes}/statistics size=T/2", "latents_stats.pt"),
        ("data=digits init={pipes}/weights.safetensors", "no weights at"),
        ("data=digits guidance=autoguidance guidance.checkpoint={pipes}/weights.safetensors", "it is no file"),
        # --- too many, too deep, too long
        (f"train.lr={'[' * 200}", "deeper than 64"),
        ("backbone.width=65536 backbone.depth=1024", "GB of memory"),
        ("-m train.lr=interval(0,1)", "range(0,3)"),
        ("-m seed=range(0,10000000000)", "no run, or more than 10,000"),
        ("paths.runs=bad\udcff", "expected UTF-8"),
        ("-m seed=0 route=none,8-2", "route=8-2"),
        # --- what a dry run refuses, as the run would
        ("dry=true log=trackio", "not installed"),
        ("dry=true data=digits eval.reference={tmp}/none.npz", "no such file"),
        ("dry=true data=digits eval.metrics=[fd,is]", "metric is cannot be measured on features digits-classifier"),
        ("dry=true data=digits train.encoder=probe", "data=digits has 8x8"),
        ("dry=true data=digits guidance=autoguidance guidance.checkpoint={tmp}/none", "none does not exist"),
        ("dry=true train.graphs=true", "expected a CUDA GPU, there is none here"),
        ("dry=true data=digits init={bad}/unknown.safetensors", "does not say which model it belongs to"),
        ("dry=true data=digits init={run} objective=flow", "trained with objective name=edm"),
        (
            "dry=true data=digits backbone.depth=4 backbone.width=32 backbone.heads=2 init={run}",
            "parameters and 4 heads does not fit dit with ",
        ),
    ],
    "sample": [
        ("", "required"),
        ("{run} --nope", "--help"),
        ("{run} nope", "KEY=VALUE"),
        ("{run} --seeds 0-99999999999999", "several calls"),
        ("{run} --seeds 0-4,3", "--seeds: a number is given twice"),
        ("{tmp}/none", "does not exist"),
        ("{tmp}", "no checkpoints"),
        ("{bad}/cut.safetensors", "safetensors"),
        ("{run} --step 99", "there are"),
        ("{run} --classes 12", "class"),
        ("{run} --guidance routed", "route"),
        ("{run} --device gpu9", "device"),
        ("{run} sampler.reuse=20-30", "sampler.reuse was removed"),
        ("{run} sampler=heun", "type --sampler heun"),
        ("{run} --guidance autoguidance", "guidance.checkpoint=RUN@STEP"),
        ("{run} --guidance none --scale 2", "scale 2: there is no guidance; add --guidance cfg"),
        ("{run} --captions cat", "not conditioned on text"),
        ("{run} --captions {pipes}/captions.txt", "it is no file"),
        ("{pipes}/weights.safetensors", "it is no file"),
        ("{run} --classes 3, 7", "a list is one word, such as 3,7"),
    ],
    "evaluate": [
        ("", "required"),
        ("{run} --metrics heldout_loss --write-samples x.npz", "draws no samples"),
        ("{run} data.held_out=x", "held_out"),
        ("{run} --data digits", "--data is for images"),
        ("{run} --write-reference x.txt", "must end in .npz"),
        ("{run} --split train", "--split is for --write-reference"),
        ("{run} --write-samples x.npz --guidance none cfg", "one --guidance"),
        ("{run} --reference {bad}/pickle.npz", "pickle"),
        ("{run} --reference {pipes}/reference.npz", "no such file"),
        ("{pipes}/weights.safetensors", "it is no file"),
        ("{pipes}/pictures --data digits", "0.png"),
        ("{bad}/pictures --inception-weights {pipes}/weights.pth --write-reference x.npz --features inception-adm", "weights.pth"),
        ("{run} --metrics fd data.test_fraction=0.5", "the run was trained with 0.2"),
        ("{run} --samples 20 --write-samples {tmp}", "it is no file"),
    ],
    "prepare": [
        ("", "required"),
        ("{tmp}/none {tmp}/out", "none"),
        ("{tmp} {tmp}/out --files /abs/*", "--files"),
        ("{run}/samples {tmp}/out --vae {bad}", "prepare: --vae FOLDER"),
        ("{bad}/pictures {tmp}/out --captions {pipes}/captions.json --text clip", "it is no file"),
        ("{pipes}/tars {tmp}/out", "0.tar"),
        ("{pipes}/tables {tmp}/out", "0.parquet"),
    ],
    "sweeps": [
        ("lanch route_placement", "launch"),
        ("launch route_placment", "route_placement"),
        ("launch route_placement backbone=mmaba cluster=debug --dry-run", "mamba"),
        ("status never_launched", "never_launched"),
        ("launch {bad}/fits.yaml --dry-run", "fits=[rout]: expected a list"),
        ("launch {bad}/twice.yaml --dry-run", "'seeds' appears twice"),
    ],
    "analysis": [
        ("", "required"),
        ("repotr {run}", "report"),
        ("compare {run} {tmp}/none", "none"),
        ("report {bad}", "no finished run"),
        ("similarity {run} --levels nan", "noise levels above 0, such as 0.1 1 10"),
        ("tables {run} --out {run}/config.yaml", "cannot be used"),
    ],
    "bench": [
        ("tokns=64", "unknown key tokns; did you mean tokens"),
        ("tokens=60", "60 is no square number: try tokens=64"),
        ("batch=many", "batch=many: expected an integer"),
        ("parts=blocks", "one of steps, variants"),
        ("backbone=dit batch=1000000 parts=steps", "GB of memory"),
        ("route=1-2@0.75", "type route=1-2 rate=0.75"),
    ],
}
ROWS = [(command, words, part) for command, rows in TABLES.items() for words, part in rows]


@pytest.fixture(scope="session")
def places(tmp_path_factory):
    """A finished run, damaged things, and an empty folder."""
    root = tmp_path_factory.mktemp("table")
    run = train(small(root / "runs", "train.final_samples=true"), quiet=True)
    bad = root / "bad"
    (bad / "store").mkdir(parents=True)
    (bad / "store" / "manifest.json").write_text("{")
    shutil.copy(run / "model.safetensors", bad / "cut.safetensors")
    with (bad / "cut.safetensors").open("r+b") as handle:
        handle.truncate(500)
    save_file({}, bad / "unknown.safetensors")
    np.savez(bad / "pickle.npz", arr_0=np.array([{"a": 1}], dtype=object))
    (bad / "fits.yaml").write_text("fits: [rout]")
    (bad / "twice.yaml").write_text("seeds: [0]\nseeds: [1]")
    shutil.copytree(run / "samples", bad / "pictures")
    pipes = root / "pipes"
    names = ["weights.safetensors", "weights.pth", "reference.npz", "captions.json", "captions.txt", "tars/0.tar", "tables/0.parquet"]
    names += ["shards/a.safetensors", "statistics/latents_stats.pt", *(f"pictures/{number}.png" for number in range(5))]
    for name in names:
        (pipes / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(pipes / name)
    save_file({"latents": np.zeros((8, 4, 8, 8), np.float32), "labels": np.arange(8)}, pipes / "statistics" / "a.safetensors")
    empty = root / "empty"
    empty.mkdir()
    return {"run": str(run), "bad": str(bad), "pipes": str(pipes), "tmp": str(empty)}


@pytest.mark.parametrize(("command", "words", "part"), ROWS, ids=[f"{c} {w[:80]}" for c, w, _ in ROWS])
def test_wrong_input_is_one_sentence(command, words, part, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, path in places.items():
        words, part = words.replace(f"{{{name}}}", path), part.replace(f"{{{name}}}", path)
    code = COMMANDS[command]([*split(words), *(["train.steps=1"] if command == "run" else [])])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, (out, err)
    assert len(lines) == 1 and lines[0].startswith("error: ") and part in err, err
    assert not list(tmp_path.glob("**/metrics.jsonl")), "nothing may have been trained"
    assert "record  " not in out, "nothing may have been scored"
    assert not (out and "dry=true" in words), "the error is printed alone"
    assert not (tmp_path / "samples").exists(), "nothing may have been sampled"


def split(words: str) -> list[str]:
    """Split at spaces, but not inside braces (backbone.decoder={width: 32, heads: 5})."""
    return re.findall(r"(?:\{[^}]*\}|\S)+", words)


def test_notebooks_name_the_package_that_they_lack(monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nbformat" else find(name))
    assert COMMANDS["analysis"](["notebooks", "--out", str(tmp_path)]) == 2
    assert "notebooks need nbformat" in capsys.readouterr().err
