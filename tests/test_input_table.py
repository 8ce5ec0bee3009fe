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
            ("backbone=", "expected one of dit, lightningdit, mamba,"),
            ("backbone", "key=value"),
            ("=mamba", "key=value"),
            ("data=digit", "did you mean digits?"),
            ("data=imagenet", "expected one of digits, fashion, folder, icons,"),
            ("objective=emd", "did you mean edm?"),
            ("sampler=huen", "did you mean heun?"),
            ("guidance=rooted", "did you mean routed?"),
            ("eval=digit", "did you mean digits?"),
            ("scale=medium", "expected one of paper, small, tiny"),
            ("experiment=table1", "dis, dit_ddpm, evidence,"),
            ("rote=2-8", "did you mean route"),
            ("train.step=5", "train.steps"),
            ("backbone.widht=64", "backbone.width"),
            ("sampler.stesp=4", "sampler.steps"),
            ("train=5", "group of keys"),
            ("routing=rows", "group of keys"),
            ("paths=x", "group of keys"),
            ("+a.b=1", "expected a.b=1"),
            ("~train.lr=1", "expected train.lr=1"),
            ("++seed=1", "expected seed=1"),
            # --- types and ranges
            ("seed=x", "expected an integer >= 0 and <= 2,147,483,647"),
            ("seed=-3", "expected an integer >= 0 and <= 2,147,483,647"),
            ("seed=1.5", "expected an integer >= 0 and <= 2,147,483,647"),
            ("train.steps=0", "expected an integer >= 1 and <= 1,000,000,000"),
            ("train.steps=-5", "expected an integer >= 1 and <= 1,000,000,000"),
            ("train.steps=1e3x", "expected an integer >= 1 and <= 1,000,000,000"),
            ("train.batch=0", "expected an integer >= 1 and <= 1,000,000,000"),
            ("train.batch=99999999999999999999", "expected an integer >= 1 and <= 1,000,000,000"),
            ("train.batch=1000000001", "expected an integer >= 1 and <= 1,000,000,000"),
            ("paths.runs=", "paths.runs= is empty"),
            ("paths.runs=2026", "expected text"),
            ("paths.runs=null", "expected text"),
            ("paths.runs=/proc/x", "cannot be used"),
            ("train.lr=0", "expected a number > 0"),
            ("train.lr=fast", "a number"),
            ("train.lr=nan", "expected a finite number > 0"),
            ("train.lr=inf", "train.lr=inf: expected a finite number > 0"),
            ("train.clip=0", "expected a number > 0 or null"),
            ("train.warmup=-1", "expected an integer >= 0"),
            ("train.ema=1", "expected a number >= 0 and < 1"),
            ("train.ema=-0.1", "expected a number >= 0 and < 1"),
            ("train.label_drop=2", "expected a number >= 0 and <= 1"),
            ("train.betas=[0.9]", "a list of 2"),
            ("train.betas=[0.9,1.0]", "expected a list of 2, each a number >= 0 and < 1"),
            ("train.betas=0.9", "a list"),
            ("train.micro_batch=most", "auto"),
            ("train.micro_batch=0", "expected an integer >= 1 or auto or null"),
            ("train.precision=fp16", "expected one of fp32, bf16, auto"),
            ("train.schedule=linear", "expected one of constant, cosine"),
            ("train.compile=all", "expected one of none, blocks"),
            ("train.loss=l2", "expected one of plain, ensemble"),
            ("train.encoder=dino", "dinov2"),
            ("train.keep=0", "expected an integer >= 1"),
            ("train.log_every=0", "expected an integer >= 1"),
            ("train.tf32=maybe", "true or false"),
            ("log=mlflow", "tensorboard"),
            ("task=caption", "expected one of class, text, none"),
            ("task=text", "captions"),
            ("dry=perhaps", "true or false or full"),
            ("init=nowhere", "does not exist"),
            ("init={run}@x", "whole number"),
            ("init={run}@99", "no weights"),
            ("init={tmp}/dit-*", "matches 0 paths"),
            ("init={run}/*", "; expected exactly one"),
            ("experiment=finetune", "name it with init=RUN"),
            # --- routes
            ("route=8-2", "try route=2-8"),
            ("route=2-40", "try route=2-11"),
            ("route=12-13", "0..11"),
            ("route=2-8@1.5", "between 0 and 1"),
            ("route=2-8@0", "between 0 and 1"),
            ("route=2-8@x", "2-8"),
            ("route=2-8@0,5", "decimal point"),
            ("route=2", "2-8"),
            ("route=two-eight", "2-8"),
            ("route=2-8,4-9", "joi"),
            ("route=0-6+4-9", "try route=0-3+4-9"),
            ("route=4-9+0-2", "0-2+4-9"),
            ("route=-20-3", "blocks"),
            ("route=auto@2", "between 0 and 1"),
            ("route=2-8+", "2-8"),
            ("route=none+2-8", "none"),
            ("route=2-8/none", "expected the fraction of training"),
            ("route=2-8/1.5:none", "progress"),
            ("routing.selection=row", "rows"),
            ("routing.selection=quad route=2-8", "0.75"),
            ("routing.remove=later route=2-8", "after"),
            ("routing.remove=after: route=2-8", "after"),
            ("routing.remove=after:11 routing.reinsert=none route=2-11", "drops nothing"),
            ("routing.reinsert=sum route=2-8", "sum_input"),
            ("routing.reinsert=none route=0-4+6-9", "single segment"),
            ("routing.off_after=2 route=2-8", "0 to 1"),
            ("routing.schedule=quick route=2-8", "linear"),
            ("routing.schedule=linear:1:3 route=2-8", "below 1"),
            ("routing.learned=fuse", "route=auto"),
            ("routing.learned=magic route=2-8", "fuse"),
            ("routing.learned=fuse route=2-8/0.5:3-8", "one span"),
            ("backbone.align={block:3}", "expected train.encoder to be one of"),
            ("backbone.align={block:3,channels:768} train.encoder=random", "expected"),
            ("routing.path_drop=0.1 route=2-8", "learned=fuse"),
            ("routing.block=0", "routing.block=0: expected an integer >= 1"),
            # --- sizes and families
            ("size=Q/2", "expected one of T, M, S"),
            ("size=S/0", "S/2"),
            ("size=S/x", "S/2"),
            ("size=S/3", "expected a patch of 1, 2, 4, 8, 16, 32"),
            ("backbone.width=50", "multiple of 16"),
            ("backbone.depth=0", "1"),
            ("backbone.heads=7", "heads"),
            ("backbone=mamba backbone.scan=spiral", "zigzag"),
            ("backbone=mamba backbone.conv=maybe", "compact"),
            ("backbone=mamba backbone.gap=long", "decay"),
            ("backbone=mamba backbone.mixer=mamba9", "mamba2"),
            ("backbone=rwkv backbone.wkv=best", "rank"),
            ("backbone=rwkv backbone.missing=guess", "nearest"),
            ("backbone=mamba backbone.kernel=cuda", "kernel"),
            ("backbone.decoder={dept: 2}", "unknown key backbone.decoder.dept; did you mean depth?"),
            ("backbone.decoder={depth: 1} objective=ddpm sampler=ddim", "objective=edm"),
            # --- objectives, samplers, guidance, scores
            ("objective.P_std=0", "P_std"),
            ("objective=flow objective.times=gamma", "uniform"),
            ("sampler.steps=0", "steps"),
            ("sampler.sigma_max=0", "sigma"),
            ("guidance.scale=x", "number"),
            ("guidance=routed", "route"),
            ("guidance=routed route=2-8 guidance.weak=1.5", "expected a rate >= 0 and <"),
            ("guidance=autoguidance", "checkpoint"),
            ("eval.samples=1", "expected an integer >= 2 and <= 10,000,000"),
            ("data=digits eval.samples=3", "need more images than that, got 3"),
            ("eval.metrics=[fdd]", "fd"),
            ("eval.features=[inception]", "inception-adm"),
            ("eval.labels=all", "balanced"),
            ("eval.every=-1", "expected an integer >= 0 and <= 10,000,000"),
            ("task=none", "guidance"),
            # --- data
            ("data.test_fraction=2", "data.test_fraction=2: expected a number >= 0.01 and <= 0.9"),
            ("data=digits data.split_seed=-1", "data.split_seed=-1: expected an integer >= 0"),
            ("data=scenes data.max_shapes=9", "data.max_shapes=9: expected an integer >= 1 and <= 3"),
            ("data=latents", "data.path"),
            ("data=latents data.path={tmp}/none", "none"),
            ("data=latents data.path={tmp}", "latent"),
            ("data=latents data.path={bad}/store", "manifest"),
            ("data=latents data.flip=sometimes", "mirror"),
            ("data=latents data.vae_dtype=float8", "bfloat16"),
            ("data=latents data.held_out=-1", "data.held_out=-1: expected an integer >= 0"),
            # --- too many, too deep, too long
            (f"seed={NINES}", "at most 100 digits"),
            (f"train.lr={'[' * 200}", "deeper than 64"),
            (f"sampler.steps={'9' * 30}", "below 2^63"),
            ("train.threads=100000000", "expected an integer >= 1 and <= 1,024 or null"),
            ("train.threads=0", "expected an integer >= 1 and <= 1,024 or null"),
            ("seed=2147483648", "expected an integer >= 0 and <= 2,147,483,647"),
            ("backbone.depth=1000000000", "expected an integer >= 1 and <= 1,024"),
            ("backbone.width=65536 backbone.depth=1024", "GB of memory"),
            ("train.batch=1000000000", "GB of memory"),
            ("backbone.decoder=[1]", "a mapping"),
            ("backbone.attention={a: 1}", "expected an integer or a list, each an integer"),
            ("backbone.attention=-1", "blocks"),
            ("data=latents data.path=[1]", "expected text"),
            ("experiment=null task=text", "captions"),
            ("backbone.decoder={depth: x}", "backbone.decoder.depth=x: expected an integer >= 1"),
            ("backbone.decoder={heads: 0}", "backbone.decoder.heads=0: expected an integer >= 1"),
            ("backbone.decoder={width: -16}", "backbone.decoder.width=-16: expected an integer >= 16 and a multiple of 16"),
            ("size=S/99999", "S/2"),
            ("-m train.lr=interval(0,1)", "range(0,3)"),
            ("-m seed=range(0,10000000000)", "no run, or more than 10,000"),
            ("-m seed=range(0,3,0)", "arg 3 must not be zero"),
            ("-m backbone=glob(zz*)", "no run, or more than 10,000"),
            ("init=", "init= is empty"),
            ("eval.reference=5", "expected text or null"),
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
            ("{run} --seeds \u00b2", "numbers"),
            ("{run} --pngs -1", "--pngs -1"),
            ("", "required"),
            ("{tmp}/none", "does not exist"),
            ("{tmp}", "no checkpoints"),
            ("{bad}/cut.safetensors", "safetensors"),
            ("{bad}/text.safetensors", "safetensors"),
            ("{run} --step 99", "there are"),
            ("{run} --weights best", "ema or raw"),
            ("{run} --classes 12", "class"),
            ("{run} --classes cat", "class"),
            ("{run} --seeds x", "seed"),
            ("{run} --seeds 9-3", "seed"),
            ("{run} --seeds 0-4,3", "--seeds: a number is given twice"),
            ("{run} --classes 3,3", "--classes: a number is given twice"),
            ("{run} --guidance cgf", "cfg"),
            ("{run} --guidance routed", "route"),
            ("{run} --steps 0", "steps"),
            ("{run} --steps x", "steps"),
            ("{run} --sampler huen", "heun"),
            ("{run} --captions hello", "text"),
            ("{run} sampler.nope=1", "unknown"),
            ("{run} nope", "KEY=VALUE"),
            ("{run} --batch 0", "batch"),
            ("{run} --device gpu9", "device"),
            ("{run} --nope", "--help"),
            ("{run} --device meta", "try cpu"),
            (f"{{run}} sampler.steps={NINES}", "expected an integer >= 1 and <= 100,000"),
            (f"{{run}} sampler.steps={'[' * 5000}", "expected an integer >= 1 and <= 100,000"),
            ("{run} sampler.steps=1000000000000", "expected an integer >= 1 and <= 100,000"),
            ("{run} data.test_fraction=[1]", "expected a number"),
            ("{run} --guidance cfg guidance.channels=9", "guidance.channels=9: expected at most 1 or null"),
            ("{run} sampler.steps=true", "sampler.steps=true: expected an integer >= 1"),
            ("{run} sampler.reuse=20-30", "sampler.reuse was removed"),
            ("{run} --scale nan", "guidance.scale=nan: expected a number"),
            ("{run} sampler=heun", "type --sampler heun"),
        ]
    ],
    # --- evaluate
    *[
        (EVALUATE, words, part)
        for words, part in [
            ("", "required"),
            ("{tmp}/none", "exist"),
            ("{run} --samples 1", "expected an integer >= 2 and <= 10,000,000"),
            ("{run} --samples x", "samples"),
            ("{run} --metrics fdd", "fd"),
            ("{run} --metrics heldout_loss --write-samples x.npz", "draws no samples"),
            ("{run} data.held_out=x", "held_out"),
            ("{run} --features incep", "inception-adm"),
            ("{run} --guidance cgf", "cfg"),
            ("{run} --step 77", "there are"),
            ("{run} --reference {tmp}/none.npz", "none.npz"),
            ("{run} --reference {bad}/pickle.npz", "pickle"),
            ("{run} --reference {bad}/text.npz", "text.npz"),
            ("{bad}/pickle.npz", "pickle"),
            ("{tmp}", "{tmp}"),
            ("{run} --samples 1000000000000000", "expected an integer >= 2 and <= 10,000,000"),
            ("{run}/samples --data latents data.path={tmp}/none", "none is no folder"),
            ("{run} --guidance cfg guidance.scael=2", "did you mean scale"),
            ("{run} --metrics fd data.test_fraction=0.5", "the run was trained with 0.2"),
            ("{run} guidance=cfg", "type --guidance cfg"),
            ("{run} --guidance 2.5", "guidance=2.5"),
            ("{run} --samples 20 --write-samples {tmp}", "it is no file"),
            ("{run} --samples 20 --write-samples {run}/config.yaml/x.npz", "config.yaml cannot be used"),
            ("{run} --write-reference {run}/config.yaml/x.npz", "config.yaml cannot be used"),
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
            ("{tmp} {tmp}/out --size x", "--size"),
            ("{tmp} {tmp}/out --nope 3", "--help"),
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
            ("launch route_placement cluster=nowhere", "cluster"),
            ("launch route_placement backbone=mmaba cluster=debug --dry-run", "mamba"),
            ("launch route_placement --throttle x", "throttle"),
            ("launch route_placement --compare-at money --dry-run", "flops"),
            ("launch route_placement nope=1 --dry-run", "nope"),
            ("launch route_placement scale=huge --dry-run", "scale"),
            ("status never_launched", "never_launched"),
            ("launch {bad}/grid.yaml --dry-run", "grid.yaml"),
            ("launch {bad}/...yaml --dry-run", "a folder gets the name"),
            ("status ...yaml", "a folder gets the name"),
            ("launch route_placement cluster.extra={ --dry-run", "not YAML"),
            (f"launch route_placement cluster.cpus={NINES} --dry-run", "at most 100 digits"),
            ("launch route_placement cluster.workers=1000000000 --dry-run", "expected an integer >= 1 and <= 99,999"),
            (f"launch route_placement cluster.time={'9' * 50} --dry-run", "days-hours"),
            ("launch route_placement cluster.gpus=x --dry-run", "cluster.gpus=x: expected a whole number"),
            ("launch route_placement cluster.runs_per_gpu=2 --dry-run", "expected gpus=1, nodes=1 and tasks=1"),
            ("launch route_placement seed=x --dry-run", "seed=x: expected a whole number"),
            ("launch {bad}/fits.yaml --dry-run", "fits=[rout]: expected a list"),
            ("launch {bad}/where.yaml --dry-run", "expected its name in of"),
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
            ("tables {tmp}/none", "none"),
            ("report {bad}", "no finished run"),
            ("tables {run}/.. --only nope", "nope"),
            ("figures {run}/.. --only nope", "nope"),
            ("similarity {tmp}/none", "none"),
            ("similarity {run} --levels nan", "noise levels above 0, such as 0.1 1 10"),
            ("similarity {run} --seed -1", "seed -1"),
            ("guidance-scale {tmp}/none", "none"),
            ("guidance-scale {run} --levels 0", "noise levels above 0"),
            ("guidance-scale {run} --against {tmp}/none", "does not exist"),
            ("notebooks --runs {tmp}/none", "holds no runs"),
            ("tables {run} --out {run}/config.yaml", "cannot be used"),
            ("publish {run}/.. --out /proc/x", "cannot be used"),
            ("report {run}/.. --out {bad}/pipe/manifest.json", "it is no file"),
        ]
    ],
    # --- bench
    *[
        (BENCH, words, part)
        for words, part in [
            ("backbone=mmaba", "did you mean mamba"),
            ("tokens=x", "tokens"),
            ("nope=1", "nope"),
            ("tokens", "key=value"),
            *[(f"{key}=", "expected key=value") for key in ("backbone", "tokens", "parts", "out")],
            ("threads=0", ">= 1"),
            ("threads=100000000", "<= 1,024"),
            ("batch=999999999", "<= 1,000,000"),
            ("tokens=100000000000000", "<= 16,777,216"),
            ("depth=1000000000", "1 to 1024"),
            (f"depth={NINES}", "an integer"),
            ("backbone=dit batch=1000000 parts=steps", "GB of memory"),
            ("route=1-2@0.75", "type route=1-2 rate=0.75"),
            ("route=0-1@0.5+3-4@0.75", "type route=0-1+3-4 rate=0.5,0.75"),
            ("parts=steps out={bad}/pipe/manifest.json", "it is no file"),
            ("size=S/2,,Q/2", "size=: expected one of T"),
            ("rate=2", "rate=[2]: expected a list, each a number >= 0 and < 1"),
            ("rate=0.5,-0.5", "rate=[0.5,-0.5]: expected a list"),
            ("parts=steps out={run}/config.yaml/x.json", "config.yaml cannot be used"),
        ]
    ],
]


@pytest.fixture(scope="session")
def places(tmp_path_factory):
    """A finished run, damaged things, and an empty folder."""
    from experiments.training.session import train

    root = tmp_path_factory.mktemp("table")
    run = train(small(root / "runs"), quiet=True)
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
    (bad / "where.yaml").write_text("where: {route: none}")
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
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "nbformat" else found(name)
    )
    assert call(ANALYSIS, ["notebooks", "--out", str(tmp_path)]) == 2
    assert "notebooks need nbformat" in capsys.readouterr().err
