"""The training loop: what a run leaves, resumes, skips and refuses."""

import errno
import math
import os
import signal
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from data_tools import latents, write_store
from small import small
from training_runs import after_each_step, equal_tensors, make_run, perturbed, weights

from experiments.config.model import run_cost
from experiments.data.latent_store import LatentStore
from experiments.evaluation.guided_denoiser import GuidedDenoiser
from experiments.evaluation.pictures import save_png
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.trained_model import load_model
from experiments.runtime import memory, records, run_folder, signals
from experiments.runtime.command import run_command
from experiments.runtime.errors import Interrupted
from experiments.training import run_evaluation
from experiments.training.divergence import Diverged
from experiments.training.loop import Trainer
from experiments.training.metrics import Averages
from experiments.training.run_evaluation import Evaluation
from experiments.training.session import train
from experiments.training.step import TrainingStep
from experiments.training.summary import read_summary
from routing.errors import UserError

FINAL = "train.final_samples=true"  # which `small` leaves out


def spoil(monkeypatch, is_bad, value=float("nan")):
    """Multiply the loss by `value` in steps where `is_bad(state)`."""
    honest = TrainingStep.loss

    def loss(self, micro_batch):
        return honest(self, micro_batch) * (value if is_bad(self.state) else 1.0)

    monkeypatch.setattr(TrainingStep, "loss", loss)


def test_a_run_leaves_the_files_it_promises(tmp_path):
    config = small(tmp_path, "backbone=mamba", "route=1-2", "train.sample_every=3", FINAL)
    folder = train(config, quiet=True)
    assert folder == config.folder
    for name in ("config.yaml", "env.json", "metrics.jsonl", "summary.json", "status.json", "model.safetensors",
                 "loss.png", "progress.gif", "samples/final.png", "samples/step-00000003.png"):  # fmt: skip
        assert (folder / name).is_file(), name
    summary = read_summary(folder)
    assert (summary["status"], summary["step"], summary["route"]) == ("done", 6, "1-2")
    assert summary["macs_routed"] < summary["macs_dense"]
    lines = records.read_jsonl(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["macs"] == 6 * 8 * summary["macs_routed"]
    loaded = load_model(folder)
    assert loaded.step == 6 and loaded.config == config
    assert equal_tensors(loaded.model.state_dict(), weights(folder))


def test_the_same_command_again_says_done_and_more_steps_go_on(tmp_path, monkeypatch):
    first = train(small(tmp_path, "route=1-2"), quiet=True)
    before = {path: path.stat().st_mtime_ns for path in first.iterdir() if path.name not in ("status.json", "lock")}
    assert train(small(tmp_path, "route=1-2"), quiet=True) == first
    longer = small(tmp_path, "route=1-2", "train.steps=9")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="log=wandb"):
        refuse = Mock(side_effect=UserError("log=wandb did not start"))
        patch.setattr("experiments.training.session.open_tracker", refuse)
        train(longer, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert train(longer, quiet=True) == first
    assert read_summary(first)["step"] == 9
    straight = train(small(tmp_path / "straight", "route=1-2", "train.steps=9"), quiet=True)
    assert equal_tensors(weights(first), weights(straight))
    # Fewer steps than are saved end with what belongs to the step there is.
    (first / "summary.json").unlink()  # as if it had been stopped at its ninth step of many
    train(small(tmp_path, "route=1-2", "train.steps=3", FINAL), quiet=True)
    assert read_summary(first)["step"] == 9 and (first / "samples" / "final.png").is_file()


def test_a_run_without_final_samples_is_the_same_run_and_draws_nothing(tmp_path):
    config = small(tmp_path, "train.final_samples=false")
    assert config.name == small(tmp_path, FINAL).name
    folder = train(config, quiet=True)
    assert read_summary(folder)["step"] == 6
    assert not (folder / "samples").exists() and not (folder / "progress.gif").exists()
    assert train(config, quiet=True) == folder  # finished, though there are no samples
    train(small(tmp_path, FINAL, "train.steps=7"), quiet=True)
    assert (folder / "samples" / "final.png").is_file()
    train(small(tmp_path, "train.steps=8", "train.final_samples=false"), quiet=True)
    assert not (folder / "samples" / "final.png").exists()  # the picture of step 7


def test_pictures_of_fewer_steps_are_made_anew_after_a_kill_between_two_of_more(tmp_path, monkeypatch):
    folder = train(small(tmp_path, FINAL), quiet=True)
    names = ("samples/final.png", "progress.gif")
    before = [(folder / name).read_bytes() for name in names]

    def kill(picture, path):
        if path.name == "final.png":
            raise KeyboardInterrupt
        save_png(picture, path)

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("experiments.training.run_evaluation.save_png", kill)
        train(small(tmp_path, FINAL, "train.steps=9"), quiet=True)
    train(small(tmp_path, FINAL, "train.steps=9"), quiet=True)
    assert (folder / "samples" / "step-00000009.png").is_file()
    for name, old in zip(names, before, strict=True):
        assert (folder / name).read_bytes() != old, name


def test_micro_batch_auto_takes_all_where_it_fits_and_less_where_not(tmp_path, monkeypatch, capsys):
    config = small(tmp_path, "train.micro_batch=auto")
    assert make_run(config).training_step.micro_batch_size == 8
    cost = run_cost(config)
    monkeypatch.setattr(memory, "available_memory", lambda: int(cost.training_bytes(3) / 0.8))
    assert make_run(config).training_step.micro_batch_size == 2
    train(config)
    assert "micro-batch 2: the largest that fits; 8 samples are accumulated" in capsys.readouterr().out


def test_a_batch_that_micro_batches_do_not_divide_has_the_mean_of_its_samples(tmp_path):
    sums = []
    for micro_batch in (5, 2):
        run = make_run(small(tmp_path, "train.batch=5", f"train.micro_batch={micro_batch}", "train.clip=1e9"))
        run.model.train()
        perturbed(run).training_step.run()
        sums.append(run.state.tally.values)
    torch.testing.assert_close(*sums, rtol=1e-5, atol=0)


def test_routes_share_initialisation_data_and_noise(tmp_path):
    dense, routed = make_run(small(tmp_path)), make_run(small(tmp_path, "route=1-2"))
    assert equal_tensors(dense.model.state_dict(), routed.model.state_dict())
    one, other = (next(run.training_step.micro_batches()) for run in (dense, routed))
    assert torch.equal(one.batch.x, other.batch.x) and (one.routing is None) and other.routing is not None
    assert torch.equal(one.draws.uniform("noise", 9), other.draws.uniform("noise", 9))


def test_a_non_finite_step_is_skipped_and_counted(tmp_path, monkeypatch):
    run = make_run(small(tmp_path))
    run.model.train()
    spoil(monkeypatch, lambda state: state.step == 0)
    before = [p.detach().clone() for p in run.state.params]
    run.training_step.run()
    assert all(torch.equal(a, b) for a, b in zip(before, run.state.params, strict=True))
    assert run.state.tally.bad_steps == 1 and run.state.tally.bad_streak == 1
    run.state.step = 1
    run.training_step.run()
    run.training_step.run()
    assert not all(torch.equal(a, b) for a, b in zip(before, run.state.params, strict=True))
    assert run.state.tally.bad_steps == 1 and run.state.tally.bad_streak == 0


def test_a_line_of_metrics_has_the_means_of_its_steps(tmp_path):
    logs = []
    for every in (1, 4):
        folder = train(small(tmp_path / str(every), f"train.log_every={every}", "train.steps=4"), quiet=True)
        logs.append(records.read_jsonl(folder / "metrics.jsonl"))
    each, (mean,) = logs
    for key in ("loss", "grad_norm"):
        assert mean[key] == pytest.approx(sum(line[key] for line in each) / 4, rel=1e-6)


def test_the_time_left_is_that_of_the_steps_left_and_the_running_mean_moves_by_a_tenth(tmp_path):
    run = make_run(small(tmp_path))
    run.folder.mkdir()
    for run.state.step, loss in ((4, 1.0), (6, 2.0)):
        averages = Averages(loss, 1.0, 0, 0)
        run.metrics.write(averages, run.console.progress("step", 6), step_seconds=100.0, evaluation_seconds=7.0)
        status = run_folder.read(run.folder / "status.json")
        assert status["eta_s"] == (6 - status["step"]) * 100 + 7
    assert run.state.mean_loss == pytest.approx(1.1)


def test_the_speed_counts_neither_kernel_builds_nor_evaluations(tmp_path, monkeypatch):
    steps, step, evaluate = [], TrainingStep.run, Evaluation.run_due

    def slow_at_first(self):
        steps.append(0)
        time.sleep(2.0 if len(steps) == 1 else 0.0)
        step(self)

    monkeypatch.setattr(TrainingStep, "run", slow_at_first)
    monkeypatch.setattr(Evaluation, "run_due", lambda self: (time.sleep(2.0), evaluate(self)))
    folder = train(small(tmp_path, "train.sample_every=2"), quiet=True)
    lines = records.read_metrics(folder)
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all(line["images_per_s"] > 8 for line in lines), "eight images a step, of which each takes under a second"


@pytest.mark.parametrize(
    ("encoder", "losses", "spikes"),
    [
        ("none", (0.5, 0.6, 2.5), 1),
        ("random", (-0.3, -0.4, -0.35), 0),  # REPA's cosines take 2 off
        ("random", (-1.9, -1.9, -1.0), 1),
    ],
)
def test_a_spike_is_seen_above_the_least_loss_there_is(encoder, losses, spikes, tmp_path):
    run = make_run(small(tmp_path, f"train.encoder={encoder}", "train.align_weight=2"))
    run.state.step = 1
    for loss in losses:
        run.state.tally.values[:3] = torch.tensor([loss, 1.0, 1.0])
        run.report(run.console.progress("step", 9))
    assert run.state.spikes == spikes


def test_the_time_left_counts_previews_a_final_picture_and_scores(tmp_path):
    """By hand: 10 classes, 4 previews a class by 5 Euler steps, 8 final pictures a class, 40 scored samples."""
    words = [FINAL, "train.steps=30", "train.sample_every=10", "eval=digits", "eval.every=15", "eval.samples=40"]
    words += ["eval.metrics=[fd,heldout_loss]", "sampler=heun", "sampler.steps=5", "guidance=none"]
    run = make_run(small(tmp_path, *words))
    evaluation, run.state.step = run.evaluation, 1
    macs = SamplingPipeline.make(run.model, run.config).cost().macs / 9  # of one pass
    preview, final, scores = 40 * 5 * macs, 80 * 9 * macs, 40 * 9 * macs + 2 * 1000 * macs
    # Previews and scores at steps 10 and 20, and 15; all after the last step. A third of a training step's time.
    expected = (3 * preview + final + 2 * scores) * 3e-9 / 3
    assert evaluation.seconds_left(3e-9) == pytest.approx(expected)
    evaluation.seconds["preview"] += [1.0, 3.0]
    assert evaluation.seconds_left(3e-9) == pytest.approx(3 * 2.0 + (final + 2 * scores) * 1e-9)


def test_a_run_that_diverges_stops_and_says_where(tmp_path, monkeypatch):
    spoil(monkeypatch, lambda state: state.step >= 4, float("inf"))
    config = small(tmp_path, "train.steps=20", "train.max_bad_steps=3")
    with pytest.raises(Diverged, match=r"step 8: .*steps in a row.*times .* samples .*step-0000000"):
        train(config, quiet=True)


@pytest.mark.filterwarnings("ignore:.* is not finite:UserWarning")
def test_data_that_are_not_finite_are_named_and_not_the_learning_rate(tmp_path, monkeypatch):
    # Of a large store only some rows are looked at when it is opened.
    monkeypatch.setattr(LatentStore, "check_finite", lambda *_: None)
    arrays = latents(12)
    arrays[3:] = float("nan")
    store = write_store(tmp_path / "store", arrays)
    words = ["data=latents", f"data.path={store}", "task=none", "size=T/2", "guidance=none", "train.label_drop=0"]
    with pytest.raises(Diverged, match="the data hold NaN") as caught:
        train(small(tmp_path, *words, "train.steps=20", "train.max_bad_steps=3"), quiet=True)
    assert "train.lr" not in str(caught.value)


@pytest.mark.parametrize("keep", [1, 9])
def test_roll_back_goes_to_before_the_first_bad_step_with_other_numbers(keep, tmp_path, monkeypatch):
    taken = []

    def is_bad(state):
        taken.append((state.rollbacks, state.step))
        return state.step == 1 or (state.rollbacks == 0 and state.step >= 4)

    spoil(monkeypatch, is_bad)
    words = ["train.max_bad_steps=2", "train.rollback=1", "train.save_every=1", f"train.keep={keep}"]
    config = small(tmp_path, "train.steps=9", *words)
    train(config, quiet=True)
    # Steps 4 to 6 (counted from 0) were bad and saved as 5 to 7; step 4 is the last before them.
    assert (1, 4) in taken and (1, 3) not in taken
    summary = read_summary(config.folder)
    assert (summary["step"], summary["skipped"]) == (9, 1), "the bad step before stays counted"
    steps = [line["step"] for line in records.read_jsonl(config.folder / "metrics.jsonl")]
    assert steps == sorted(set(steps)), "the abandoned branch leaves no lines"


@pytest.mark.parametrize("first_has_scores", [True, False])
def test_the_first_process_decides_whether_a_step_is_scored(first_has_scores, tmp_path, monkeypatch):
    """Another process sees the opposite in scores.jsonl; it joins and cuts nothing by itself."""
    run = make_run(small(tmp_path, "eval=digits", "eval.samples=10"))
    run.state.step = 6
    path = run.folder / "scores.jsonl"
    run.folder.mkdir()
    if not first_has_scores:
        records.append_jsonl(path, [{"step": 6, "metric": "fd", "value": 1.0, "of": 2}])
    before = path.read_bytes() if path.is_file() else None
    scored = []
    second = SimpleNamespace(is_main_process=False, device="cpu")
    second.gather = lambda value: torch.cat([torch.tensor([first_has_scores]), value])
    monkeypatch.setattr(run.evaluation, "accelerator", second)
    monkeypatch.setattr(run_evaluation, "score", lambda *_, **__: scored.append(True) or [])
    assert run.evaluation._scores() is not first_has_scores
    assert bool(scored) is not first_has_scores
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_roll_back_in_the_last_step_is_not_the_end(tmp_path, monkeypatch):
    spoil(monkeypatch, lambda state: state.rollbacks == 0 and state.step >= 4)
    evaluated = []
    monkeypatch.setattr(Trainer, "evaluate", lambda self, *_: evaluated.append(self.state.step))
    words = ["train.max_bad_steps=1", "train.rollback=1", "train.save_every=2", "train.log_every=6"]
    run = make_run(small(tmp_path, "train.steps=6", *words))
    run.folder.mkdir()
    run.fit()
    assert evaluated == [6] and run.state.step == 6 and run.state.rollbacks == 1
    assert run_folder.saved_step(run.folder) == 6


def test_a_signal_in_an_evaluation_saves_its_step(tmp_path, monkeypatch):
    words = (FINAL, "train.save_every=100", "train.sample_every=4", "train.log_every=1")
    straight = train(small(tmp_path / "a", *words), quiet=True)
    config, honest = small(tmp_path / "b", *words), GuidedDenoiser.__call__

    def signalled(self, *args):
        monkeypatch.setattr(signals.STATE, "reason", "SIGUSR2")
        return honest(self, *args)

    monkeypatch.setattr(GuidedDenoiser, "__call__", signalled)
    with pytest.raises(Interrupted) as stop:
        train(config, quiet=True)
    assert (stop.value.reason, stop.value.step) == ("SIGUSR2", 4)
    assert not list((config.folder / "samples").glob("*.png"))
    monkeypatch.setattr(GuidedDenoiser, "__call__", honest)
    train(config, quiet=True)
    assert equal_tensors(weights(config.folder), weights(straight))
    for name in ("step-00000004.png", "final.png"):
        picture = [(folder / "samples" / name).read_bytes() for folder in (straight, config.folder)]
        assert picture[0] == picture[1]


def test_ctrl_c_twice_leaves_a_run_that_was_stopped_and_has_not_failed(tmp_path, monkeypatch):
    def twice(self):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    monkeypatch.setattr(signals.STATE, "reason", None)  # and again after the test
    monkeypatch.setattr(TrainingStep, "run", twice)
    config = small(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(config, quiet=True)
    assert run_folder.read(config.folder / "status.json")["status"] == "stopped"


@pytest.mark.parametrize("code, part", [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "cannot be used")])
def test_a_disk_that_refuses_is_one_sentence_and_the_heartbeat_says_failed(tmp_path, monkeypatch, capsys, code, part):
    def full(path, entries):
        monkeypatch.setattr("experiments.runtime.records.atomic_write", refuse)
        raise OSError(code, os.strerror(code), *([] if code == errno.ENOSPC else [str(path)]))

    def refuse(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("experiments.runtime.records.append_jsonl", full)
    config = small(tmp_path)
    assert run_command(lambda _: train(config, quiet=True) and 0, []) == 2
    said = capsys.readouterr().err
    assert part in said and said.count("\n") == 1
    assert run_folder.read(config.folder / "status.json")["status"] == "failed"


def test_a_signal_saves_and_the_same_command_goes_on_bit_for_bit(tmp_path, monkeypatch):
    words = ("route=1-2", "train.save_every=100", "train.steps=7")
    config = small(tmp_path / "a", *words)

    def interrupt(step):
        if step.state.step == 4:
            monkeypatch.setattr(signals.STATE, "reason", "SIGUSR2")

    with monkeypatch.context() as patch, pytest.raises(Interrupted) as stop:
        after_each_step(patch, interrupt)
        train(config, quiet=True)
    assert (stop.value.reason, stop.value.step) == ("SIGUSR2", 5)
    assert run_folder.read(config.folder / "status.json")["status"] == "preempted"
    train(config, quiet=True)
    straight = train(small(tmp_path / "b", *words), quiet=True)
    assert equal_tensors(weights(config.folder), weights(straight))
    logs = []
    for folder in (config.folder, straight):
        lines = records.read_jsonl(folder / "metrics.jsonl")
        logs.append([{k: v for k, v in line.items() if k not in ("time", "images_per_s")} for line in lines])
    assert logs[0] == logs[1]


def test_init_loads_the_parents_ema_and_is_another_run(tmp_path):
    parent = train(small(tmp_path), quiet=True)
    child = small(tmp_path, f"init={parent}", "train.steps=1")
    assert child.folder != parent
    run = make_run(child)
    run.state.start_from(child, print)
    expected = weights(parent)
    assert all(torch.equal(p.detach(), expected[n]) for n, p in zip(run.state.names, run.state.params, strict=True))
    wrong = small(tmp_path, f"init={parent}", "backbone.width=48")
    with pytest.raises(ValueError, match="does not fit"):
        make_run(wrong).state.start_from(wrong, print)
