"""Wrong input over the whole surface: exit code 2, one sentence on stderr, nothing on stdout, nothing started."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
from hostile import deadline
from small import small

from experiments.runtime.command import run_command

RUN, SAMPLE, EVALUATE, PREPARE, SWEEPS, ANALYSIS, BENCH = (
    "run", "sample", "evaluate", "prepare", "sweeps", "analysis", "bench",
)  # fmt: skip


NINES = "9" * 5000


def call(command: str, words: list[str]) -> int:
    """Run a command in this process as its script does."""
    if command == RUN:
        from experiments import run as module
    elif command == SAMPLE:
        from experiments import sample as module
    elif command == EVALUATE:
        from experiments import evaluate as module
    elif command == BENCH:
        from experiments import bench as module
    elif command == PREPARE:
        from experiments import prepare

        return prepare.main(words)
    elif command == SWEEPS:
        from sweeps.command import main

        return main(words)
    else:
        from analysis.command import main

        return main(words)
    return run_command(module.main, words)


# (command, words, part of the message). {run}: a finished run, {bad}: a folder of damaged things, {tmp}: empty.
TABLE: list[tuple[str, str, str]] = [
    # --- keys and groups
    *[
        (RUN, words, part)
        for words, part in [
            ("backbone=mmaba", "did you mean mamba?"),
            ("backbone", "key=value"),
            ("=mamba", "key=value"),
            ("data=digit", "did you mean digits?"),
            ("scale=medium", "expected one of paper, small, tiny"),
            ("experiment=table1", "dis, dit_ddpm, evidence,"),
            ("rote=2-8", "did you mean route"),
            ("backbone.widht=64", "backbone.width"),
            ("train=5", "group of keys"),
            ("+a.b=1", "expected a.b=1"),
            # --- types and ranges
            ("seed=-3", "expected an integer >= 0 and <= 2,147,483,647"),
            ("train.steps=0", "expected an integer >= 1 and <= 1,000,000,000"),
            ("train.batch=99999999999999999999", "expected an integer >= 1 and <= 1,000,000,000"),
            ("paths.runs=", "paths.runs= is empty"),
            ("paths.runs=null", "expected text"),
            ("paths.runs=/proc/x", "cannot be used"),
            ("train.lr=fast", "a number"),
            ("train.lr=nan", "expected a finite number > 0"),
            ("train.ema=1", "expected a number >= 0 and < 1"),
            ("train.betas=[0.9,1.0]", "expected a list of 2, each a number >= 0 and < 1"),
            ("train.micro_batch=most", "auto"),
            ("train.encoder=dino", "dinov2"),
            ("train.tf32=maybe", "true or false"),
            ("task=text", "captions"),
            ("dry=perhaps", "true or false or full"),
            ("init=nowhere", "does not exist"),
            ("init={run}@x", "whole number"),
            ("init={tmp}/dit-*", "matches 0 paths"),
            ("init={run}/*", "; expected exactly one"),
            ("experiment=finetune", "name it with init=RUN"),
            # --- routes
            ("route=8-2", "try route=2-8"),
            ("route=2-40", "try route=2-11"),
            ("route=2-8@1.5", "between 0 and 1"),
            ("route=2-8@0,5", "decimal point"),
            ("route=2", "2-8"),
            ("route=two-eight", "2-8"),
            ("route=0-6+4-9", "try route=0-3+4-9"),
            ("route=2-8/none", "expected the fraction of training"),
            ("routing.selection=row", "rows"),
            ("routing.selection=quad route=2-8", "0.75"),
            ("routing.reinsert=none route=0-4+6-9", "single segment"),
            ("routing.off_after=2 route=2-8", "0 to 1"),
            ("routing.schedule=linear:1:3 route=2-8", "below 1"),
            ("routing.learned=fuse", "route=auto"),
            ("routing.learned=fuse route=2-8/0.5:3-8", "one span"),
            ("backbone.align={block:3}", "expected train.encoder to be one of"),
            ("routing.path_drop=0.1 route=2-8", "learned=fuse"),
            # --- sizes and families
            ("size=Q/2", "expected one of T, M, S"),
            ("size=S/3", "expected a patch of 1, 2, 4, 8, 16, 32"),
            ("backbone.width=50", "multiple of 16"),
            ("backbone.heads=7", "heads"),
            ("backbone=mamba backbone.scan=spiral", "zigzag"),
            ("backbone=rwkv backbone.wkv=best", "rank"),
            ("backbone.decoder={dept: 2}", "unknown key backbone.decoder.dept; did you mean depth?"),
            ("backbone.decoder={depth: 1} objective=ddpm sampler=ddim", "objective=edm"),
            # --- objectives, samplers, guidance, scores
            ("objective.P_std=0", "P_std"),
            ("guidance=routed", "route"),
            ("guidance=routed route=2-8 guidance.weak=1.5", "expected a rate >= 0 and <"),
            ("guidance=autoguidance", "checkpoint"),
            ("data=digits eval.samples=3", "need more images than that, got 3"),
            ("eval.metrics=[fdd]", "fd"),
            ("eval.features=[inception]", "inception-adm"),
            ("task=none", "guidance"),
            # --- data
            ("data=scenes data.max_shapes=9", "data.max_shapes=9: expected an integer >= 1 and <= 3"),
            ("data=latents", "data.path"),
            ("data=latents data.path={tmp}/none", "none"),
            ("data=latents data.path={tmp}", "latent"),
            ("data=latents data.path={bad}/store", "manifest"),
            # --- too many, too deep, too long
            (f"seed={NINES}", "at most 100 digits"),
            (f"train.lr={'[' * 200}", "deeper than 64"),
            (f"sampler.steps={'9' * 30}", "below 2^63"),
            ("backbone.width=65536 backbone.depth=1024", "GB of memory"),
            ("train.batch=1000000000", "GB of memory"),
            ("backbone.decoder=[1]", "a mapping"),
            ("backbone.attention={a: 1}", "expected an integer or a list, each an integer"),
            ("backbone.decoder={heads: 0}", "backbone.decoder.heads=0: expected an integer >= 1"),
            ("-m train.lr=interval(0,1)", "range(0,3)"),
            ("-m seed=range(0,10000000000)", "no run, or more than 10,000"),
            ("guidance=cfg guidance.channels=99 sampler.steps=1", "expected at most 1 or null"),
            ("paths.runs=bad\udcff", "expected UTF-8"),
            ("data=latents data.path={bad}/pipe", "it is no file"),
        ]
    ],
    # --- sample
    *[
        (SAMPLE, words, part)
        for words, part in [
            ("{run} --seeds 99999999999999999999", "below 10^18"),
            ("{run} --seeds 0-99999999999999", "several calls"),
            ("", "required"),
            ("{tmp}/none", "does not exist"),
            ("{tmp}", "no checkpoints"),
            ("{bad}/cut.safetensors", "safetensors"),
            ("{run} --step 99", "there are"),
            ("{run} --classes 12", "class"),
            ("{run} --seeds 9-3", "seed"),
            ("{run} --seeds 0-4,3", "--seeds: a number is given twice"),
            ("{run} --guidance routed", "route"),
            ("{run} nope", "KEY=VALUE"),
            ("{run} --device gpu9", "device"),
            ("{run} --nope", "--help"),
            (f"{{run}} sampler.steps={'[' * 5000}", "expected an integer >= 1 and <= 100,000"),
            ("{run} sampler.reuse=20-30", "sampler.reuse was removed"),
            ("{run} sampler=heun", "type --sampler heun"),
        ]
    ],
    # --- evaluate
    *[
        (EVALUATE, words, part)
        for words, part in [
            ("", "required"),
            ("{tmp}/none", "exist"),
            ("{run} --metrics heldout_loss --write-samples x.npz", "draws no samples"),
            ("{run} data.held_out=x", "held_out"),
            ("{run} --reference {tmp}/none.npz", "none.npz"),
            ("{run} --reference {bad}/pickle.npz", "pickle"),
            ("{tmp}", "{tmp}"),
            ("{run}/samples --data latents data.path={tmp}/none", "none is no folder"),
            ("{run} --metrics fd data.test_fraction=0.5", "the run was trained with 0.2"),
            ("{run} --samples 20 --write-samples {tmp}", "it is no file"),
            ("{run} --samples 20 --write-samples {run}/config.yaml/x.npz", "config.yaml cannot be used"),
            (f"{{run}} --guidance cfg,scale={'[' * 5000}", "expected a number"),
        ]
    ],
    # --- prepare
    *[
        (PREPARE, words, part)
        for words, part in [
            ("", "required"),
            ("{tmp}/none {tmp}/out", "none"),
            ("{tmp} {tmp}/out --vae {tmp}/novae", "{tmp}"),
            ("{tmp} {tmp}/out --files /abs/*", "--files"),
            ("{run}/samples {tmp}/out --vae {bad}", "prepare: --vae FOLDER"),
            ("{run}/samples {run}/config.yaml", "config.yaml cannot be used"),
            (f"{{tmp}} {{tmp}}/out --batch {'9' * 30}", "at most 10000000"),
        ]
    ],
    # --- sweeps
    *[
        (SWEEPS, words, part)
        for words, part in [
            ("lanch route_placement", "launch"),
            ("launch route_placment", "route_placement"),
            ("launch route_placement backbone=mmaba cluster=debug --dry-run", "mamba"),
            ("launch route_placement --throttle x", "throttle"),
            ("launch route_placement --compare-at money --dry-run", "flops"),
            ("launch route_placement nope=1 --dry-run", "nope"),
            ("status never_launched", "never_launched"),
            ("launch {bad}/grid.yaml --dry-run", "grid.yaml"),
            ("status ...yaml", "a folder gets the name"),
            ("launch route_placement cluster.extra={ --dry-run", "not YAML"),
            (f"launch route_placement cluster.cpus={NINES} --dry-run", "at most 100 digits"),
            ("launch route_placement cluster.workers=1000000000 --dry-run", "expected an integer >= 1 and <= 99,999"),
            ("launch route_placement cluster.runs_per_gpu=2 --dry-run", "expected gpus=1, nodes=1 and tasks=1"),
            ("launch {bad}/fits.yaml --dry-run", "fits=[rout]: expected a list"),
            ("launch {bad}/twice.yaml --dry-run", "'seeds' appears twice"),
            ("launch route_placement cluster.extra={array: 0-5} --dry-run", "options that the sweep does not set"),
        ]
    ],
    # --- analysis
    *[
        (ANALYSIS, words, part)
        for words, part in [
            ("", "required"),
            ("repotr {run}", "report"),
            ("report {tmp}/none", "none"),
            ("compare {run} {tmp}/none", "none"),
            ("report {bad}", "no finished run"),
            ("tables {run}/.. --only nope", "nope"),
            ("similarity {run} --levels nan", "noise levels above 0, such as 0.1 1 10"),
            ("guidance-scale {run} --levels 0", "noise levels above 0"),
            ("notebooks --runs {tmp}/none", "holds no runs"),
            ("tables {run} --out {run}/config.yaml", "cannot be used"),
            ("report {run}/.. --out {bad}/pipe/manifest.json", "it is no file"),
        ]
    ],
    # --- bench
    *[
        (BENCH, words, part)
        for words, part in [
            ("tokens=x", "tokens"),
            ("tokens", "key=value"),
            *[(f"{key}=", "expected key=value") for key in ("backbone", "tokens", "parts", "out")],
            ("threads=0", ">= 1"),
            ("depth=1000000000", "1 to 1024"),
            ("backbone=dit batch=1000000 parts=steps", "GB of memory"),
            ("route=1-2@0.75", "type route=1-2 rate=0.75"),
            ("parts=steps out={bad}/pipe/manifest.json", "it is no file"),
            ("rate=2", "rate=[2]: expected a list, each a number >= 0 and < 1"),
        ]
    ],
]


@pytest.fixture(scope="session")
def places(tmp_path_factory):
    """A finished run, damaged things, and an empty folder."""
    from experiments.training.session import train

    root = tmp_path_factory.mktemp("table")
    run = train(small(root / "runs", "train.final_samples=true"), quiet=True)
    bad = root / "bad"
    (bad / "store").mkdir(parents=True)
    (bad / "store" / "manifest.json").write_text("{")
    (bad / "text.safetensors").write_text("not tensors")
    shutil.copy(run / "model.safetensors", bad / "cut.safetensors")
    with (bad / "cut.safetensors").open("r+b") as handle:
        handle.truncate(500)
    (bad / "text.npz").write_text("not an archive")
    np.savez(bad / "pickle.npz", arr_0=np.array([{"a": 1}], dtype=object))
    (bad / "grid.yaml").write_text("axes: [")
    (bad / "...yaml").write_text("title: t")
    (bad / "fits.yaml").write_text("fits: [rout]")
    (bad / "twice.yaml").write_text("seeds: [0]\nseeds: [1]")
    (bad / "pipe").mkdir()
    os.mkfifo(bad / "pipe" / "manifest.json")
    empty = root / "empty"
    empty.mkdir()
    return {"run": str(run), "bad": str(bad), "tmp": str(empty)}


def test_the_table_is_long_enough():
    assert len(TABLE) >= 150
    assert len({(c, w) for c, w, _ in TABLE}) == len(TABLE), "no row stands twice"


@pytest.mark.parametrize(("command", "words", "part"), TABLE, ids=[f"{c} {w[:80]}" for c, w, _ in TABLE])
def test_wrong_input_is_one_sentence(command, words, part, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [word.format_map(places) if "{run" in word or "{bad" in word or "{tmp" in word else word
             for word in split(words)]  # fmt: skip
    if command == RUN:
        given += ["train.steps=1"] if "train.steps" not in words else []
    code = call(command, given)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, (out, err)
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    if "{" in part:
        part = part.format_map(places)
    assert part in err, err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("**/metrics.jsonl")), "nothing may have been trained"
    assert "record  " not in out, "nothing may have been scored"


def split(words: str) -> list[str]:
    """Split at spaces, but not inside braces (backbone.decoder={dept: 2})."""
    found, depth = [""], 0
    for sign in words:
        depth += (sign == "{") - (sign == "}")
        if sign == " " and not depth:
            found.append("")
        else:
            found[-1] += sign
    return [word for word in found if word]


def test_links_that_loop_are_one_sentence(tmp_path, capsys):
    from experiments.runtime.locks import locked
    from experiments.runtime.records import append_jsonl

    def lock(_):
        with locked(tmp_path):
            pass

    def append(_):
        append_jsonl(tmp_path / "scores.jsonl", [{}])

    for name, use in (("lock", lock), ("scores.jsonl", append)):
        (tmp_path / name).symlink_to(name)
        assert run_command(use, []) == 2
        assert f"{tmp_path / name} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.jsonl"])
def test_a_pipe_in_a_run_folder_does_not_hang_analysis(name, places, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(places["run"], folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with deadline(20):
        code = call(ANALYSIS, ["list", str(tmp_path)])
    said = "".join(capsys.readouterr())
    assert code == 0 and (name == "metrics.jsonl" or f"{name} cannot be read" in said), said


def test_notebooks_name_the_package_that_they_lack(monkeypatch, capsys, tmp_path):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nbformat" else found(name))
    assert call(ANALYSIS, ["notebooks", "--out", str(tmp_path)]) == 2
    assert "notebooks need nbformat" in capsys.readouterr().err
