"""From pictures on disk to a trained model and its pictures; captions and foreign latents too."""

import json
import math

import pytest
import torch
from data_tools import latents, write_store, write_tars
from PIL import Image

from experiments import prepare
from experiments.config.compose import load
from experiments.runtime import records
from experiments.training import run_evaluation as evaluation
from experiments.training.session import train

TINY = (
    "backbone=dit", "backbone.depth=2", "backbone.width=32", "backbone.heads=2", "train.steps=3", "train.batch=4",
    "train.log_every=1", "sampler.steps=2", "eval=none",
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    """One sample per row of the grid: grids have tests of their own."""
    monkeypatch.setattr(evaluation, "COLUMNS", 1)
    monkeypatch.setattr(evaluation, "PREVIEW_COLUMNS", 1)


def fit(tmp_path, *more):
    config = load([*TINY, f"paths.runs={tmp_path / 'runs'}", *map(str, more)])
    folder = train(config)
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    losses = [line["loss"] for line in records.read_jsonl(folder / "metrics.jsonl")]
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)
    return folder


def test_a_folder_of_photographs_becomes_a_store_and_trains(folder, tmp_path, vae):
    out = tmp_path / "latents"
    words = [folder, out, "--vae", vae, "--size", 64, "--device", "cpu"]
    assert prepare.main([str(word) for word in words]) == 0
    run = fit(tmp_path, "data=latents", f"data.path={out}", "route=0-1")
    with Image.open(run / "samples/final.png") as grid:
        assert min(grid.size) >= 64


def test_foreign_latents_train_without_their_vae(tmp_path, capsys):
    """Scores are on by default, and cannot be had: the run says so and trains."""
    path = write_tars(tmp_path / "store", latents(8), [k % 3 for k in range(8)])
    words = ["data=latents", f"data.path={path}", "data.num_classes=3", "data.vae=nowhere/vae", "eval=inception"]
    folder = fit(tmp_path, *words)
    assert "no pictures and no scores in this run: the weights of nowhere/vae" in capsys.readouterr().out
    assert not (folder / "samples/final.png").exists() and not (folder / "scores.jsonl").exists()


def test_captioned_latents_train_text_to_image(tmp_path):
    text = torch.randn(8, 2, 77, 6)
    captions = [[f"a {k}", f"b {k}"] for k in range(8)]
    path = write_store(tmp_path / "store", latents(8), text=(text, captions))
    fit(tmp_path, "data=latents", f"data.path={path}", "task=text", "route=0-1")
