"""Two processes train an attached model as one process would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("timm")

_SCRIPT = """
import torch, routing
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

def build():
    torch.manual_seed(0)
    return VisionTransformer(img_size=16, patch_size=4, num_classes=5, embed_dim=16, depth=4, num_heads=2).train()

x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
mine = slice(rank * 3, rank * 3 + 3)
model = torch.nn.parallel.DistributedDataParallel(build())
with routing.attach(model.module, "1-2@0.75") as attached:
    model(x[mine]).square().mean().backward()
    ids = attached.inner[0].ids
both = [torch.empty_like(ids) for _ in range(world)]
dist.all_gather(both, ids)
dist.destroy_process_group()

alone = build()
with routing.attach(alone, "1-2@0.75") as attached:
    alone(x).square().mean().backward()
    assert torch.equal(torch.cat(both), attached.inner[0].ids)
for a, b in zip(model.module.parameters(), alone.parameters()):
    assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)
print(f"agreed {rank}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*run, str(script)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "agreed 0" in done.stdout and "agreed 1" in done.stdout
