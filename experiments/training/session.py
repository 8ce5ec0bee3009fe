"""Around the training loop: lock, banner, resume, final scores, the files that a run leaves."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments.metrics import scoring
from experiments.runtime import console as log
from experiments.runtime import signals
from experiments.runtime.command import ROOT, Interrupted
from experiments.runtime.files import atomic_write, code_commit
from experiments.runtime.locks import locked
from experiments.sampling.pipeline import SamplingPipeline
from experiments.training import build, checkpoint, evaluation
from experiments.training.loop import Run
from routing.plain import json_of

if TYPE_CHECKING:
    from experiments.config.schema import Config


def run(config: Config, *, quiet: bool = False) -> Path:
    """Train `config` in its folder; see `experiments.training.loop.train`."""
    accelerator = build.make_accelerator(config)
    console = log.Console(quiet or not accelerator.is_main_process)
    folder = config.folder
    done = finished(folder, config)
    if done is not None:
        console.say(
            f"done already: {folder} has {done} steps; train.steps={2 * done} would go on from "
            "there"
        )
        show_results(console, folder)
        return folder
    with signals.installed():
        if not accelerator.is_main_process:
            _session(config, accelerator, console)
            return folder
        with locked(folder):
            try:
                _session(config, accelerator, console)
            except Interrupted as stop:
                status = "stopped" if stop.reason == "SIGINT" else "preempted"
                log.write_status(
                    folder, status, step=stop.step, steps=config.train.steps, error=stop.reason
                )
                raise Interrupted(
                    stop.reason,
                    stop.step,
                    f"{stop.reason}: saved step {stop.step}; type the same command to go on",
                ) from None
            except BaseException as error:
                last = " ".join(str(error).split())[:500]
                _try_status(
                    folder,
                    "failed",
                    error=f"{type(error).__name__}: {last}",
                    steps=config.train.steps,
                )
                raise
    return folder


def _try_status(folder: Path, status: str, **fields: Any) -> None:
    # On a full disk the first error counts, not that this one cannot be written down.
    try:
        log.write_status(folder, status, **fields)
    except OSError:
        # There is no room for a second file, but the heartbeat has room of its own.
        with contextlib.suppress(OSError, ValueError):
            known = json_of((folder / "status.json").read_bytes())
            (folder / "status.json").write_text(json.dumps({**known, "status": status}))


def finished(folder: Path, config: Config) -> int | None:
    """Return the steps of a finished run with at least the steps asked for, else None."""
    summary = read_summary(folder)
    if summary is None or summary["step"] < config.train.steps:
        return None
    return summary["step"]


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return what a finished run says of itself, or None: it is not done, or that is damaged."""
    try:
        summary = json_of((folder / "summary.json").read_bytes())
        good = summary["status"] == "done" and type(summary["step"]) is int
        good = good and isinstance(summary["name"], str)
        numbers = [summary["wall_s"], *dict(summary["scores"]).values()]
        numbers += [summary[key] for key in ("loss", "images_per_s") if summary[key] is not None]
        good = good and all(type(value) in (int, float) for value in numbers)
        good = good and 0 <= summary["wall_s"] < math.inf
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return summary if good else None


def _session(config: Config, accelerator: Any, console: log.Console) -> None:
    began = time.monotonic()
    folder = config.folder
    work = Run(config, accelerator, console)
    resumed = work.resume()
    if not resumed and config.init:
        work.start_from(config.init)
    if accelerator.is_main_process:
        (folder / "summary.json").unlink(missing_ok=True)
        log.cut_records(folder, work.step)
        write_about(folder, config)
        log.write_status(folder, "running", step=work.step, steps=config.train.steps)
    banner(console, config, work, resumed)
    # Guidance and sampler are refused before training too, if they do not fit this model.
    SamplingPipeline.make(work.model, config)
    if config.eval["name"] != "none" and work.step < config.train.steps:
        # What a score lacks (weights, a reference) is said now, not after the last step.
        if work.dataset.can_decode:
            for note in scoring.check(config, work.dataset, work.model, work.device):
                console.once(note)
        else:
            # Without an autoencoder there is still a model to train, and to score elsewhere.
            console.say(f"no pictures and no scores in this run: {work.dataset.cannot_decode}")
    log.open_tracker(config.log, folder, config.name, config.to_dict(), accelerator)
    work.fit()
    if accelerator.is_main_process:
        finish(work, time.monotonic() - began)
    accelerator.wait_for_everyone()
    if config.log != "none":
        accelerator.end_training()
    show_results(console, folder)


# --- files ---------------------------------------------------------------------------------------


def write_about(folder: Path, config: Config) -> None:
    """Write `config.yaml` and `env.json`."""
    import yaml

    atomic_write(folder / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
    atomic_write(folder / "env.json", json.dumps(environment(), indent=1))


def environment() -> dict[str, Any]:
    """Return versions, device and commit of this process."""
    packages = (
        "torch",
        "numpy",
        "timm",
        "accelerate",
        "hydra-core",
        "mamba-ssm",
        "causal-conv1d",
        "fla-core",
        "triton",
    )
    versions: dict[str, str | None] = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name()
        if cuda
        else f"{processor()}, {os.cpu_count()} cores",
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


def finish(work: Run, wall: float) -> None:
    """Write the weights, the loss curve and, last, `summary.json`."""
    config, folder, cost = work.config, work.folder, work.cost
    weights = dict(zip(work.names, work.ema, strict=True))
    weights |= {k: v for k, v in work.model.state_dict().items() if k not in weights}
    checkpoint.export(
        folder / "model.safetensors", work.model, weights, config, work.step, work.info
    )
    curve = evaluation.draw_curve(folder)
    scores = {
        s["metric"]: s["value"]
        for s in log.read_jsonl(folder / "scores.jsonl")
        if s.get("step") == work.step and log.is_score(s)
    }
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
        "step": work.step,
        "params": cost.params,
        "macs_dense": cost.macs_dense,
        "macs_routed": cost.macs_routed,
        "macs_dense_no_attention": cost.macs_dense_no_attention,
        "macs_routed_no_attention": cost.macs_routed_no_attention,
        "macs": work.macs,
        "wall_s": round(work.seconds, 1),
        "session_s": round(wall, 1),
        "images_per_s": last.get("images_per_s"),
        "loss": last.get("loss"),
        "skipped": last.get("skipped"),
        "scores": scores,
        "loss_curve": curve,
    }
    log.write_status(folder, "done", step=work.step, steps=config.train.steps)
    atomic_write(folder / "summary.json", json.dumps(summary, indent=1))


# --- terminal ------------------------------------------------------------------------------------


def banner(console: log.Console, config: Config, work: Run, resumed: bool) -> None:
    """Say what is about to be trained."""
    for line in banner_lines(config, work.cost, work.model.describe()):
        console.say(line)
    state = f"resumed at step {work.step}" if resumed else "new; the same command resumes it"
    if config.init and not resumed:
        state += f"; weights from {config.init}"
    where = f"{work.accelerator.num_processes} x {work.device.type}"
    console.say(f"run         {work.folder}   ({state})")
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' if count > 1 else ''}"
    console.say(f"device      {where}, {threads}, {config.train.precision}")
    console.say()


def banner_lines(config: Config, cost: Any, kernels: Sequence[str]) -> list[str]:
    """Return the lines that describe a model and its route (see the README's picture)."""
    from experiments.training.routes import first_route
    from routing.route import Route

    route = Route() if config.routing.off_after == 0 else first_route(config)
    name = f"{config.backbone['name']}-{config.size}"
    flops = f"{log.big(cost.macs_dense)} MACs per image"
    if route:
        share = 1 - cost.macs_routed / cost.macs_dense
        flops += f" dense -> {log.big(cost.macs_routed)} routed (-{share:.0%})"
    tokens = f"tokens {max(cost.tokens)}"
    if route:
        tokens += f" -> {min(cost.tokens)} inside, chosen by {config.routing.selection}"
    return [
        f"{name}   {log.big(cost.params)} parameters   {flops}   route {config.resolved_route}",
        f"blocks      {route.ruler(config.depth)}   {tokens}",
        *(f"kernel      {line}" for line in kernels),
    ]


def show_results(console: log.Console, folder: Path) -> None:
    """Print the scores of a finished run and where everything is."""
    summary = read_summary(folder)
    assert summary is not None, "a finished run"
    rows = [[name, f"{value:.4g}"] for name, value in summary["scores"].items()]
    loss, speed = (
        "none" if summary.get(key) is None else f"{summary[key]:.4g}"
        for key in ("loss", "images_per_s")
    )
    rows += [
        ["loss", loss],
        ["training time", log.clock(summary["wall_s"])],
        ["images per second", speed],
    ]
    console.say()
    console.table(
        f"{summary['name']}, step {log.grouped(summary['step'])}", rows, ["score", "value"]
    )
    for label, name in (
        ("samples", "samples/final.png"),
        ("progress", "progress.gif"),
        ("loss curve", "loss.png"),
        ("weights", "model.safetensors"),
        ("scores", "scores.jsonl"),
    ):
        if (folder / name).exists():
            console.say(f"{label:<12}{folder / name}")
