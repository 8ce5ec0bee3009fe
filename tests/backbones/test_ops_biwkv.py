"""Bidirectional WKV: against the literal sum, in every form of positions, and at the edges of its range."""

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backbones.ops import biwkv as op
from backbones.ops.dispatch import KernelError


def positions(kind, batch, tokens, length, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(length, generator=g)[:tokens].sort()[0] for _ in range(batch)]
    return {"rank": None, "shared": rows[0], "own": torch.stack(rows)}[kind]


def inputs(batch, tokens, channels, dtype=torch.float64, seed=0, decay=4.0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    k, v, w, u = draw(batch, tokens, channels), draw(batch, tokens, channels), draw(channels), draw(channels)
    return [m.to(dtype).requires_grad_() for m in (k, v, decay * w, u)]


@pytest.mark.parametrize("kind", ["shared", "own"])
@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_equals_the_masked_sum(kind, implementation):
    k, v, w, u = (m.detach() for m in inputs(2, 12, 3))
    kept = positions(kind, 2, 7, 12)
    index = kept.expand(2, -1)[..., None].expand(-1, -1, 3)
    present = torch.zeros(2, 12, dtype=torch.bool).scatter(1, index[..., 0], True)
    rows = k.gather(1, index), v.gather(1, index)
    for position, length in ((kept, 12), (None, None)):
        expected = reference.biwkv(k, v, w, u, present, rank=position is None).gather(1, index)
        y = op.biwkv(*rows, w, u, position, length, kernel=implementation)
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


def test_a_length_below_the_tokens_is_an_error():
    k, v, w, u = inputs(1, 8, 1)
    with pytest.raises(KernelError, match="length 4 is smaller than the 8 tokens"):
        op.biwkv(k, v, w, u, None, 4)
