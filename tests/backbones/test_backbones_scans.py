"""The chunked matrix-state scans against their recurrence."""

import pytest
import torch

from backbones.ops import matrix_state as scans

B, H, K, V = 2, 2, 8, 6


def drawn(tokens, dtype=torch.float64, strength=1.0):
    torch.manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    q, k = normal(B, tokens, H, K), normal(B, tokens, H, K)
    v, g = normal(B, tokens, H, V), -strength * torch.exp(normal(B, tokens, H, K))
    unit = torch.nn.functional.normalize(normal(B, tokens, H, K), dim=-1)
    rate = torch.sigmoid(normal(B, tokens, H, K))
    given = {"q": q, "k": k, "v": v, "g": g, "u": normal(H, K), "a": -unit, "b": unit * rate}
    return {name: x.to(dtype).requires_grad_() for name, x in given.items()}


OPS = {
    "gla": (scans.gla, scans.reference, "qkvg"),
    "rwkv6": (scans.gla, scans.reference, "qkvgu"),
    "rwkv7": (scans.rwkv7, lambda q, g, k, v, a, b: scans.reference(q, k, v, g, None, a, b), "qgkvab"),
}


@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("op", OPS)
def test_chunks_equal_the_recurrence(op, tokens, strength):
    fast, plain, names = OPS[op]
    given = [drawn(tokens, strength=strength)[n] for n in names]
    got, want = fast(*given), plain(*given)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    probe = torch.randn_like(got)
    ours = torch.autograd.grad(got, given, probe, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(want, given, probe, allow_unused=True, materialize_grads=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("op", OPS)
def test_chunks_of_any_length(op, chunk):
    fast, plain, names = OPS[op]
    given = [drawn(7)[n] for n in names]
    torch.testing.assert_close(fast(*given, chunk=chunk), plain(*given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strength", [0.01, 1.0, 1000.0])
@pytest.mark.parametrize("op", OPS)
def test_float32_is_finite_and_close(op, strength):
    """Decays far below the floor too: nothing overflows, forward or backward."""
    fast, plain, names = OPS[op]
    given = [drawn(64, torch.float32, strength)[n] for n in names]
    got, want = fast(*given), plain(*(x.double() for x in given))
    assert (got - want).norm() < 1e-4 * want.norm()
    for grad in torch.autograd.grad(got.square().sum(), given):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("op", OPS)
def test_masked_tokens_leave_no_trace(op):
    fast, _, names = OPS[op]
    given = {n: x.detach() for n, x in drawn(24).items()}
    keep = torch.arange(0, 24, 3)
    masked = dict(given)
    for name in "kgab":
        masked[name] = torch.zeros_like(given[name]).index_copy(1, keep, given[name][:, keep])
    short = {n: x if n == "u" else x[:, keep] for n, x in given.items()}
    whole = fast(*(masked[n] for n in names))[:, keep]
    torch.testing.assert_close(fast(*(short[n] for n in names)), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_flash_linear_attention_takes_what_we_pass(op, monkeypatch):
    """The call for a GPU, on a stand-in with fla's signature: order of arguments, scale, first result."""
    import importlib
    import inspect
    import sys
    import warnings

    pytest.importorskip("fla")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that it has no GPU.
        published = getattr(importlib.import_module(f"fla.ops.{op}"), f"chunk_{op}")
    fast, plain, names = OPS[op]
    module = sys.modules[fast.__module__]
    signature = inspect.signature(published)
    letters = {"q": "r" if op != "gla" else "q", "g": "g" if op == "gla" else "w"}

    def stand_in(*args, **options):
        bound = signature.bind(*args, **options).arguments
        assert bound.pop("scale") == 1.0
        given = [bound[letters.get(n, n)] for n in names]
        return plain(*given), None

    monkeypatch.setattr(module, "choose", lambda *a, **k: "fla")
    monkeypatch.setattr(module, "kernel_function", lambda *a: stand_in)
    given = [drawn(5, torch.float32)[n] for n in names]
    torch.testing.assert_close(fast(*given), plain(*given))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*does not support float32 on some platforms")
@pytest.mark.parametrize("op", OPS)
def test_flash_linear_attention_agrees(op):
    fast, plain, names = OPS[op]
    torch.manual_seed(0)
    shape = (2, 100, 2, 64)
    made = {n: torch.randn(shape, device="cuda") for n in "qkv"}
    made["g"] = -0.5 * torch.rand(shape, device="cuda")
    made["u"] = torch.randn(2, 64, device="cuda")
    made["a"] = -torch.nn.functional.normalize(torch.randn(shape, device="cuda"), dim=-1)
    made["b"] = -made["a"] * torch.rand(shape, device="cuda")
    given = [made[n] for n in names]
    want = fast(*given, kernel="torch")
    assert (fast(*given, kernel="fla") - want).norm() < 1e-2 * want.norm()
