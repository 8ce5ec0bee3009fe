"""Piecewise chains against their plain formula, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from backbones import elementwise, layers
from routing.moves import Reorder, flat

B, T, D = 5, 7, 12


def reorders():
    """One order for the batch and one for each sample, and both as rows (B, T) of indices."""
    torch.manual_seed(1)
    rows = torch.stack([torch.randperm(T) for _ in range(B)])
    each = Reorder(flat(rows, T), flat(rows.argsort(1), T))
    return (Reorder(rows[0], rows[0].argsort()), rows[:1].expand(B, T)), (each, rows)


def ordered(name, given, rows):
    """The same chain before or behind a plain gather."""
    take = lambda x, rows: torch.stack([x[b, row] for b, row in enumerate(rows)])  # noqa: E731
    return {
        "adaln": (
            lambda x, shift, scale: layers.adaln(x, shift, scale, given),
            lambda x, shift, scale: take(CASES["adaln"][1](x, shift, scale), rows),
            CASES["adaln"][2],
        ),
        "gated_sum": (
            lambda x, gate, y: layers.gated_sum(x, gate, y, given),
            lambda x, gate, y: x + gate * take(y, rows.argsort(1)),
            CASES["gated_sum"][2],
        ),
    }[name]


CASES = {
    "adaln": (
        layers.adaln,
        lambda x, shift, scale: F.layer_norm(x, (D,), eps=1e-6) * (1 + scale) + shift,
        [(B, T, D), (B, 1, D), (B, 1, D)],
    ),
    "gated_sum": (
        layers.gated_sum,
        lambda x, gate, y: x + gate * y,
        [(B, T, D), (B, 1, D), (B, T, D)],
    ),
    "gated_rms_norm": (
        elementwise.gated_rms_norm,
        lambda y, z, w: F.rms_norm(y * F.silu(z), (D,), w, 1e-6),
        [(B, T, D), (B, T, D), (D,)],
    ),
    "mixtures": (
        lambda x, y, mix: sum(n * m for n, m in enumerate(elementwise.mixtures(x, y, mix), 1)),
        lambda x, y, mix: sum(n * (x * m + y * (1 - m)) for n, m in enumerate(mix, 1)),
        [(B, T, D), (B, T, D), (3, D)],
    ),
    "squared_relu": (elementwise.squared_relu, lambda x: x.clamp(min=0) ** 2, [(B, T, D)]),
}
CASES |= {
    f"{name}, order per {'sample' if each else 'batch'}": ordered(name, *reorders()[each])
    for name in ("adaln", "gated_sum")
    for each in (0, 1)
}


def leaves(shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("piece", [1, 2 * T * D + 1, 1 << 16])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula(case, piece, monkeypatch):
    monkeypatch.setattr(layers, "PIECE", piece)
    ours, plain, shapes = CASES[case]
    given = leaves(shapes)
    got, want = ours(*given), plain(*given)
    torch.testing.assert_close(got, want)
    probe = torch.randn(B, T, D, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(got, given, probe), torch.autograd.grad(want, given, probe), strict=True
    ):
        torch.testing.assert_close(a, b)
    torch.autograd.gradcheck(ours, given)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_path_is_the_same(case, monkeypatch):
    ours, _, shapes = CASES[case]
    given = leaves(shapes)
    want = ours(*given)
    for module in (elementwise, layers):
        monkeypatch.setattr(module, "pieces", lambda *tensors: None)
    torch.testing.assert_close(ours(*given), want)


def test_mixed_types_keep_the_stream():
    x, gate, y = leaves([(B, T, D), (B, 1, D), (B, T, D)], torch.float32)
    out = layers.gated_sum(x, gate, y.bfloat16())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x + gate * y.bfloat16().float())
