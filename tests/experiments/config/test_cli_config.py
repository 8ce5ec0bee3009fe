"""The configuration: keys, groups, names, hashes, and every mistake as one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import save_file as save_tensors
from small import ROOT, command, overrides, run

from experiments.config import GROUPS, Config, ConfigError
from experiments.config.compose import load
from experiments.config.help import SECTIONS, help_text
from experiments.run import main
from experiments.runtime import command as cli
from routing.errors import UserError


def test_scale_sets_data_size_and_steps_and_each_can_be_overridden():
    default = load([])
    assert (default.scale, default.data.name, default.size, default.depth) == ("tiny", "mnist", "T/4", 12)
    assert load(["data=digits"]).size == "T/1", "the patch follows the data"
    small = load(["scale=small"])
    assert (small.data.name, small.size) == ("scenes", "M/2")
    changed = load(["scale=small", "size=S/2", "data=digits", "train.steps=7", "eval=digits"])
    assert (changed.data.name, changed.size, changed.train.steps) == ("digits", "S/2", 7)
    paper = load(["scale=paper", "size=XL/2", "route=auto"])
    assert paper.resolved_route == "2-24"
    assert (paper.train.steps, paper.train.batch, paper.train.lr, paper.train.ema) == (400_000, 256, 1e-4, 0.9999)


def test_of_an_override_typed_twice_the_last_one_counts():
    assert load(["train.lr=1", "train.lr=2"]).train.lr == 2


# --- identity --------------------------------------------------------------------------------------------------


def test_two_ways_of_writing_the_same_run_have_one_name():
    names = {load([f"route={text}"]).name for text in ("auto", "2--4", "2-8", "2-8@0.5", "'2-8'")}
    assert len(names) == 1 and "_2-8_s0-" in names.pop()
    assert load(["routing.selection=rows"]).hash == load([]).hash, "dense runs that differ in their routing"


SHARES_OF_A_RUN = ("route=2-8 routing.off_after=0.5", "route=2-8/0.5:none", "route=2-8 routing.schedule=linear:1:0")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("train.schedule=cosine train.steps=10", "train.schedule=cosine train.steps=20"),
        ("routing.selection=rows route=2-8", "route=2-8"),
        ("guidance.scale=2", "guidance.scale=2.0"),  # the same option, hashed as it was typed
        # What happens at a share of the run depends on its length.
        *[(f"{words} train.steps=10", f"{words} train.steps=20") for words in SHARES_OF_A_RUN],
    ],
)
def test_two_runs_have_two_hashes(one, other):
    assert load(one.split()).hash != load(other.split()).hash


def safetensors(path, tensors, metadata):
    """Write a safetensors file by hand: 8 bytes of length, a header in this order, the values."""
    header, at = {"__metadata__": metadata}, 0
    for name, values in tensors:
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [at, at + 4 * len(values)]}
        at += 4 * len(values)
    text = json.dumps(header).encode()
    data = b"".join(struct.pack(f"<{len(v)}f", *v) for _, v in tensors)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_init_is_identified_by_its_weights_in_whatever_order_they_were_written(tmp_path):
    a, b = ("a", [1.0, 2.0]), ("b", [3.0])
    facts = {"step": "6", "format": "x"}

    def digest(*tensors, **metadata):
        return load([f"init={safetensors(tmp_path / 'w.safetensors', tensors, metadata)}"]).hash

    same = digest(a, b, **facts)
    assert same != load([]).hash
    assert same == digest(a, b, **dict(reversed(facts.items()))) == digest(b, a)
    for other in [(a,), (a, ("c", [3.0])), (a, ("b", [4.0])), (("a", [1.0]), ("b", [2.0, 3.0]))]:
        assert digest(*other) != same
    # Of a checkpoint, the averaged weights: a child starts from nothing else.
    ema = [(f"ema.{name}", values) for name, values in (a, b)]
    assert digest(*ema, ("model.a", [0.0]), ("rng", [0.5])) == same


def test_init_may_be_weights_in_bfloat16_which_numpy_cannot_read(tmp_path):
    path, hashes = tmp_path / "w.safetensors", set()
    for value in (1.0, 2.0):
        save_tensors({"a": torch.full((2, 3), value, dtype=torch.bfloat16)}, path)
        hashes.add(load([f"init={path}"]).hash)
    assert len(hashes) == 2


def test_a_path_may_hold_what_means_something_to_hydra():
    letters = ["/tmp/\u65e5\u672c", "~someone/x", "f(x)", "{a", "[1,2", "a;b&c!"]
    quotes = ['a"b', "a b'c", "back\\'slash", "end\\", "\u00e4,b", "k=v"]
    for name in [*letters, *quotes]:
        assert load([f"paths.runs={name}"]).paths.runs == name, name
    assert load(["paths.runs='a,b'"]).paths.runs == "a,b"


# --- mistakes: typed ones are in tests/data/invalid_inputs.tsv---------------------------------------------------


def test_saved_config_of_another_version_is_refused_by_key():
    values = load([]).to_dict()
    with pytest.raises(ConfigError, match="unknown key colour"):
        Config.from_dict({**values, "colour": 1})
    del values["route"]
    assert Config.from_dict(values).route == "none"
    values["routing"]["route"] = "1-2"
    with pytest.raises(ConfigError, match="routing.route=1-2: expected route=1-2 at the top level"):
        Config.from_dict(values)
    assert Config.from_dict({**values, "route": "1-2"}).route == "1-2"
    del values["routing"]["route"]
    del values["sampler"]
    with pytest.raises(ConfigError, match="missing key sampler"):
        Config.from_dict(values)


# --- the command -----------------------------------------------------------------------------------------------


def test_help_works_from_anywhere_and_lists_groups_keys_and_routes(tmp_path):
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.strip() == help_text().strip() and len(done.stdout.splitlines()) <= 56
    for section in ("", *SECTIONS, *GROUPS, "data=latents", "route=2-8", "mamba"):
        assert help_text(section), section
    assert help_text("mamba") == help_text("backbone=mamba") and "train.steps=3000" in help_text("train")
    with pytest.raises(UserError, match="did you mean route"):
        help_text("rout")
    with pytest.raises(UserError, match="--help data=nope: expected one of digits"):
        help_text("data=nope")


TORCH_FREE = """
import sys
sys.path.insert(0, {root!r})
import routing, backbones, experiments, experiments.diffusion, sweeps, analysis
import routing.route, backbones.sizes, backbones.cost, experiments.config, experiments.config.help, experiments.training.dry_run
from experiments.config import load
config = load(["backbone=mamba", "route=2-8"])
assert config.name
experiments.config.help.help_text()
from experiments import bench, evaluate, export, sample
bench.main(["--help"])
for command in (evaluate, export, sample):
    command.parser().format_help()
config = load(["backbone=mamba", "route=2-8", "dry=true"])
experiments.training.dry_run.dry_run(config)
loaded = [name for name in ("torch", "accelerate", "timm", "pandas", "matplotlib") if name in sys.modules]
assert not loaded, loaded
"""


def test_help_config_and_cost_import_no_torch():
    subprocess.run([sys.executable, "-c", TORCH_FREE.format(root=str(ROOT))], check=True, timeout=120)


def test_dry_run_prints_what_would_be_trained_and_writes_nothing(tmp_path):
    parts = (
        "model       rwkv-T/4", "MACs per image dense ->", "0 1 [2 3 4 5 6 7 8] 9 10 11", "64 -> 32 in routed blocks",
        "trains      3000 steps of 16 on mnist", "eval=mnist", "memory", "compute     ", "nothing was trained", "dry=full",
    )  # fmt: skip
    done = run("backbone=rwkv", "route=2-8", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10 and all(p in line for p, line in zip(parts, lines, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_a_model_that_does_not_fit_here_warns_and_prints_the_rest(tmp_path, capsys):
    words = ["backbone.width=16384", "backbone.depth=256", f"paths.runs={tmp_path}"]
    assert main([*words, "dry=true"]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"cost", "memory", "run"} < {*lines} and lines[-1] == "warning"
    with pytest.raises(UserError, match="GB of memory"):  # it would build the model
        main([*words, "dry=full"])


def test_a_dry_run_names_what_is_not_the_default(tmp_path, capsys, monkeypatch):
    assert main(["route=0-4+6-9@0.75", f"paths.runs={tmp_path}", "dry=true"]) == 0
    printed = capsys.readouterr().out
    assert "[0 1 2 3 4] 5 [6 7 8 9] 10 11 " in printed and "64 -> 32 and 16 in routed" in printed
    monkeypatch.setattr("experiments.training.precision.has_bf16", lambda device: True)
    words = ["experiment=jit", "train.precision=auto", "train.optimizer=muon", "train.muon_lr=0.01"]
    assert main([*words, "train.encoder=ema", f"paths.runs={tmp_path}", "dry=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("flow with x-prediction, lr 0.002, precision auto (bf16 here)") for line in lines)
    assert any(re.match(r"optimizer +Muon \(lr 0.01\)", line) for line in lines)
    assert any(re.match(r"SRA +block 3 to block 7 of the EMA, weight 0.5", line) for line in lines)


def test_a_full_dry_run_builds_the_parts_loads_a_weaker_model_and_times_a_step(tmp_path, capsys):
    weak = ROOT / "results" / "models" / "mamba_2-8.safetensors"
    words = ["backbone=mamba", "backbone.depth=4", "train.batch=2", "route=1-2", "dry=full", f"paths.runs={tmp_path}"]
    assert main([*words, "guidance=autoguidance", f"guidance.checkpoint={weak}"]) == 0
    out = capsys.readouterr().out
    assert "from a timed step" in out and "route: 1-2" in out
    assert "kernel " in out and "native is for CPUs" not in out
    with pytest.raises(UserError, match="guidance=cfg needs a model with classes"):
        main([*words, "task=none"])


def test_waiting_threads_spin_briefly_beside_others(monkeypatch):
    cases = [
        ({}, [3.0, 40.0], "10000"),  # nobody else is at work
        ({}, [90.0, 0.0], "1000"),
        ({"LOCAL_WORLD_SIZE": "2"}, [0.0, 0.0], "1000"),
        ({"GOMP_SPINCOUNT": "7"}, [0.0, 0.0], "7"),
    ]
    for name in ("LOCAL_WORLD_SIZE", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for environment, percent, spins in cases:
        with monkeypatch.context() as patch:
            patch.setattr(psutil, "cpu_percent", lambda *_, percent=percent, **__: percent)
            patch.setattr(cli, "_SPIN_VARIABLES", {})
            patch.setattr(os, "environ", {**os.environ, **environment})
            cli.choose_spinning()
            assert os.environ.get("GOMP_SPINCOUNT") == spins, environment


def test_a_foreign_package_of_our_name_is_noticed(tmp_path):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "__init__.py").write_text("")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "from experiments.runtime.command import run_command\nsys.exit(run_command(lambda argv: 0, []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'sweeps'" in done.stderr and "fresh environment" in done.stderr


def test_hydras_multirun_of_dry_runs_trains_nothing(tmp_path):
    words = ("backbone=dit", "seed=0,1", "size=T/1", "dry=true", "paths.runs=~/my runs")
    done = run("-m", *words, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path / "home")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nothing was trained") == 2
    assert not list(tmp_path.iterdir()), "no folder named ~, nor any other"


@pytest.mark.slow
def test_a_signal_ends_the_whole_multirun_and_a_failure_only_its_own_run(tmp_path):
    small = [*overrides(tmp_path / "runs", "train.steps=100000", "train.save_every=100000")]
    call = [*command("-m", *small), "seed=0,1"]
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list((tmp_path / "runs").glob("*/status.json")):
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "run the same command again to resume" in errors
    assert len(list((tmp_path / "runs").glob("*/status.json"))) == 1
    words = overrides(tmp_path / "two", "train.steps=3", "train.max_bad_steps=1", "train.log_every=1")
    done = run("-m", *words, "train.lr=1e30,1e-3", "train.clip=1e30", cwd=tmp_path)
    assert done.returncode == 2 and "1 of the runs failed" in done.stderr, done.stderr
    assert "\n-m: 1 of 2 runs are done, in " in done.stdout and "; not done: dit" in done.stdout
    assert len(list((tmp_path / "two").glob("*/summary.json"))) == 1
