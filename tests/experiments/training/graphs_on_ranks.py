"""Steps with and without `train.graphs` on the ranks of torchrun: what `test_graphs_with_ddp.py` starts.

    torchrun --nproc_per_node 2 graphs_on_ranks.py OUT KEY=VALUE...

Replaying runs the recorded body again. Each rank writes `OUT/RANK.json` and its parameters after the last step.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from experiments.components import make_accelerator
from experiments.config.compose import load
from experiments.training import cuda_graphs
from experiments.training.build import build_step
from experiments.training.optimizer import move_rates

STEPS = 24
events: list[str] = []


def record(body, stream):
    """Recording: here, remember that it happened."""
    events.append("record")
    return body


@contextlib.contextmanager
def on_side_stream(stream):
    """Remember what runs inside."""
    events.append("enter")
    yield
    events.append("leave")


class ReportingDDP(torch.nn.parallel.DistributedDataParallel):
    """DDP that reports when it is built, and the rate at which it times its iterations."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        events.append("build DDP")

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate):
        super()._set_ddp_runtime_logging_sample_rate(sample_rate)
        events.append(f"time one iteration of {sample_rate}")


def train(words, graphs, accelerator):
    """Return what happened, and the parameters after the last step."""
    events.clear()
    lines, all_reduces = [], []
    step = build_step(load([*words, f"train.graphs={graphs}"]), accelerator, say=lines.append)
    move_rates(step.state.optimizers, step.device)  # float32 rates on both sides

    def hook(group, bucket):
        all_reduces.append(step.state.step)
        return allreduce_hook(group, bucket)

    step.net.register_comm_hook(None, hook)
    for _ in range(STEPS):
        step.run()
        step.state.step += 1
    values = {
        "lines": lines,
        "events": [*events],
        "all_reduces": all_reduces,
        "tally": step.state.tally.values.tolist(),
    }
    return values, {name: value.detach().clone() for name, value in step.model.named_parameters()}


def main(out, words):
    cuda_graphs.record, cuda_graphs.on_side_stream = record, on_side_stream
    cuda_graphs.create_side_stream = lambda: None
    torch.nn.parallel.DistributedDataParallel = ReportingDDP
    accelerator = make_accelerator(load(words))
    results = {}
    for name, graphs in {"plain": False, "graphs": True}.items():
        results[name], parameters = train(words, graphs, accelerator)
        save_file(parameters, out / f"{name}-{accelerator.process_index}.safetensors")
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
