"""Plans: checked cells, names, coinciding cells, budgets, cost; resources."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from slurm_lab import make_run, yaml_grid
from small import ROOT

from experiments.config import load
from experiments.config.model import route_macs
from experiments.runtime.console import big
from experiments.runtime.files import atomic_write
from sweeps import SweepError
from sweeps import command as sweeps_command
from sweeps.jobs import sbatch_script
from sweeps.plan import cost, dependencies, grid, plan, resources
from sweeps.store import overrides, resource_options
from sweeps.store.folder import Sweep
from sweeps.store.planned_run import PlannedRun
from sweeps.submission.live_jobs import LiveJobs


def planned(tmp_path, *words, way="steps", **raw):
    user = overrides.parse([f"paths.runs={tmp_path / 'runs'}", *words])
    return plan.make_plan(yaml_grid(tmp_path, **raw), compare_at=way, user=user)


def finish(folder, step=5):
    """Write what a finished run leaves in its folder."""
    atomic_write(Path(folder) / "summary.json", json.dumps({"status": "done", "step": step}))
    return Path(folder)


def test_a_route_that_does_not_fit_is_left_out(tmp_path):
    grid_plan = planned(tmp_path, fits=["route"], axes={"route": ["2-8", "2-20"]})
    assert len(grid_plan.runs) == 1 and grid_plan.left_out[0][0] == "route=2-20 seed=0" and "12 blocks" in grid_plan.left_out[0][1]


@pytest.mark.slow
def test_lightningdits_row_of_the_main_table_wants_its_own_latents(tmp_path):
    from data_tools import latents, write_store

    stable = write_store(tmp_path / "s", latents(8, side=32), [0] * 8)
    words = [f"data.path={stable}", f"paths.runs={tmp_path / 'runs'}", "route=none"]
    grid_plan = plan.make_plan(grid.load("main_table"), "paper", overrides.parse(words))
    ((label, why),) = grid_plan.left_out
    assert "backbone=lightningdit" in label and "the latents in" in why and "4x32x32" in why
    assert len(grid_plan.runs) == 10 and not any("lightningdit" in run.name for run in grid_plan.runs)
    # Its own are not there yet: the row is planned at their shape, 256 tokens an image.
    grid_plan = plan.make_plan(grid.load("main_table"), "paper", overrides.parse(["backbone=lightningdit"]))
    config = grid_plan.configs[grid_plan.runs[0].name]
    assert 50e18 < 6 * cost.training_macs(config) < 80e18


def test_dry_true_is_dry_run_and_full_adds_the_words(tmp_path, capsys, monkeypatch):
    words = ["launch", "relative_absolute", f"paths.runs={tmp_path / 'runs'}"]
    outputs = []
    for dry in ("--dry-run", "dry=true", "dry=full"):
        assert sweeps_command.main([*words, dry]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and "3 runs on cluster=slurm" in outputs[0]
    assert outputs[2].count("experiments.run:main") == 3 and "experiments.run:main" not in outputs[0]
    # On Slurm the run's own nodes count, not this machine: they may have GPUs, as many as asked for.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sweeps_command.main([*words, "dry=true", "train.graphs=true"]) == 0
    more = ["dry=true", "train.graphs=true", "cluster.tasks=3"]
    assert sweeps_command.main([*words, *more, "train.batch=66"]) == 0
    assert sweeps_command.main([*words, *more, "train.batch=64"]) == 2
    assert "expected a multiple of the 3 processes" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_stage_waits_for_its_parent(tmp_path):
    raw = {"base": {"train.steps": 5}, "stages": [
        {"name": "score", "of": "train", "command": "evaluate", "args": ["{parent}"], "axes": {"w": [1, 2]}}]}  # fmt: skip
    grid_plan = planned(tmp_path, **raw)
    parent, first, second = grid_plan.runs
    assert first.parent == second.parent == parent.name and first.args == [parent.folder, "w=1"]
    assert grid_plan.waiting == [("score: seed=0 w=1", parent.name), ("score: seed=0 w=2", parent.name)]
    folder = finish(parent.folder)
    grid_plan = planned(tmp_path, **raw)
    assert [run.name for run in grid_plan.runs[1:]] == [first.name, second.name]
    assert not grid_plan.waiting and [r.args for r in grid_plan.runs[1:]] == [[str(folder), "w=1"], [str(folder), "w=2"]]
    assert first.name != second.name
    # Quotes keep a comma that is typed, and are no part of what the command reads.
    raw["stages"][0] |= {"args": ["{parent}", "--guidance", "{w}"]}
    for typed in ("score:w='cfg,scale=2'", 'score:w="cfg,scale=2"'):
        assert planned(tmp_path, typed, **raw).runs[1].args == [str(folder), "--guidance", "cfg,scale=2"]
    # More steps are wanted than the parent has.
    assert len(planned(tmp_path, "train.steps=6", **raw).waiting) == 2


def chain(**stage):
    return {"base": {"train.steps": 5}, "stages": [
        {"name": "tune", "of": "train", "base": {"init": "{parent}", "train.steps": 2, **stage}},
        {"name": "score", "of": "tune", "command": "evaluate", "args": ["{parent}", "{out}"]}]}  # fmt: skip


def test_a_run_from_unknown_weights_is_checked_and_named_after_its_cell(tmp_path):
    grid_plan = planned(tmp_path, **chain())
    train, tune, score = grid_plan.runs
    assert [run.parent for run in grid_plan.runs] == ["", train.name, tune.name]
    assert [run.deferred for run in grid_plan.runs] == [False, True, True]
    assert 'init="{parent}"' in tune.args and "{parent}" in score.args[0]
    assert tune.name.startswith("tune-") and grid_plan.configs[tune.name].init is None
    assert PlannedRun(**json.loads(json.dumps(tune.__dict__))) == tune
    # The same names at the next launch, also with other steps and reports, which names of runs omit.
    names = [run.name for run in grid_plan.runs]
    for changes in ({"train.steps": 3}, {"train.log_every": 7}):
        assert [run.name for run in planned(tmp_path, **chain(**changes)).runs] == names
    assert planned(tmp_path, **chain(**{"train.lr": 1e-4})).runs[1].name != tune.name
    with pytest.raises(SweepError, match="train.batch"):
        planned(tmp_path, **chain(**{"train.batch": -1}))
    # Once its parent is done it keeps the name, and its folder is known.
    folder = finish(train.folder)
    save_file({"ema.w": np.ones(3, np.float32)}, folder / "model.safetensors")
    grid_plan = planned(tmp_path, **chain())
    _, tune, score = grid_plan.runs
    assert [run.name for run in grid_plan.runs] == names
    assert not tune.deferred and f"init={folder}" in tune.args and score.args[0] == tune.folder
    assert Path(tune.folder).name == grid_plan.configs[tune.name].name
    # Other weights of the parent: another folder.
    save_file({"ema.w": np.zeros(3, np.float32)}, folder / "model.safetensors")
    again = planned(tmp_path, **chain()).runs[1]
    assert again.name == tune.name and again.folder != tune.folder


def test_dependencies_of_slurm_are_one_task_for_weights_and_whole_arrays_for_tables(tmp_path):
    train, tune, _ = planned(tmp_path, **chain()).runs
    table = dataclasses.replace(train, name="table", after=[train.name, "other", "gone"])
    ids = {train.name: "7_3", "other": "7_1"}
    assert LiveJobs(ids).condition(train) == ""
    assert LiveJobs(ids).condition(tune) == "afterok:7_3"
    assert LiveJobs({}).condition(tune) == ""  # its parent is done
    # How a task that runs share ends says nothing about one of them.
    for shared in ({train.name}, {tune.name}):
        assert LiveJobs(ids, shared).condition(tune) == "afterany:7_3"
    assert LiveJobs(ids).condition(table) == "afterany:7"
    assert dependencies.levels([train, tune, table]) == [[train], [tune, table]]


def test_equal_flops_give_a_routed_run_more_steps_in_the_same_folder(tmp_path):
    raw = {"axes": {"route": ["none", "2-8"]}, "base": {"train.steps": 1000}}
    equal = planned(tmp_path, **raw)
    grid_plan = planned(tmp_path, way="flops", **raw)
    assert [r.name for r in grid_plan.runs] == [r.name for r in equal.runs]
    dense, routed = grid_plan.runs
    routed_cost = cost.run_cost(grid_plan.configs[routed.name])
    assert dense.steps == 1000 and routed.steps == round(1000 * routed_cost.speedup) > 1300
    macs = [cost.training_macs(grid_plan.configs[r.name]) for r in grid_plan.runs]
    assert abs(macs[0] - macs[1]) / macs[0] < 1e-3
    assert f"train.steps={routed.steps}" in routed.args


def test_the_cost_of_a_schedule_is_the_sum_over_its_steps(tmp_path):
    for words in ("route=2-8 routing.schedule=linear:0.2:0.9", "route=0-4/0.3:2-8", "route=2-8 routing.off_after=0.5"):
        config = load([*words.split(), "train.steps=10", "train.batch=3"])
        macs = [route_macs(config)(config.route_schedule.at(step / 10)) for step in range(10)]
        assert len(set(macs)) > 1 and cost.training_macs(config) == pytest.approx(3 * sum(macs), rel=1e-12)


@pytest.mark.parametrize("name", ["masking", pytest.param("repa", marks=pytest.mark.slow)])
def test_every_method_of_a_grid_meets_the_same_dense_run(name):
    grid_plan = plan.make_plan(grid.load(name), "tiny", compare_at="flops")
    macs = [cost.training_macs(grid_plan.configs[run.name]) for run in grid_plan.runs]
    dense = grid_plan.runs[0]
    assert grid_plan.configs[dense.name].resolved_route == "none"
    # MaskDiT's decoder and v1's loss are the method's own: no run has them without the method.
    assert dense.steps == grid_plan.configs[dense.name].train.steps
    assert max(macs) / min(macs) < 1.002


def test_the_estimate_prints_every_run_and_the_sum(tmp_path, monkeypatch):
    grid_plan = planned(tmp_path, axes={"route": ["none", "2-8"]})
    place = resources.load("slurm", "tiny", {"tflops": "0.5"})
    lines = cost.estimate(grid_plan.runs, grid_plan.configs, place.tflops)
    assert len(lines) == 3 and "3000 steps" in lines[0] and "fewer per image than dense" in lines[1]
    config = grid_plan.configs[grid_plan.runs[0].name]
    flops = 6 * cost.run_cost(config).macs_dense * 3000 * 16
    assert big(flops) + " FLOPs" in lines[0] and f"{flops / 0.5e12 / 3600:.3g} GPU hours" in lines[0]
    monkeypatch.setattr(cost, "visible_gpus", list)
    assert "CPU hours at 0.5 TFLOP/s" in cost.estimate(grid_plan.runs, grid_plan.configs, place.tflops, "local")[0]


# --- resources -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("0:30:30", 31), ("2-00:00:00", 2880), ("1-12", 2160), ("5:30", 6), ("4:30:00", 270)],
)
def test_times_are_read_as_by_slurm_and_need_no_quotes(text, minutes, tmp_path):
    """YAML 1.1 would read a bare 4:30:00 as a number of base sixty."""
    path = tmp_path / "r.yaml"
    path.write_text(f"kind: slurm\nsignal_s: 10\ntime: 7\nscales: {{tiny: {{time: {text}}}}}\n")
    assert resource_options.minutes(resources.load(str(path), "tiny").time) == minutes
    assert resource_options.minutes(resources.load(str(path), "small").time) == 7


@pytest.mark.parametrize("text", ["0123", "1_000", "1e5", "12:30", "no", "7"])
def test_texts_for_sbatch_are_what_the_file_or_the_command_line_says(text, tmp_path):
    """YAML 1.1 reads 0123 as 83, 1_000 as 1000 and no as false."""
    path = tmp_path / "r.yaml"
    path.write_text(f"kind: slurm\naccount: {text}\nextra: {{comment: {text}, begin: 2026-12-01}}\n")
    flags, _, _ = script(resources.load(str(path)))
    assert {f"--account={text}", f"--comment={text}", "--begin=2026-12-01"} <= set(flags)
    flags, _, _ = script(resources.load("slurm", "tiny", {"extra": f"{{nice: {text}}}", "account": text}))
    assert {f"--account={text}", f"--nice={text}"} <= set(flags)


def script(place, runs=4):
    """The script of a batch: its sbatch options, its lines before srun, and srun's."""
    text = sbatch_script.script(Sweep(Path("/runs"), "g"), place, runs)
    flags = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    head, _, rest = text.partition("# command\n")
    return flags, head.partition("# setup\n")[2].split("\n")[:-2], rest.split("\n")[1]


def test_a_folder_whose_name_slurm_would_replace_is_refused():
    with pytest.raises(SweepError, match="replaces % and .* paths.runs=FOLDER"):
        sbatch_script.script(Sweep(Path("/100%j"), "g"), resources.load("slurm"), 1)


@pytest.mark.parametrize(
    ("values", "has", "lacks"),
    [
        ({"gpus": "a100:2"}, ["--gpus-per-node=a100:2"], []),
        ({"gpus": 2, "extra": {"gres": "gpu:a100:2"}}, ["--gres=gpu:a100:2"], ["--gpus-per-node"]),
        ({"gpus": "a100:0"}, [], ["--gpus"]),
        ({"memory_gb": 4, "extra": {"mem-per-gpu": "8G"}}, ["--mem-per-gpu=8G"], ["--mem="]),
        ({"cpus": 4, "extra": {"cpus-per-gpu": 8}}, ["--cpus-per-gpu=8"], ["--cpus-per-task"]),
        ({"extra": {"exclusive": True, "hold": False, "reservation": None}}, ["--exclusive"], ["--hold", "--res"]),
        ({"extra": {"dependency": "afterok:1?afterok:2"}}, ["--dependency='afterok:1?afterok:2'"], []),
    ],
)  # fmt: skip
def test_what_is_asked_for_in_the_sites_own_way_is_asked_for_once(tmp_path, values, has, lacks):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({"kind": "slurm", **values}))
    flags, _, _ = script(resources.load(str(path)))
    assert set(has) <= set(flags) and not [f for f in flags for word in lacks if f.startswith(word)]


def test_a_script_asks_for_what_the_resources_say():
    keys = {"account": "me", "qos": "long", "constraint": "h100", "nodes": "2", "tasks": "4", "throttle": "3"}
    keys |= {"python": "env A=1 python", "extra": "{mail-type: END}"}
    keys |= {"setup": "[module load cuda/12.4, \"export A='b: c'\"]"}
    flags, setup, command = script(resources.load("slurm", "paper", keys), 5)
    expected = {
        "--account=me", "--qos=long", "--constraint=h100", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4",
        "--array=0-4%3", "--time=2880", "--signal=USR2@300", "--requeue", "--mail-type=END", "--open-mode=append",
        "--chdir=/runs/.sweeps/g/launches/LAUNCH/code", "--mem=245760M",
    }  # fmt: skip
    assert expected - set(flags) == set()
    assert setup == ["module load cuda/12.4", "export A='b: c'"]
    assert "--kill-on-bad-exit=1" in command
    assert command.endswith(" env A=1 python -u -m submitit.core._submit /runs/.sweeps/g/launches/LAUNCH")


def test_planning_and_looking_import_no_torch(tmp_path):
    finish(tmp_path / "r", 10)
    Sweep(tmp_path, "one").add("One", [make_run(tmp_path)])
    code = (
        "import sys\n"
        "from sweeps.command import main\n"
        f"root = 'paths.runs={tmp_path}'\n"
        "for words in (['status', 'one'], ['status'], ['list'], ['cancel', 'one']):\n"
        "    assert main([*words, root]) == 0\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'submitit', 'optuna'} & set(sys.modules)\n"
        "assert main(['show', 'relative_absolute', root]) == 0\n"
        "assert main(['launch', 'route_placement', '--dry-run', root]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "1 done" in done.stdout and "nothing is in the queue or running" in done.stdout
    assert "dit-T4-mnist_4-16_s0" in done.stdout and "3 runs at scale tiny" in done.stdout
    assert "#SBATCH --array=0-16%16" in done.stdout
