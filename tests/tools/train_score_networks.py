"""Train the score networks that come with the package, and print their quality and checksums.

    python tests/tools/train_score_networks.py digits
    python tests/tools/train_score_networks.py mnist
    python tests/tools/train_score_networks.py fashion --path FOLDER

Each call trains a data set's classifier and autoencoder on its training split (seconds for digits,
minutes for fashion, one CPU thread) and writes them to --out. By default nothing of the package is
overwritten: to ship new networks, give `--out experiments/evaluation/score_networks` and enter the
checksums in `small_networks.SHIPPED`. Scores of different networks are never paired, so a new
network starts a new group of scores.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.data.dataset import create
from experiments.evaluation.images import whole_split
from experiments.evaluation.small_networks import (
    SHIPPED,
    KeptNetwork,
    checksum,
    own_network_plan,
    train_network,
)
from experiments.runtime.command import run_command
from experiments.runtime.parser import Parser


def train(data: dict[str, Any], kind: str, folder: Path) -> KeptNetwork:
    """Train the `classifier` or `autoencoder` of a data set and write it to a folder."""
    dataset = create(data)
    path = folder / f"{dataset.name}-{kind}.safetensors"
    return train_network(path, own_network_plan(kind, dataset), partial(whole_split, dataset))


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return its exit code."""
    parser = Parser(
        "python tests/tools/train_score_networks.py", description=(__doc__ or "").splitlines()[0]
    )
    names = sorted({name.partition("-")[0] for name in SHIPPED})
    parser.add_argument("data", choices=names, help="data set")
    parser.add_argument("--path", help="folder with Fashion-MNIST's four IDX files")
    parser.add_argument("--out", type=Path, default=Path("score_networks"), help="folder to write")
    options = parser.parse_args(argv)
    data = {"name": options.data}
    if options.path is not None:
        data["path"] = options.path
    for kind in ("classifier", "autoencoder"):
        network = train(data, kind, options.out)
        name = f"{options.data}-{kind}"
        digest = checksum(network.model)
        same = "equals" if digest == SHIPPED[name] else "differs from"
        print(f"{network.path}  held-out {network.quality:.4f}  SHA-256 {digest}")
        print(f"{name}: {same} the weights that come with the package", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
