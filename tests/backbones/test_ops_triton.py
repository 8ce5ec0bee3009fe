"""Triton kernels (convolution, bi-WKV, random numbers): interpreted against the definition, compiled for an H100."""

import itertools
import os
import subprocess
import sys

import pytest
import test_ops_biwkv
import torch
from small import ROOT
from test_ops_biwkv import positions

from backbones.ops import biwkv, conv, dispatch, native


def inputs(tokens, channels, width, bias, dtype=torch.float32):
    g = torch.Generator().manual_seed(tokens + width)
    x, weight = torch.randn(2, tokens, channels, generator=g), torch.randn(channels, width, generator=g)
    offset = torch.randn(channels, generator=g)
    return [m.to(dtype).requires_grad_() for m in (x, weight, *([offset] if bias else []))]


def compare(tokens, channels, width, kind, silu, bias, device="cpu", tolerance=1e-5):
    values = [v.detach().to(device).requires_grad_() for v in inputs(tokens, channels, width, bias)]
    x, weight, offset = (*values, None)[:3]
    position = positions(kind, 2, tokens, 2 * tokens)  # most taps meet someone, not always the nearest
    position = None if position is None else position.to(device)
    fast = conv.causal_conv(x, weight, offset, position, silu, "triton")
    exact = [v.double() for v in (x, weight)], None if offset is None else offset.double()
    plain = conv.reference(*exact[0], exact[1], position, silu)
    torch.testing.assert_close(fast.double(), plain, rtol=tolerance, atol=tolerance)
    g = torch.randn_like(fast)
    ours, want = torch.autograd.grad(fast, values, g), torch.autograd.grad(plain, values, g.double())
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


# One token, fewer than the taps, a ragged second tile, more channels than a tile.
SHAPES = [(1, 3, 4), (3, 3, 4), (41, 5, 4), (9, 70, 4), (12, 3, 2), (8, 3, 1), (33, 3, 5)]
FORMS = [("rank", True, True), ("shared", False, False), ("own", True, True), ("own", True, False)]

INTERPRETED = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/backbones", sys.argv[1] + "/tests"]
import torch
from test_ops_biwkv import inputs as biwkv_inputs, positions
from test_ops_triton import FORMS, SHAPES, compare, inputs
from backbones.ops import biwkv as op, conv
from routing import philox_triton, rng
for index, shape in enumerate(SHAPES):
    for form in (FORMS[index % 4], FORMS[(index + 1) % 4]):
        compare(*shape, *form)
x, weight, bias = (m.detach().bfloat16() for m in inputs(9, 4, 4, True))
half = conv.causal_conv(x, weight, bias, None, True, "triton")
assert half.dtype == torch.bfloat16
torch.testing.assert_close(half, conv.causal_conv(x, weight, bias, None, True, "torch"), rtol=2e-2, atol=2e-2)

# One token, one chunk, three chunks of which the last is ragged, and more channels than a program.
for tokens, channels, kind in ((1, 3, "rank"), (9, 3, "shared"), (70, 3, "rank"), (70, 3, "own"), (33, 40, "own")):
    values = biwkv_inputs(2, tokens, channels, torch.float32)
    position = positions(kind, 2, tokens, 96)
    fast = op.biwkv(*values, position, 96, kernel="triton")
    plain = op.reference(*[m.double() for m in values], position, 96)
    torch.testing.assert_close(fast.double(), plain, rtol=0, atol=1e-5)
    g = torch.randn_like(fast)
    for a, b in zip(torch.autograd.grad(fast, values, g), torch.autograd.grad(plain, values, g.double())):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
# bfloat16 inputs and gradient: the output and the gradients are those of float64, rounded once. The
# interpreter cuts digits off (2^-7), where a GPU rounds (2^-8).
whole = biwkv_inputs(2, 70, 4, torch.float32)
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

# Random words, by sample and block of four.
index = torch.tensor([0, 5, 2**31, 2**32 + 7, 2**40 + 3])
for n, step in ((1, 1), (3, 2**32 - 1), (1030, 16)):
    for key in ((0, 1), (0xFFFFFFFF, 0x9E3779B9)):
        for sample, row in zip(index.tolist(), philox_triton.words(index, n, step, key).tolist()):
            for block in {0, (n - 1) // 4}:
                counter = (block, sample & 0xFFFFFFFF, sample >> 32, step)
                words = row[4 * block : 4 * block + 4]
                assert words == list(rng.philox(counter, key))[: len(words)]
print("equal")
"""

COMPILE = """
import itertools, sys
sys.path.insert(0, sys.argv[1])
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from backbones.ops import biwkv_triton, conv_triton as kernels
from routing import philox_triton


def compile(fn, types, constants):
    source = ASTSource(fn=fn, signature=types, constexprs=constants)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(binary.asm["cubin"]) > 1000


functions = (kernels._forward, kernels._inner_gradient, kernels._spread)
for fn, (half, gaps) in itertools.product(functions, ((0, 0), (1, 1))):
    values = {"SILU": True, "W": 4, "BIAS": True, "GAPS": bool(gaps), "T": kernels.TOKENS, "C": kernels.CHANNELS}
    own = ("x_ptr", "y_ptr", "grad_ptr", "inner_ptr", "dx_ptr")
    types = {
        n: "constexpr" if n in values else "*i32" if n == "position_ptr" and gaps
        else "*bf16" if half and n in own else "*fp32" if n.endswith("_ptr") else "i32"
        for n in fn.arg_names
    }
    compile(fn, types, {k: v for k, v in values.items() if k in types})
half = ("k_ptr", "v_ptr", "y_ptr", "grad_ptr", "dk_ptr", "dv_ptr")
for fn, sums in itertools.product((biwkv_triton._forward, biwkv_triton._backward), (True, False)):
    constants = {"T": biwkv_triton.CHUNK, "C": biwkv_triton.CHANNELS, "SUMS": sums}
    known = {"position_ptr": "*i32", "centre": "fp32", **dict.fromkeys(constants, "constexpr")}
    types = {
        n: known.get(n) or ("*bf16" if n in half else "*fp32" if n.endswith("_ptr") else "i32")
        for n in fn.arg_names
    }
    compile(fn, types, constants)
words = philox_triton._words
types = {"index_ptr": "*i64", "out_ptr": "*i64", "SIZE": "constexpr"}
compile(words, {name: types.get(name, "i64") for name in words.arg_names}, {"SIZE": 256})
assert {p.annotation_type for p in words.params if p.name in ("step", "key0", "key1")} == {"i64"}
print("compiled")
"""


def run(script, **env):
    words = [sys.executable, "-W", "ignore", "-c", script, str(ROOT)]
    done = subprocess.run(words, env=os.environ | env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_kernels_equal_the_reference_in_tritons_interpreter():
    pytest.importorskip("triton")
    # Triton reads the variable when it is imported: a process of its own.
    assert run(INTERPRETED, TRITON_INTERPRET="1", OMP_NUM_THREADS="1") == "equal"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton's assembler is in its Linux wheels")
def test_the_kernels_compile_for_an_h100_without_one(tmp_path):
    pytest.importorskip("triton")
    assert run(COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0") == "compiled"


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "silu", "bias"), FORMS)
def test_the_kernels_equal_the_reference_on_a_gpu(kind, silu, bias):
    for shape in (*SHAPES, (300, 896, 4)):
        compare(*shape, kind, silu, bias, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rank", "shared", "own"])
def test_biwkvs_kernel_equals_the_torch_path_on_a_gpu(kind):
    values = [m.detach().cuda().requires_grad_() for m in test_ops_biwkv.inputs(4, 256, 384, torch.float32)]
    position = positions(kind, 4, 256, 1024)
    position = None if position is None else position.cuda()
    fast = biwkv.biwkv(*values, position, 1024, kernel="triton")
    plain = biwkv.biwkv(*values, position, 1024, kernel="torch")
    g = torch.randn_like(fast)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    for a, b in zip(torch.autograd.grad(fast, values, g), torch.autograd.grad(plain, values, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_where_one_kernel_does_not_fit_the_next_is_taken(monkeypatch):
    """causal-conv1d knows no positions: inside a route ours runs, and both of them on one GPU."""
    monkeypatch.setattr(native.ACTIVE, "choices", {})
    monkeypatch.setattr(dispatch, "_refusal", lambda op, kernel, device: None)
    monkeypatch.setattr(dispatch, "probe", lambda op, kernel: (print, "found"))
    choice = dispatch.resolve("conv", "auto", "cuda")
    assert (choice.name, choice.fallbacks) == ("causal-conv1d", ("triton",))
    x = torch.empty(1, 2, 8, device="meta")
    monkeypatch.setitem(native.ACTIVE.choices, ("conv", "auto", "meta"), choice)
    for compact, width in itertools.product((True, False), (4, 5)):
        fits = lambda kernel: conv.kernel_misfit(kernel, 8, width, compact)  # noqa: B023, E731
        expected = "causal-conv1d" if compact and width == 4 else "triton"
        assert dispatch.choose("conv", "auto", [x], fits) == expected
    assert dispatch.resolve("conv", "causal-conv1d", "cuda").fallbacks == ()
    # Nor is fla-core, which takes seconds to import and has mamba-ssm's limits, looked for behind it.
    assert dispatch.resolve("ssd", "auto", "cuda").fallbacks == ()
