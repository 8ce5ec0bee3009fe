"""From pictures on disk to a trained model and its pictures; captions too; every foreign layout."""

import json
import math

import pytest
import torch
from data_tools import latents, write_lightning, write_store, write_tars
from PIL import Image

from experiments import prepare
from experiments.config.compose import load
from experiments.runtime import records
from experiments.training import run_evaluation as evaluation
from experiments.training.session import train

TINY = (
    "backbone=dit",
    "backbone.depth=2",
    "backbone.width=32",
    "backbone.heads=2",
    "train.steps=3",
    "train.batch=4",
    "train.log_every=1",
    "sampler.steps=2",
    "eval=none",
)


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    """One sample per row of the grid: grids have tests of their own."""
    monkeypatch.setattr(evaluation, "COLUMNS", 1)
    monkeypatch.setattr(evaluation, "PREVIEW_COLUMNS", 1)


def fit(tmp_path, *more):
    config = load([*TINY, f"paths.runs={tmp_path / 'runs'}", *map(str, more)])
    folder = train(config, quiet=True)
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    losses = [line["loss"] for line in records.read_jsonl(folder / "metrics.jsonl")]
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)
    return folder


def test_a_folder_of_photographs_becomes_a_store_and_trains(tmp_path, vae):
    from skimage import data

    for name in ("chelsea", "astronaut", "coffee", "camera", "coins"):
        picture = getattr(data, name)()
        path = tmp_path / "photos" / ("colour" if picture.ndim == 3 else "grey") / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    out = tmp_path / "latents"
    words = [tmp_path / "photos", out, "--vae", vae, "--size", 64, "--device", "cpu"]
    assert prepare.main([str(word) for word in words]) == 0
    folder = fit(tmp_path, "data=latents", f"data.path={out}", "route=0-1")
    with Image.open(folder / "samples/final.png") as grid:
        assert min(grid.size) >= 64


@pytest.mark.parametrize("layout", ["webdataset", "lightningdit"])
def test_foreign_latents_train_without_a_vae(tmp_path, layout):
    path, labels = tmp_path / "store", [k % 3 for k in range(8)]
    {
        "webdataset": lambda: write_tars(path, latents(8), labels),
        "lightningdit": lambda: write_lightning(path, latents(8), latents(8, seed=1), labels),
    }[layout]()
    more = ("data=latents", f"data.path={path}", "data.num_classes=3", "data.vae=nowhere/vae")
    folder = fit(tmp_path, *more)
    assert not (folder / "samples/final.png").exists()


def test_latents_train_without_a_vae_as_data_latents_alone_asks(tmp_path, capsys):
    """Scores are on by default, and cannot be had: the run says so and trains."""
    path = write_store(tmp_path / "store", latents(8), [k % 3 for k in range(8)])
    own = [word for word in TINY if not word.startswith("eval")]
    config = load([*own, "data=latents", f"data.path={path}", f"paths.runs={tmp_path / 'runs'}"])
    assert config.eval["name"] == "inception"
    folder = train(config)
    said = capsys.readouterr().out
    assert "no pictures and no scores in this run: the weights of nowhere/vae" in said
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    assert not (folder / "scores.jsonl").exists()


def test_scores_whose_weights_are_missing_stop_a_run_before_it_trains(tmp_path, vae):
    from routing.errors import UserError

    path = write_store(tmp_path / "store", latents(8), [k % 3 for k in range(8)])
    own = [word for word in TINY if not word.startswith("eval")]
    more = ["eval.features=[dinov2-vits14]", "eval.metrics=[fd]", "eval.dinov2_weights=nowhere.pth"]
    config = load([
        *own, *more, "data=latents", f"data.path={path}", f"data.vae={vae}",
        f"paths.runs={tmp_path / 'runs'}",
    ])  # fmt: skip
    with pytest.raises(UserError, match="nowhere.pth: no such file"):
        train(config, quiet=True)
    assert not (config.folder / "metrics.jsonl").exists()


def test_captioned_latents_train_text_to_image(tmp_path):
    text = torch.randn(8, 2, 77, 6)
    captions = [[f"a {k}", f"b {k}"] for k in range(8)]
    path = write_store(tmp_path / "store", latents(8), text=(text, captions))
    fit(tmp_path, "data=latents", f"data.path={path}", "task=text", "route=0-1")


@pytest.mark.parametrize(("backbone", "task"), [("dit", "text"), ("mamba", "class"), ("rwkv", "none")])
def test_scenes_train_every_backbone(tmp_path, backbone, task):
    more = ["train.batch=2", "route=0-1", "train.final_samples=false", *(["guidance=none"] if task == "none" else [])]
    fit(tmp_path, f"backbone={backbone}", "data=scenes", f"task={task}", *more)
