"""Bidirectional WKV: against the literal sum, in every form of positions, and at the edges of its range."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backbones.ops import biwkv as op
from backbones.ops.dispatch import KernelError

ROOT = Path(__file__).resolve().parents[2]


def literal(k, v, w, u, position, length):
    """Sums over Python floats, one number at a time: shares nothing with the implementation."""
    batch, tokens, channels = k.shape
    out = torch.empty(batch, tokens, channels, dtype=torch.float64)
    for b in range(batch):
        for c in range(channels):
            for t in range(tokens):
                above = below = 0.0
                for s in range(tokens):
                    if s == t:
                        weight = math.exp(k[b, t, c] + u[c] / length)
                    else:
                        gap = abs(int(position[b, t]) - int(position[b, s]))
                        weight = math.exp(k[b, s, c] - w[c] * (gap - 1) / length)
                    above += weight * float(v[b, s, c])
                    below += weight
                out[b, t, c] = above / below
    return out


def positions(kind, batch, tokens, length, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(length, generator=g)[:tokens].sort()[0] for _ in range(batch)]
    return {"rank": None, "shared": rows[0], "own": torch.stack(rows)}[kind]


def inputs(batch, tokens, channels, dtype=torch.float64, seed=0, decay=4.0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    k, v, w, u = draw(batch, tokens, channels), draw(batch, tokens, channels), draw(channels), draw(channels)
    return [m.to(dtype).requires_grad_() for m in (k, v, decay * w, u)]


@pytest.mark.parametrize("kind", ["rank", "shared", "own"])
@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_equals_the_literal_sum(kind, implementation):
    k, v, w, u = inputs(2, 7, 3)
    position = positions(kind, 2, 7, 12)
    rows = torch.arange(7) if position is None else position
    expected = literal(k.detach(), v.detach(), w.detach(), u.detach(), rows.expand(2, -1), 12)
    y = op.biwkv(k, v, w, u, position, 12, kernel=implementation)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("tokens", [1, 2, 48])
@pytest.mark.parametrize("kind", ["rank", "shared", "own"])
def test_gradients_equal_the_references(tokens, kind):
    values = inputs(2, tokens, 5)
    position = positions(kind, 2, tokens, 64)
    fast = op.biwkv(*values, position, 64, kernel="torch")
    plain = op.reference(*values, position, 64)
    g = torch.randn(fast.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-13)
    for a, b in zip(torch.autograd.grad(fast, values, g), torch.autograd.grad(plain, values, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_a_key_of_minus_infinity_deletes_its_token():
    """The masking oracle: the routed operator is the dense one without the dropped tokens."""
    k, v, w, u = inputs(2, 20, 3)
    kept = positions("own", 2, 9, 20)
    index = kept[..., None].expand(-1, -1, 3)
    dropped = torch.ones(2, 20, dtype=torch.bool).scatter(1, kept, False)
    routed = op.biwkv(k.gather(1, index), v.gather(1, index), w, u, kept, 20)
    dense = op.biwkv(k.masked_fill(dropped[..., None], -torch.inf), v, w, u, None, 20).gather(1, index)
    torch.testing.assert_close(routed, dense, rtol=0, atol=1e-14)
    weight = torch.randn(routed.shape, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((routed * weight).sum(), (k, v, w, u), retain_graph=True),
        torch.autograd.grad((dense * weight).sum(), (k, v, w, u)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 33),
    extra=st.integers(0, 40),
    decay=st.floats(-60, 60),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_float32_stays_exact_for_every_decay_and_wild_keys(tokens, extra, decay, scale, seed):
    length = tokens + extra
    k, v, _, u = inputs(1, tokens, 2, torch.float32, seed)
    k = (k * scale).detach().requires_grad_()
    w = torch.full((2,), decay, requires_grad=True)
    position = positions("own", 1, tokens, length, seed)
    y = op.biwkv(k, v, w, u, position, length, kernel="torch")
    expected = op.reference(k.double(), v.double(), w, u, position, length)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4)
    for grad in torch.autograd.grad(y.sum(), (k, v, w, u)):
        assert torch.isfinite(grad).all()


def test_decay_is_clamped_where_float32_would_overflow():
    k, v, _, u = inputs(1, 8, 1, torch.float32)
    far = op.biwkv(k, v, torch.full((1,), 1e4), u, None, 8)
    assert torch.equal(far, op.biwkv(k, v, torch.full((1,), op.MAX_DECAY), u, None, 8))
    assert torch.isfinite(far).all()


def test_half_precision_inputs_are_computed_in_float32():
    k, v, w, u = (m.detach() for m in inputs(2, 32, 8, torch.float32))
    exact = op.reference(k, v, w, u)
    half = op.biwkv(k.bfloat16(), v.bfloat16(), w, u)
    assert half.dtype == torch.bfloat16
    # bfloat16 keys are exponents: an error of 2^-9 |k| each, and 2^-9 of the output on top.
    assert (half.float() - exact).norm() / exact.norm() < 2e-2
    torch.testing.assert_close(op.biwkv(k, v, w, u), exact, rtol=0, atol=2e-6)


def test_what_is_saved_grows_with_the_tokens_not_their_square():
    def saved(tokens):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            op.biwkv(*inputs(1, tokens, 4, torch.float32))
        return sum(sizes)

    assert saved(512) < 2.2 * saved(256)


def test_a_length_below_the_tokens_is_an_error():
    k, v, w, u = inputs(1, 8, 1)
    with pytest.raises(KernelError, match="length 4 is smaller than the 8 tokens"):
        op.biwkv(k, v, w, u, None, 4)


KERNEL = """
import sys, torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/backbones"]
from test_ops_biwkv import inputs, positions
from backbones.ops import biwkv as op
# One token, one chunk, three chunks of which the last is ragged, and more channels than a program.
for tokens, channels, kind in ((1, 3, "rank"), (9, 3, "shared"), (70, 3, "rank"), (70, 3, "own"), (33, 40, "own")):
    values = inputs(2, tokens, channels, torch.float32)
    position = positions(kind, 2, tokens, 96)
    fast = op.biwkv(*values, position, 96, kernel="triton")
    plain = op.reference(*[m.double() for m in values], position, 96)
    torch.testing.assert_close(fast.double(), plain, rtol=0, atol=1e-5)
    g = torch.randn_like(fast)
    for a, b in zip(torch.autograd.grad(fast, values, g), torch.autograd.grad(plain, values, g.double())):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
# bfloat16 inputs and gradient: the output and the gradients are those of float64, rounded once. The
# interpreter cuts digits off (2^-7), where a GPU rounds (2^-8).
whole = inputs(2, 70, 4, torch.float32)
values = [m.detach().bfloat16().requires_grad_() for m in whole[:2]] + whole[2:]
position = positions("own", 2, 70, 96)
saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda m: saved.append(m) or m, lambda m: m):
    half = op.biwkv(*values, position, 96, kernel="triton")
# Nothing as large as the inputs is kept for the backward pass but these, as they came.
assert [m.dtype for m in saved if m.numel() >= values[0].numel()] == [torch.bfloat16] * 2
exact = [m.detach().double().requires_grad_() for m in values]
plain = op.reference(*exact, position, 96)
assert half.dtype == torch.bfloat16
torch.testing.assert_close(half.double(), plain, rtol=2**-7, atol=1e-5)
g = torch.randn(half.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
grads = torch.autograd.grad(half, values, g)
assert [grad.dtype for grad in grads] == [m.dtype for m in values]
for grad, expected in zip(grads, torch.autograd.grad(plain, exact, g.double())):
    torch.testing.assert_close(grad.double(), expected, rtol=2**-7, atol=1e-5)
print("equal")
"""


@pytest.mark.slow
def test_the_kernel_equals_the_reference_in_tritons_interpreter():
    pytest.importorskip("triton")
    # Triton reads the variable when it is imported: a process of its own.
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNEL, str(ROOT)], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


COMPILE = """
import itertools, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/backbones"]
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import backbones.ops.biwkv_triton as kernels
TYPES = {"position_ptr": "*i32", "centre": "fp32", "T": "constexpr", "C": "constexpr", "SUMS": "constexpr"}
HALF = ("k_ptr", "v_ptr", "y_ptr", "grad_ptr", "dk_ptr", "dv_ptr")
for fn, sums in itertools.product((kernels._forward, kernels._backward), (True, False)):
    types = {
        n: TYPES.get(n) or ("*bf16" if n in HALF else "*fp32" if n.endswith("_ptr") else "i32")
        for n in fn.arg_names
    }
    constants = {"T": kernels.CHUNK, "C": kernels.CHANNELS, "SUMS": sums}
    source = ASTSource(fn=fn, signature=types, constexprs=constants)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(binary.asm["cubin"]) > 1000
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton's assembler is in its Linux wheels")
def test_the_kernel_compiles_for_an_h100_without_one(tmp_path):
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, str(ROOT)], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "compiled"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rank", "shared", "own"])
def test_the_kernel_equals_the_torch_path_on_a_gpu(kind):
    values = [m.detach().cuda().requires_grad_() for m in inputs(4, 256, 384, torch.float32)]
    position = positions(kind, 4, 256, 1024)
    position = None if position is None else position.cuda()
    fast = op.biwkv(*values, position, 1024, kernel="triton")
    plain = op.biwkv(*values, position, 1024, kernel="torch")
    g = torch.randn_like(fast)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    for a, b in zip(torch.autograd.grad(fast, values, g), torch.autograd.grad(plain, values, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
