"""Wrong input over the whole surface: exit code 2, one sentence on stderr, nothing on stdout, nothing started."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil

import numpy as np
import pytest
from hostile import deadline
from small import small

from analysis import command as analysis_command
from experiments import bench, evaluate, prepare, run, sample
from experiments.runtime.command import run_command
from experiments.training.session import train
from sweeps import command as sweeps_command

NINES = "9" * 5000
COMMANDS = {
    "run": lambda words: run_command(run.main, words),
    "sample": lambda words: run_command(sample.main, words),
    "evaluate": lambda words: run_command(evaluate.main, words),
    "bench": lambda words: run_command(bench.main, words),
    "prepare": prepare.main,
    "sweeps": sweeps_command.main,
    "analysis": analysis_command.main,
}


# Words and a part of the message. {run}: a finished run, {bad}: a folder of damaged things, {tmp}: empty.
TABLES = {
    "run": [
        # --- keys and groups
        ("backbone=mmaba", "did you mean mamba?"),
        ("=mamba", "key=value"),
        ("scale=medium", "expected one of paper, small, tiny"),
        ("experiment=table1", "dis, dit_ddpm, evidence,"),
        ("rote=2-8", "did you mean route"),
        ("train=5", "group of keys"),
        ("+a.b=1", "expected a.b=1"),
        # --- types and ranges
        ("seed=-3", "expected an integer >= 0 and <= 2,147,483,647"),
        ("paths.runs=", "paths.runs= is empty"),
        ("paths.runs=/proc/x", "cannot be used"),
        ("train.lr=nan", "expected a finite number > 0"),
        ("train.betas=[0.9,1.0]", "expected a list of 2, each a number >= 0 and < 1"),
        ("dry=perhaps", "true or false or full"),
        ("init=nowhere", "does not exist"),
        ("init={run}@x", "whole number"),
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
        ("backbone.decoder={dept: 2}", "unknown key backbone.decoder.dept; did you mean depth?"),
        ("backbone.decoder={depth: 1} objective=ddpm sampler=ddim", "objective=edm"),
        # --- objectives, guidance, scores, data
        ("task=text", "captions"),
        ("guidance=routed", "route"),
        ("guidance=autoguidance", "checkpoint"),
        ("data=latents", "data.path"),
        ("data=latents data.path={tmp}", "latent"),
        ("data=latents data.path={bad}/store", "manifest"),
        ("data=latents data.path={bad}/pipe", "it is no file"),
        # --- too many, too deep, too long
        (f"seed={NINES}", "at most 100 digits"),
        (f"train.lr={'[' * 200}", "deeper than 64"),
        (f"sampler.steps={'9' * 30}", "below 2^63"),
        ("backbone.width=65536 backbone.depth=1024", "GB of memory"),
        ("train.batch=1000000000", "GB of memory"),
        ("-m train.lr=interval(0,1)", "range(0,3)"),
        ("-m seed=range(0,10000000000)", "no run, or more than 10,000"),
        ("paths.runs=bad\udcff", "expected UTF-8"),
    ],
    "sample": [
        ("", "required"),
        ("{run} --nope", "--help"),
        ("{run} nope", "KEY=VALUE"),
        ("{run} --seeds 99999999999999999999", "below 10^18"),
        ("{run} --seeds 0-99999999999999", "several calls"),
        ("{run} --seeds 9-3", "seed"),
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
    ],
    "evaluate": [
        ("", "required"),
        ("{run} --metrics heldout_loss --write-samples x.npz", "draws no samples"),
        ("{run} data.held_out=x", "held_out"),
        ("{run} --reference {bad}/pickle.npz", "pickle"),
        ("{run}/samples --data latents data.path={tmp}/none", "none is no folder"),
        ("{run} --metrics fd data.test_fraction=0.5", "the run was trained with 0.2"),
        ("{run} --samples 20 --write-samples {tmp}", "it is no file"),
        ("{run} --samples 20 --write-samples {run}/config.yaml/x.npz", "config.yaml cannot be used"),
        (f"{{run}} --guidance cfg,scale={'[' * 5000}", "expected a number"),
    ],
    "prepare": [
        ("", "required"),
        ("{tmp}/none {tmp}/out", "none"),
        ("{tmp} {tmp}/out --files /abs/*", "--files"),
        ("{run}/samples {tmp}/out --vae {bad}", "prepare: --vae FOLDER"),
        ("{run}/samples {run}/config.yaml", "config.yaml cannot be used"),
        (f"{{tmp}} {{tmp}}/out --batch {'9' * 30}", "at most 10000000"),
    ],
    "sweeps": [
        ("lanch route_placement", "launch"),
        ("launch route_placment", "route_placement"),
        ("launch route_placement backbone=mmaba cluster=debug --dry-run", "mamba"),
        ("status never_launched", "never_launched"),
        ("status ...yaml", "a folder gets the name"),
        ("launch route_placement cluster.workers=1000000000 --dry-run", "expected an integer >= 1 and <= 99,999"),
        ("launch {bad}/fits.yaml --dry-run", "fits=[rout]: expected a list"),
        ("launch {bad}/twice.yaml --dry-run", "'seeds' appears twice"),
        ("launch route_placement cluster.extra={array: 0-5} --dry-run", "options that the sweep does not set"),
    ],
    "analysis": [
        ("", "required"),
        ("repotr {run}", "report"),
        ("compare {run} {tmp}/none", "none"),
        ("report {bad}", "no finished run"),
        ("similarity {run} --levels nan", "noise levels above 0, such as 0.1 1 10"),
        ("tables {run} --out {run}/config.yaml", "cannot be used"),
        ("report {run}/.. --out {bad}/pipe/manifest.json", "it is no file"),
    ],
    "bench": [
        ("tokens=x", "tokens"),
        ("out=", "expected key=value"),
        ("threads=0", ">= 1"),
        ("depth=1000000000", "<= 1,024"),
        ("backbone=dit batch=1000000 parts=steps", "GB of memory"),
        ("route=1-2@0.75", "type route=1-2 rate=0.75"),
        ("parts=steps out={bad}/pipe/manifest.json", "it is no file"),
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
    np.savez(bad / "pickle.npz", arr_0=np.array([{"a": 1}], dtype=object))
    (bad / "...yaml").write_text("title: t")
    (bad / "fits.yaml").write_text("fits: [rout]")
    (bad / "twice.yaml").write_text("seeds: [0]\nseeds: [1]")
    (bad / "pipe").mkdir()
    os.mkfifo(bad / "pipe" / "manifest.json")
    empty = root / "empty"
    empty.mkdir()
    return {"run": str(run), "bad": str(bad), "tmp": str(empty)}


@pytest.mark.parametrize(("command", "words", "part"), ROWS, ids=[f"{c} {w[:80]}" for c, w, _ in ROWS])
def test_wrong_input_is_one_sentence(command, words, part, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, path in places.items():
        words = words.replace(f"{{{name}}}", path)
    code = COMMANDS[command]([*split(words), *(["train.steps=1"] if command == "run" else [])])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, (out, err)
    assert len(lines) == 1 and lines[0].startswith("error: ") and part in err, err
    assert not list(tmp_path.glob("**/metrics.jsonl")), "nothing may have been trained"
    assert "record  " not in out, "nothing may have been scored"


def split(words: str) -> list[str]:
    """Split at spaces, but not inside braces (backbone.decoder={dept: 2})."""
    return re.findall(r"(?:\{[^}]*\}|\S)+", words)


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.jsonl"])
def test_a_pipe_in_a_run_folder_does_not_hang_analysis(name, places, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(places["run"], folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with deadline(20):
        code = COMMANDS["analysis"](["list", str(tmp_path)])
    output = "".join(capsys.readouterr())
    assert code == 0 and (name == "metrics.jsonl" or f"{name} cannot be read" in output), output


def test_notebooks_name_the_package_that_they_lack(monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nbformat" else find(name))
    assert COMMANDS["analysis"](["notebooks", "--out", str(tmp_path)]) == 2
    assert "notebooks need nbformat" in capsys.readouterr().err
