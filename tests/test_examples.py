"""The examples of docs/attach.md run, route and learn, copied away from the repository."""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small import ROOT, SMALL


def test_examples_need_nothing_but_routing_and_the_page_names_them():
    page = (ROOT / "docs" / "attach.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 80  # as the page says
        assert f"`examples/{path.name}`" in page
        imports = set(re.findall(r"^(?:from|import) (backbones|experiments|sweeps|analysis)", path.read_text(), re.M))
        assert imports == ({"backbones"} if path.stem == "mingru" else set())


def outside(folder, *words, **environment):
    """Run a command far from the repository; return what it printed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(folder, name, *words):
    copy = shutil.copy(ROOT / "examples" / f"{name}.py", folder)
    said = outside(folder, sys.executable, copy, *words)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", said)]
    assert losses[-1] < losses[0] and set(re.findall(r"-> (\d+)", said)) == {"32"}, said
    return said


@pytest.mark.slow
def test_route_your_own_learns(capsys):
    accuracy = runpy.run_path(str(ROOT / "examples" / "route_your_own.py"))["main"]("1-3@0.5", 100)
    assert "tokens 16 -> [8] in 1-3@0.5" in capsys.readouterr().out
    assert accuracy > 0.2  # chance is 0.1; 300 steps reach about 0.8


@pytest.mark.slow
def test_a_diffusers_dit_trains_routed_and_its_own_pipeline_samples_it(tmp_path):
    example(tmp_path, "diffusers_dit", "15")
    made = [Image.open(tmp_path / f"diffusers_dit_{k}.png") for k in range(10)]
    assert {image.size for image in made} == {(64, 64)}
    assert len({image.tobytes() for image in made}) == 10


@pytest.mark.slow
def test_lora_adapters_train_routed_and_dense_inference_knows_nothing_of_it(tmp_path):
    said = example(tmp_path, "sd3_lora", "20")
    assert "attached and detached: 0.0 apart" in said
    adapters = load_file(tmp_path / "sd3_lora" / "pytorch_lora_weights.safetensors")
    idle = [key for key, value in adapters.items() if "lora_B" in key and not value.any()]
    # Nothing reads the text that leaves the last block, so its queries learn nothing.
    assert len(adapters) == 2 * 6 * 7 and [key.split(".")[2:5] for key in idle] == [["5", "attn", "add_q_proj"]]


@pytest.mark.slow
def test_a_masked_lora_trains_dense_and_routed(tmp_path):
    copy = shutil.copy(ROOT / "examples" / "masked_lora.py", tmp_path)
    said = outside(tmp_path, sys.executable, copy, "20")
    for route, tokens in (("none", "64"), ("1-4@0.5", "32")):
        lines = [line for line in said.splitlines() if line.startswith(f"{route}: step")]
        losses = [float(re.search(r"loss (\S+)", line)[1]) for line in lines]
        assert losses[-1] < losses[0] and all(line.endswith(f"-> {tokens}") for line in lines)
    held_out = [float(loss) for loss in re.findall(r"new noise (\S+)", said)]
    assert len(held_out) == 2 and abs(held_out[0] - held_out[1]) < 0.1 * held_out[0]


@pytest.mark.slow
def test_a_routed_pass_guides_a_flow_model(tmp_path):
    said = example(tmp_path, "routed_guidance", "20", "5")
    assert len(re.findall(r"scale \S+: .* \S+% of samples", said)) == 3

    flow = runpy.run_path(str(ROOT / "examples" / "routed_guidance.py"))
    torch.manual_seed(0)
    model, labels = flow["Flow"]().eval(), torch.arange(4)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    for time in torch.linspace(1, 0, 4)[:-1]:
        x = x - model(x, time.expand(4), labels).detach() / 3
    at = {scale: flow["sample"](model, labels, scale, steps=3) for scale in (1.0, 2.0)}
    torch.testing.assert_close(at[1.0], x)  # scale 1 is the model without routing
    assert not torch.allclose(at[2.0], x, atol=1e-3)


@pytest.mark.slow
def test_a_backbone_of_ones_own_is_known_to_the_real_commands(tmp_path):
    path = shutil.copy(ROOT / "examples" / "mingru.py", tmp_path)
    command = ast.get_docstring(ast.parse((ROOT / "examples" / "mingru.py").read_text()))
    setting, _, *words = shlex.split(command.splitlines()[-1])
    assert setting == "TREAD_BACKBONES=$PWD/examples/mingru.py"
    own = {"TREAD_BACKBONES": "mingru.py"}  # the copy, in the folder of the command
    more = [*SMALL, "route=1-2", "train.batch=16", "train.steps=24", "train.lr=3e-3"]
    said = outside(tmp_path, sys.executable, *words, *more, **own)
    assert re.search(r"tokens +64 -> 32", said)
    (run,) = (tmp_path / "runs").glob("mingru-*")
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert sum(losses[-3:]) < sum(losses[:3])
    outside(tmp_path, sys.executable, "-m", "experiments.sample", str(run), "--seeds", "0-3", **own)
    # The file is a command too.
    said = outside(tmp_path, sys.executable, path, *SMALL, "route=1-2", "train.steps=2")
    assert "mingru-T/1" in said and "route 1-2" in said
