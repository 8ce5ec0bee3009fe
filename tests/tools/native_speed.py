"""What the C++ kernels gain: python tests/tools/native_speed.py [tokens=64] [batch=64] [rounds=9] ...

Each operation in turn with and without them, in one process; medians over rounds of the ratio of
process CPU times (clock=wall: of elapsed times, for threads=2). Of whole steps:
`python experiments/bench.py parts=variants variants=torch`.
"""

import os
import statistics
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
OPTIONS = {
    "size": "T/2", "tokens": "64", "batch": "64", "rounds": "9", "threads": "1", "clock": "cpu",
    "precision": "fp32",
} | dict(word.split("=") for word in sys.argv[1:] if "=" in word)  # fmt: skip
os.environ["OMP_NUM_THREADS"] = OPTIONS["threads"]

import torch  # noqa: E402

from backbones.ops import biwkv, conv, native, shift, ssd  # noqa: E402
from backbones.ops.dispatch import without_native  # noqa: E402
from backbones.sizes import parse_size  # noqa: E402
from routing.layout import Layout  # noqa: E402

SIZE = parse_size(OPTIONS["size"])
TOKENS, BATCH, ROUNDS = (int(OPTIONS[key]) for key in ("tokens", "batch", "rounds"))


def plainly(run):
    with without_native():
        run()


def compare(label, run):
    now = time.process_time if OPTIONS["clock"] == "cpu" else time.perf_counter
    seconds = [], []
    for n in range(ROUNDS + 2):
        for on, call in enumerate((lambda: plainly(run), run)):
            began = now()
            call()
            if n > 1:
                seconds[on].append(now() - began)
    ratio = statistics.median(a / b for a, b in zip(*seconds, strict=True))
    before, after = (1000 * statistics.median(s) for s in seconds)
    print(f"{label:34} {before:9.2f} {after:9.2f} ms {ratio:6.2f}x", flush=True)


class Fused:
    """The operations as they are when they are called: with the library or without."""

    def __getattr__(self, name):
        return lambda *given: getattr(native.ACTIVE.operations["cpu"], name)(*given)


fused = Fused()


def ops():
    dtype = torch.float32 if OPTIONS["precision"] == "fp32" else torch.bfloat16
    width, heads, state = SIZE.width, 2 * SIZE.width // SIZE.headdim, SIZE.state
    draw = lambda *s, t=dtype: torch.randn(*s).to(t).requires_grad_()  # noqa: E731
    side = int(TOKENS**0.5)
    rows = torch.stack([torch.randperm(TOKENS)[: TOKENS // 2].sort()[0] for _ in range(BATCH)])
    for label, layout in (("", Layout((side, side))), (", half of the tokens", Layout((side, side), rows))):
        n = TOKENS // 2 if label else TOKENS
        place = layout.positions("raster") if label else None
        tokens = lambda c, n=n: draw(BATCH, n, c)  # noqa: E731
        inner, f32 = 2 * width, torch.float32
        mixed = inner + 2 * state
        cases = {
            "biwkv": (lambda k, v, w, u, p=place: biwkv.biwkv(k, v, w, u, p, TOKENS),
                      [tokens(width), tokens(width), draw(width, t=f32), draw(width, t=f32)]),
            "ssd": (lambda p, d, a, s: ssd.ssd_packed(p, d.sigmoid(), -a.exp(), s, width=SIZE.headdim),
                    [tokens(mixed), draw(BATCH, n, heads, t=f32), draw(heads, t=f32), draw(heads, t=f32)]),
            "adaLN": (lambda x, a, b, y=layout: fused.adaln(x, a, b, y.scan_order("raster:reversed")),
                      [draw(BATCH, n, width, t=f32), *(draw(BATCH, 1, width, t=f32) for _ in range(2))]),
            "gated sum": (lambda x, g, y, z=layout: fused.gated_sum(x, g, y, z.scan_order("raster:reversed")),
                          [draw(BATCH, n, width, t=f32), draw(BATCH, 1, width, t=f32), tokens(width)]),
            "gated RMS norm": (fused.gated_rms_norm, [tokens(inner), tokens(inner), draw(inner, t=f32)]),
            "convolution + SiLU": (lambda x, w, b, p=place: conv.causal_conv(x, w, b, p, activation="silu"),
                                   [tokens(mixed), draw(mixed, 4, t=f32), draw(mixed, t=f32)]),
            "shift + mix": (lambda x, m, y=layout: torch.stack(shift.shift_mix(x, y.neighbours(), m)),
                            [tokens(width), draw(3, width, t=f32)]),
            "GELU": (fused.gelu, [tokens(4 * width)]),
            "squared ReLU": (fused.squared_relu, [tokens(4 * width)]),
            "sigmoid gate": (fused.sigmoid_gate, [tokens(width), tokens(width)]),
        }  # fmt: skip
        for name, (function, given) in cases.items():
            probe = torch.randn_like(function(*given))

            def run(function=function, given=given, probe=probe):
                torch.autograd.grad(function(*given), given, probe)

            compare(name + label, run)


if __name__ == "__main__":
    torch.set_num_threads(int(OPTIONS["threads"]))
    ops()
