"""One start of a training run: lock, resume, banner, the loop, the files it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from backbones import Cost
from experiments import components as build
from experiments.config.routes import banner_lines
from experiments.config.schema import Config
from experiments.evaluation import scoring
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.preflight import check_ready
from experiments.runtime import console as log
from experiments.runtime import run_folder, signals
from experiments.runtime.command import ROOT, Interrupted
from experiments.runtime.files import atomic_write, code_commit, locked
from experiments.runtime.parsing import is_number
from experiments.training import checkpoint
from experiments.training import run_evaluation as evaluation
from experiments.training.loop import Trainer
from experiments.training.precision import record_precision, slow_bf16
from experiments.training.state import TrainingState

_PACKAGES = (
    "torch", "numpy", "timm", "accelerate", "hydra-core", "mamba-ssm", "causal-conv1d", "fla-core",
    "triton",
)  # fmt: skip
_COSTS = (
    "params", "macs_dense", "macs_routed", "macs_dense_no_attention", "macs_routed_no_attention",
)  # fmt: skip


def train(config: Config, *, quiet: bool = False) -> Path:
    """Train a checked `config`, or go on where an earlier start stopped; return the run folder.

    Raises:
        UserError: Anything a user can mend, in one sentence.
        Interrupted: Stopped by a signal, after saving.
    """
    accelerator = build.make_accelerator(config)
    console = log.Console(quiet or not accelerator.is_main_process)
    folder, steps = config.folder, config.train.steps
    summary = read_summary(folder)
    if summary is not None and (done := summary["step"]) >= steps:
        console.say(
            f"done already: {folder} has {done} steps; train.steps={2 * done} would go on from "
            "there"
        )
        show_results(console, folder)
        return folder
    check_ready(config, accelerator.num_processes, accelerator.device.type == "cuda")
    with signals.installed():
        if not accelerator.is_main_process:
            _session(config, accelerator, console)
            return folder
        with locked(folder):
            try:
                _session(config, accelerator, console)
            except Interrupted as stop:
                status = "stopped" if stop.reason == "SIGINT" else "preempted"
                _write_end(folder, status, step=stop.step, steps=steps, error=stop.reason)
                text = f"{stop.reason}: saved step {stop.step}; type the same command to go on"
                raise Interrupted(stop.reason, stop.step, text) from None
            except KeyboardInterrupt:
                _write_end(folder, "stopped", steps=steps, error="SIGINT")
                raise
            except run_folder.RunFolderError:
                raise
            except BaseException as error:
                if run_folder.is_lost(folder):  # whatever failed, this is why
                    raise run_folder.lost(folder) from error
                last = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
                try:
                    _write_end(folder, "failed", error=last, steps=steps)
                except OSError:
                    # On a full disk a second file has no room, and the heartbeat room of its own.
                    known = run_folder.read(folder / "status.json") | {"status": "failed"}
                    with contextlib.suppress(OSError):
                        (folder / "status.json").write_text(json.dumps(known))
                raise
    return folder


def _write_end(folder: Path, status: str, **fields: Any) -> None:
    """Write the last heartbeat of a run, unless its folder is gone: this would make it again."""
    if not run_folder.is_lost(folder):
        log.write_status(folder, status, **fields)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return what a finished run says of itself, or None: it is not done, or that is damaged."""
    told = run_folder.read(folder / "summary.json")
    scores, wall = told.get("scores"), told.get("wall_s")
    good = told.get("status") == "done" and isinstance(told.get("name"), str)
    good = good and type(told.get("step")) is int and is_number(wall) and wall >= 0
    good = good and isinstance(scores, dict) and all(map(is_number, scores.values()))
    good = good and all(is_number(told.get(key) or 0) for key in ("loss", "images_per_s"))
    return told if good else None


def _session(config: Config, accelerator: Any, console: log.Console) -> None:
    began, folder, steps = time.monotonic(), config.folder, config.train.steps
    trainer = Trainer(config, accelerator, console)
    state = trainer.state
    resumed = trainer.resume()
    if not resumed and config.init:
        state.start_from(config, console.say)
    if accelerator.is_main_process:
        log.write_status(folder, "running", step=state.step, steps=steps)
    console.say("\n".join(banner_lines(config, trainer.cost, trainer.model.describe())))
    about = f"resumed at step {state.step}" if resumed else "new; the same command resumes it"
    if config.init and not resumed:
        about += f"; weights from {config.init}"
    console.say(f"run         {folder}   ({about})")
    where, threads = f"{accelerator.num_processes} x {trainer.device.type}", torch.get_num_threads()
    mac = trainer.device.type == "cpu" and torch.backends.mps.is_available()
    other = "   (this Mac's GPU is untested: ACCELERATE_TORCH_DEVICE=mps tries it)" * mac
    plural = "s" * (threads > 1)
    auto = " (train.precision=auto)" * (config.train.precision == "auto")
    console.say(f"device      {where}, {threads} thread{plural}, {trainer.precision}{auto}{other}")
    if warning := slow_bf16(config, trainer.device):
        console.say(warning)
    console.say()
    # Guidance, sampler and what a score lacks (weights, a reference) are refused or said before
    # training, not after the last step.
    SamplingPipeline.make(trainer.model, config)
    if config.eval["name"] != "none" and state.step < steps:
        if trainer.dataset.can_decode:
            for note in scoring.check(config, trainer.dataset, trainer.device):
                console.once(note)
        else:  # there is still a model to train, and to score elsewhere
            console.say(f"no pictures and no scores in this run: {trainer.dataset.cannot_decode}")
    log.open_tracker(config.log, folder, config.name, config.to_dict(), accelerator)
    if accelerator.is_main_process:  # nothing is refused any more: a finished run may change
        (folder / "summary.json").unlink(missing_ok=True)
        log.cut_records(folder, state.step)
        atomic_write(folder / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
        atomic_write(folder / "env.json", json.dumps(environment(), indent=1))
        record_precision(config, trainer.precision)
        trainer.check_folder = partial(run_folder.check_present, folder)
    trainer.fit()
    if accelerator.is_main_process:
        trainer.check_folder()
        finish(config, state, trainer.cost, time.monotonic() - began, trainer.precision)
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:  # not `end_training`, which ends the process group too
        tracker.finish()
    show_results(console, folder)


# --- files ---------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Return versions, device and commit of this process."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    gpu = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name() if gpu else f"{processor()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "spins": os.environ.get("GOMP_SPINCOUNT"),
        "packages": versions,
        "git": code_commit(ROOT),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def processor() -> str:
    """Return the CPU's name, where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def finish(config: Config, state: TrainingState, cost: Cost, wall: float, precision: str) -> None:
    """Write the weights, the loss curve and, last, `summary.json`."""
    folder, model, step = config.folder, state.model, state.step
    weights = dict(zip(state.names, state.ema, strict=True))
    weights |= {k: v for k, v in model.state_dict().items() if k not in weights}
    checkpoint.export(folder / "model.safetensors", model, weights, config, step, state.info)
    curve = evaluation.draw_curve(folder)
    lines = filter(log.is_score, log.read_jsonl(folder / "scores.jsonl"))
    scores = {line["metric"]: line["value"] for line in lines if line.get("step") == step}
    last = (log.read_metrics(folder) or [{}])[-1]
    summary = {
        "status": "done",
        "name": config.name,
        "hash": config.hash,
        "backbone": config.backbone["name"],
        "size": config.size,
        "data": config.data["name"],
        "task": config.task,
        "route": config.resolved_route,
        "scale": config.scale,
        "seed": config.seed,
        "precision": precision,
        "step": step,
        **{key: getattr(cost, key) for key in _COSTS},
        "macs": state.macs,
        "wall_s": round(state.seconds, 1),
        "session_s": round(wall, 1),
        **{key: last.get(key) for key in ("images_per_s", "loss", "skipped")},
        "scores": scores,
        "loss_curve": curve,
    }
    log.write_status(folder, "done", step=step, steps=config.train.steps)
    atomic_write(folder / "summary.json", json.dumps(summary, indent=1))


# --- terminal ------------------------------------------------------------------------------------


def show_results(console: log.Console, folder: Path) -> None:
    """Print the scores of a finished run and where everything is."""
    summary = read_summary(folder)
    assert summary is not None, "a finished run"
    shown = summary["scores"] | {
        "loss": summary.get("loss"), "training time": log.clock(summary["wall_s"]),
        "images per second": summary.get("images_per_s"),
    }  # fmt: skip
    rows = [[k, f"{v:.4g}" if is_number(v) else str(v).lower()] for k, v in shown.items()]
    title = f"{summary['name']}, step {summary['step']}"
    console.say()
    console.table(title, rows, ["score", "value"])
    for label, name in (
        ("samples", "samples/final.png"),
        ("progress", "progress.gif"),
        ("loss curve", "loss.png"),
        ("weights", "model.safetensors"),
        ("scores", "scores.jsonl"),
    ):
        if (folder / name).exists():
            console.say(f"{label:<12}{folder / name}")
