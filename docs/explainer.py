"""Write the data of docs/explainer.html into the page: python docs/explainer.py (`make docs`)."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from backbones.cost import cost
from backbones.mamba import paths as mamba_paths
from backbones.sizes import SIZES
from experiments.runtime.files import atomic_write
from routing.grid import path
from routing.options import only_rate
from routing.rng import Draws
from routing.route import MODES, keep_count
from routing.routed_pass import SELECTIONS, Selection

PAGE = Path(__file__).with_suffix(".html")
MARK = re.compile(r'(?<=<script type="application/json" id="data">\n).*?(?=</script>)', re.DOTALL)
SIDE, SAMPLES = 8, 8
MOST_SKIPPED = 0.95  # the largest rate of the page


def block_cost(backbone: str, size: str) -> dict[str, int]:
    """Return the coefficients from which the page computes the MACs of one sample.

    A pass over n tokens costs `once + token n`, and each block that sees k of them
    `fixed + linear k + mix k + square k^2`; linear layers alone are the same without the last two.
    """
    one, four, sixteen = (cost(backbone, size, depth=1, input_size=2 * n) for n in (1, 2, 4))
    rise, higher = (b.per_block[0] - a.per_block[0] for a, b in ((one, four), (four, sixteen)))
    square = (higher // 12 - rise // 3) // 15
    mixed = rise // 3 - 5 * square
    token = (four.macs_dense - four.per_block[0] - one.macs_dense + one.per_block[0]) // 3
    linear = (four.macs_dense_no_attention - one.macs_dense_no_attention) // 3 - token
    return {
        "depth": SIZES[size.split("/")[0]].depth,
        "once": one.macs_dense - one.per_block[0] - token,
        "token": token,
        "fixed": one.per_block[0] - mixed - square,
        "linear": linear,
        "mix": mixed - linear,
        "square": square,
    }


def kept(mode: str, draws: Draws) -> list[list[int]] | list[dict[int, str]]:
    """Return which tokens each sample keeps.

    Usually more tokens are those of a smaller number and others: then the tokens in the order in
    which they are added. Otherwise, for each number from the page's least on, a mask as a
    hexadecimal number whose bit i is token i.
    """
    rate, n = only_rate(mode), SIDE * SIDE
    counts = range(1, n + 1) if rate is None else [keep_count(n, rate)]
    orders: list[list[int]] = [[] for _ in range(draws.batch)]
    masks: list[dict[int, str]] = [{} for _ in range(draws.batch)]
    nested = True
    for count in counts:
        subsets = Selection(mode).ids(draws, 0, (SIDE, SIDE), count).tolist()
        for order, mask, ids in zip(orders, masks, subsets, strict=True):
            order += [i for i in ids if i not in order]
            if count >= keep_count(n, MOST_SKIPPED):
                mask[count] = f"{sum(1 << i for i in ids):x}"
            nested = nested and len(order) == count
    return orders if nested else masks


def mode_of(mode: str) -> dict[str, Any]:
    """Return a selection's label on the page and its only rate, None if it may have any."""
    label = inspect.getdoc(SELECTIONS[mode]).splitlines()[0].rstrip(".")
    return {"label": f"{mode}: {label[0].lower()}{label[1:]}", "rate": only_rate(mode)}


def data() -> dict[str, Any]:
    """Return the page's data: costs, scan orders, and the selections of the samples of step 0."""
    draws = Draws(0, 0, torch.arange(SAMPLES))
    shuffle = Selection("unsorted").shuffle(draws, 0, SIDE * SIDE)
    assert shuffle is not None
    return {
        "side": SIDE,
        "costs": {
            name: {letter: block_cost(name, f"{letter}/2") for letter in ("S", "B", "L", "XL")}
            for name in ("dit", "mamba", "rwkv")
        },
        "scans": {s: [mamba_paths(s, i) for i in range(4)] for s in ("alternate", "zigzag")},
        "paths": {
            name: path((SIDE, SIDE), name).tolist()
            for name in ("raster", *(f"zigzag:{k}" for k in range(8)))
        },
        "modes": {mode: mode_of(mode) for mode in MODES},
        "kept": {mode: kept(mode, draws) for mode in MODES},
        "shuffle": shuffle.tolist(),
    }


def text() -> str:
    """Return the data as JSON, a line for each entry of the outermost object."""
    lines = (f'"{k}": {json.dumps(v, separators=(",", ":"))}' for k, v in data().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Write the current data into the page."""
    embedded = text()
    page = PAGE.read_text(encoding="utf-8")
    atomic_write(PAGE, MARK.sub(lambda _: embedded, page, count=1))
    print(f"docs/{PAGE.name}  {len(embedded)} bytes of data")


if __name__ == "__main__":
    main()
