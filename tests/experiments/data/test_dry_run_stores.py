"""A dry run refuses what the run would refuse of a latent store's contents."""

import pytest
import torch
from data_tools import latents, write_lightning, write_store
from safetensors.torch import save_file

from experiments.config.compose import load
from experiments.training.dry_run import dry_run
from routing.errors import UserError


def negative(folder):
    write_store(folder, latents(6), [0, 1, 2, 0, 1, 2])
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        assert number == 0
        labels = torch.tensor([0, 1, 2, 0, 1, -1])
        save_file({"latents": torch.from_numpy(latents(6)), "labels": labels}, path)


def unlabelled(folder):
    write_store(folder, latents(6))


def unknown_scale(folder):
    arrays = latents(6, channels=16)
    write_lightning(folder, arrays, arrays.copy(), [0, 1, 2, 0, 1, 2], stats=False)


@pytest.mark.parametrize(
    ("write", "words", "more"),
    [
        (negative, "label -1", []),
        (unlabelled, "without labels", ["data.num_classes=3"]),
        (unknown_scale, "names no scale factor", ["data.scaled=no"]),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(tmp_path, write, words, more):
    write(tmp_path / "store")
    config = load([
        "data=latents", f"data.path={tmp_path / 'store'}", "backbone=dit", "size=T/2", "dry=true",
        "train.threads=1", f"paths.runs={tmp_path / 'runs'}", *more,
    ])  # fmt: skip
    with pytest.raises(UserError, match=words):
        dry_run(config)
