"""Write run folders in the suite's format, with curves that behave like training, for the analysis tests."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from analysis.measurements.guidance_scale_file import FORMAT
from analysis.measurements.similarity_file import SimilarityFile

METRIC = "FD-500 (digits-classifier)"
ACCURACY = "accuracy-500 (digits-classifier)"
DEPTH = 12


def config(backbone="dit", route="none", seed=0, **over):
    """A resolved configuration; keyword arguments are dotted keys with `__` for the dot."""
    values = {
        "seed": seed, "scale": "tiny", "size": "T/1", "route": route, "task": "class",
        "backbone": {"name": backbone, "rope": False, "depth": None, "width": None, "heads": None},
        "data": {"name": "digits", "root": None},
        "objective": {"name": "edm", "p_mean": -1.2, "p_std": 1.2},
        "sampler": {"name": "heun", "steps": 12},
        "guidance": {"name": "cfg", "scale": 1.5},
        "eval": {"samples": 500, "metrics": ["fd", "accuracy"], "features": ["digits-classifier"]},
        "routing": {
            "selection": "random", "shared": False, "block": 2, "reinsert": "identity", "remove": "start",
            "random_end": False, "fp32_after": True, "checkpoint": "none", "schedule": "constant", "off_after": 1.0,
        },
        "train": {
            "steps": 400, "batch": 64, "micro_batch": None, "lr": 1e-3, "betas": [0.9, 0.999], "clip": None,
            "ema": 0.98, "precision": "fp32", "log_every": 10, "loss": "plain",
        },
        "init": None, "log": "none", "dry": False, "experiment": None, "paths": {"runs": "runs", "cache": None},
    }  # fmt: skip
    for key, value in over.items():
        target = values
        *path, last = key.split("__")
        for part in path:
            target = target[part]
        target[last] = value
    return values


def sparse(route):
    """Blocks inside the route and its rate."""
    if route == "none":
        return 0, 0.0
    blocks, rate = 0, 0.5
    for segment in route.partition("/")[0].split("+"):
        span, _, text = segment.partition("@")
        rate = float(text or 0.5)
        start, end = map(int, span.split("-"))
        blocks += end - start + 1
    return blocks, rate


def gain(values):
    """How much faster this run learns than the dense one of its family."""
    route = values["route"]
    if route == "none":
        return 1.0
    blocks, rate = sparse(route)
    start = int(route.split("-")[0])
    gain = 1 + 0.25 * blocks * (1 - abs(rate - 0.5) * 3.2) * (1.0 if start else 0.8)
    if route.endswith("10"):
        gain *= 0.3
    if values["routing"]["selection"] == "unsorted" and values["backbone"]["name"] != "dit":
        gain *= 0.25
    if values["routing"]["reinsert"] == "none":
        gain *= 0.6
    return max(gain, 0.2)


def fd(values, step):
    """A falling distance with a family's level and a seed's offset."""
    level = {"dit": 40.0, "mamba": 55.0, "rwkv": 50.0}.get(values["backbone"]["name"], 45.0)
    noise = random.Random(f"{values['seed']}-{values['route']}-{step}").gauss(0, 0.4)
    offset = random.Random(values["seed"]).gauss(0, 0.8)
    return 6 + level * math.exp(-step * gain(values) / 350) + offset + noise


def score(values, step, value, metric=METRIC, **over):
    """One line of scores.jsonl."""
    line = {
        "metric": metric, "key": "fd", "value": value, "n": 500, "features": "digits-classifier@1f2e3d4c",
        "reference": "digits-test@aabbccdd", "seed": 100000, "guidance": "cfg scale=1.5", "sampler": "heun steps=12",
        "step": step, "macs_per_sample": 4.6e9, "better": "lower", "weights": "ema",
    }  # fmt: skip
    return line | over


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(root, backbone="dit", route="none", seed=0, *, evaluations=8, guidance=False, samples=False, **over):
    """Write one finished run and return its folder."""
    values = config(backbone, route, seed, **over)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    shown = route.replace("/", "~").replace(":", "=")  # as schema.Config.name
    name = f"{backbone}-{values['size'].replace('/', '')}-{values['data']['name']}_{shown}_s{seed}-{digest}"
    folder = Path(root) / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (folder / "env.json").write_text(json.dumps({"python": "3.11.7", "torch": "2.9.0", "device": "cpu"}))
    steps, batch = values["train"]["steps"], values["train"]["batch"]
    blocks, rate = sparse(route)
    dense = 48_000_000
    routed = int(dense * (1 - blocks / DEPTH * rate * 0.98))
    speed = 800.0 * dense / routed * {"dit": 1.0, "mamba": 0.6, "rwkv": 0.8}.get(backbone, 1.0)
    logged = range(10, steps + 1, 10)
    lines(
        folder / "metrics.jsonl",
        [
            {
                "step": s, "time": s * batch / speed, "loss": 0.5 + math.exp(-s / 150), "lr": 1e-3, "grad_norm": 0.4,
                "images_per_s": speed, "macs": s * batch * routed, "skipped": 0,
            }
            for s in logged
        ],
    )  # fmt: skip
    every = max(steps // evaluations, 1)
    marks = list(range(every, steps + 1, every))
    rows = [score(values, s, fd(values, s)) for s in marks]
    rows += [score(values, s, 1 - fd(values, s) / 100, ACCURACY, key="accuracy", better="higher") for s in marks]
    if guidance:
        rows += guided(values, marks[-1])
    lines(folder / "scores.jsonl", rows)
    final = {row["metric"]: row["value"] for row in rows if row["step"] == marks[-1] and row["seed"] == 100000}
    summary = {
        "status": "done", "name": name, "hash": digest, "backbone": backbone, "size": values["size"],
        "data": values["data"]["name"], "scale": values["scale"], "seed": seed, "route": route, "step": steps,
        "params": 1_030_000, "macs_dense": dense, "macs_routed": routed, "macs_dense_no_attention": int(dense * 0.97),
        "macs_routed_no_attention": int(routed * 0.97), "wall_s": steps * batch / speed, "images_per_s": speed,
        "scores": final,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    if samples:
        (folder / "samples").mkdir()
        picture(seed, route).save(folder / "samples" / "final.png")
    return folder


def write_pairs(root, backbones=("dit",), seeds=3, routes=("none", "2-8"), **options):
    """Write a run for each backbone, seed and route; return their folders."""
    folders = []
    for backbone in backbones:
        for seed in range(seeds):
            folders += [write(root, backbone, route, seed, **options) for route in routes]
    return folders


def append(folder, *more):
    """Add lines to a run's scores."""
    with (folder / "scores.jsonl").open("a") as stream:
        stream.write("".join(json.dumps(line) + "\n" for line in more))


def evaluate(folder, name, scores, kind="ema"):
    """Write the record of a later evaluation of a run, as `evaluate.py` does."""
    (folder / "evaluations").mkdir(exist_ok=True)
    (folder / "evaluations" / f"{name}.json").write_text(json.dumps({"kind": kind, "scores": scores}))


def heldout_losses(folder, losses):
    """Replace a run's scores by held-out losses by step."""
    protocol = dict.fromkeys(("features", "guidance", "sampler", "reference"))
    rows = [score({}, *point, "heldout-loss-500", key="heldout_loss", **protocol) for point in losses.items()]
    lines(folder / "scores.jsonl", rows)


def write_weights(folder, **metadata):
    """Write a safetensors file without tensors: the header that figures and tables read."""
    content = json.dumps({"__metadata__": {key: json.dumps(value) for key, value in metadata.items()}}).encode()
    (folder / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)


def similarity_map(values, route="2-8", backbone="dit", data="digits", run="r"):
    """Return the layer similarity of a run as it is stored."""
    protocol = {"run": run, "backbone": backbone, "size": "T/1", "data": data, "route": route, "weights": "ema"}
    return SimilarityFile(np.array(values), protocol | {"levels": [0.1, 1.0], "samples": 4})


def stored_scale(route, seed, rows, **options):
    """Return what `guidance_scale.json` of a run with these rows holds."""
    run = {"run": "a", "backbone": "dit", "size": "T/1", "data": "digits", "route": route, "seed": seed, "step": 400}
    return {"format": FORMAT, **run, "notes": [], "rows": rows, **options}


def guided(values, step):
    """Scores of one checkpoint under other guidance settings."""
    base = fd(values, step)
    rows = []
    for text, factor, cost in [
        ("none scale=1.0", 1.3, 2.3e9),
        ("cfg scale=1.3", 1.05, 4.6e9),
        ("autoguidance scale=1.5", 1.02, 4.6e9),
        ("routed scale=1.5", 0.9, 1.9e9),
        ("routed scale=1.5 strong=0 weak=0.8", 0.85, 3.4e9),
        ("routed scale=1.5 strong=0.3 weak=0.8", 0.8, 3.1e9),
        ("routed scale=1.5 strong=0.3 weak=0.7", 0.95, 3.2e9),
        ("routed scale=1.5 strong=0 weak=0.7", 0.97, 3.6e9),
    ]:
        rows.append(score(values, step, base * factor, guidance=text, macs_per_sample=cost))
    return rows


def picture(seed, route):
    """An 8 x 8 grid of small blobs, the same per seed up to a shift per route."""
    generator = np.random.default_rng(seed)
    shift = sum(map(ord, route)) % 40
    image = generator.integers(0, 200, size=(128, 128, 3), dtype=np.uint8) + np.uint8(shift)
    return Image.fromarray(image)


def compile_latex(folder):
    """Compile `tables.tex` in a folder, as a user without shell escapes does; return what LaTeX prints."""
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "tables.tex"]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, errors="replace")
    assert result.returncode == 0, result.stdout[-2000:]
    return result.stdout


def as_published(results, metric="FID-50K", data="imagenet256"):
    """Return `Results` as if their distance had been measured as the paper's: its metric, on its data."""
    scores = results.scores.assign(metric=results.scores["metric"].replace(METRIC, f"{metric} (inception-adm)"))
    runs = results.runs.assign(reference=f"VIRTUAL_{data}_labeled.npz@aabbccdd")
    return replace(results, runs=runs, scores=scores)


def study(root, seeds=3, backbones=("dit", "mamba", "rwkv")):
    """A small but complete study: placement, rates, selections, baselines and guidance."""
    for backbone in backbones:
        for seed in range(seeds):
            for route in ("none", "2-8", "0-8", "3-8", "0-10", "4-8"):
                samples = route in ("none", "2-8") and seed == 0
                write(root, backbone, route, seed, samples=samples, guidance=backbone == "dit" and route == "2-8")
    for seed in range(seeds):
        write(root, "dit", "2-8@0.25", seed)
        write(root, "dit", "2-8@0.75", seed)
        write(root, "dit", "0-4+6-9", seed)
        write(root, "dit", "2-8", seed, routing__reinsert="none")
        write(root, "dit", "none", seed, objective__name="flow")
        write(root, "dit", "2-8", seed, objective__name="flow")
        for selection in ("rows", "unsorted"):
            write(root, "mamba", "2-8", seed, routing__selection=selection)
    return Path(root)
