"""How far a CPU step is from its floor: python tests/tools/step_floor.py [batch=16] [rounds=9] ...

The floor is the step's matrix products at the rate of a big product, and its activations moved
through memory at the rate of a big copy: written and read once, and their gradients too. Further
arguments are keys of `experiments/bench.py`; the record is written to `out=`.
"""

import json
import statistics
import sys
import time
from itertools import product
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402

from backbones.cost import cost  # noqa: E402
from backbones.sizes import parse_size  # noqa: E402
from experiments.benchmark import bench_report  # noqa: E402
from experiments.benchmark.bench_options import BenchOptions, parse  # noqa: E402

DEFAULTS = ("size=T/2", "tokens=64", "batch=16", "rounds=9", "threads=1", "clock=cpu", "plain=false")
PASSES = 4  # of an activation through memory: written, read, and its gradient written and read


def copied_bytes_per_second() -> float:
    """The rate of a copy of 16 MB, counting what it reads and what it writes."""
    source = torch.ones(1 << 22)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(30):
        start = time.process_time()
        target.copy_(source)
        seconds.append(time.process_time() - start)
    return 2 * source.nbytes / statistics.median(seconds)


def main() -> None:
    options = parse([*DEFAULTS, *sys.argv[1:], "parts=steps"], BenchOptions)
    record = bench_report.run(options)
    rate = copied_bytes_per_second()
    print(f"\ncopy: {rate / 1e9:.1f} GB/s; step over floor, and of the floor the matrix products:")
    rows = record["steps"]
    for size, tokens in product(options.size, options.tokens):
        patch = parse_size(size, options.depth).patch
        for row in rows:
            if (row["size"], row["tokens"]) != (size, tokens):
                continue
            side = patch * round(tokens**0.5)
            model = cost(row["backbone"], size, route=row["route"], input_size=side, depth=options.depth)
            products = row["share_of_peak"] * row["seconds"]
            moved = PASSES * options.batch * model.activation_bytes / rate
            row["floor_s"] = products + moved
            row["over_floor"] = row["seconds"] / row["floor_s"]
            name = f"{row['backbone']}-{size}, {tokens} tokens, {row['route']}"
            print(f"{name:32} {row['over_floor']:.2f}x, {products / row['floor_s']:.0%}")
    record["copied_bytes_per_second"] = rate
    Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
